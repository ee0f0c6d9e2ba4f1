"""The programs ``elastic-launch``, ``elastic-composer`` and ``elasticctl``.

What a user has given and cannot be used is refused with a UsageError, which says what to give instead.

``programs``          entry points of the installed commands
``main``              ``elastic-launch``: reads flags, environment and job file, and starts the agent
``composer``          ``elastic-composer``: a world of fixed size, with the flags of Composer's launcher
``elasticctl``        status and control of a running job
``event_lines``       ``elasticctl events``; ``log_tail`` is ``elasticctl logs``, ``batch_table`` is ``elasticctl plan``
``doctor``            ``elasticctl doctor``: why this host cannot take part in a run
``doctor_storage``    the same of logs and checkpoints
``flags``             the table of flags, and argparse for it; ``help`` and ``completion`` are generated from it
``options``           flags of torchrun that describe workers
``output_flags``      flags about output and log files
``rendezvous_flags``  flags about how nodes find each other
``command``           what the workers execute: a script, a module or a program
``job``               a command line together with its job file; ``job_file_reader`` parses its YAML
``kubernetes``        defaults from an indexed Job's pod; ``slurm``: from a job step, whose mistakes are errors
"""
