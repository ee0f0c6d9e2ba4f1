"""Worker processes that are forked from one that has done their imports: a start costs a fork, not an import of torch.

``processes``        starts workers: forks them where possible, executes them where not
``client``           the agent's side of the server's process
``prefork``          a process that is forked ahead, and waits to be made a worker
``reexec``           executes the agent's process anew, so that agent and server begin as one
``fork_bootstrap``   that one process: it imports torch, and forks the server
``server``           the process that imports what workers need, and forks them
``run_script``       how a forked process turns into a fresh ``python script.py``
``ending``           how it ends

``_script_imports``  what a script imports, read without running it
``_preload``         the plan what to import ahead, and the imports
``_import_watch``    what imports must not do, and how it is noticed
``_process_groups``  why torch's process groups live longer in forked workers

What runs in the server and its forks uses the standard library only: all but ``processes``, ``client``, ``prefork``
and ``reexec``.
"""
