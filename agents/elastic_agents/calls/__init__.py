"""A run that a Python program starts and waits for: :mod:`elastic_launch.api`.

``caller``    starts the agent's process, passes signals on, and reads how the run ended
``process``   the agent's process
``function``  the caller's side of a call: the function and its arguments for the workers, their results for the caller
``worker``    a worker's side of it
``forking``   workers that are forked from the caller
``metrics``   torch's metrics, from the agent's process to the caller's handlers

The agent has a process of its own: it changes much of the process it is in (signals, limits, who reaps its orphans),
and the caller's is not its to change. All that caller, agent and workers give to each other is in memory that has no
name (memfd_create(2)) and that they inherit, so no other process can write it and nothing is left of it.
"""
