"""Worker processes forked from a process that has done their imports: a start costs a fork, not an import of torch.

``processes``        starts workers: forks them where possible, executes them where not
``client``           the agent's side of the server process
``prefork``          a process that is forked ahead of time, and waits to become a worker
``reexec``           re-executes the agent's process, so that agent and server start as one
``fork_bootstrap``   that one process: it imports torch, and forks the server
``server``           the process that imports what workers need, and forks them
``run_script``       turns a forked process into a fresh ``python script.py``
``ending``           ends a forked worker

``_record``          a worker's record of what it imports
``_preload``         imports what workers have imported
``_import_watch``    detects what imports must not do before a fork
``_process_groups``  why torch's process groups live longer in forked workers

Code that runs in the server and its forks uses the standard library only: all modules but ``processes``, ``client``,
``prefork`` and ``reexec``.
"""
