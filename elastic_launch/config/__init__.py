"""Validated configuration of a launch, independent of the source of its values.

Invalid values are refused with a UsageError, which says what to give instead.

``launch_config``   :class:`~elastic_launch.config.launch_config.LaunchConfig` and its parts
``backends``        the rendezvous backends, and the services that keep records
``endpoints``       addresses as the user writes them
``settings``        numbers, durations and ``--rdzv-conf`` keys read from text
``output``          which streams go to the console and to files
``torch_options``   start method, NUMA binding and other options of torchrun
``torchrun_mode``   torchrun's defaults and exit codes, for wrappers that rely on them
``notice_sources``  sources of preemption notices
"""
