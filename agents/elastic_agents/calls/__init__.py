"""A run that a Python program starts and waits for: :mod:`elastic_launch.api`.

``caller``        starts the agent's process, forwards signals to it, and reads how the run ended
``process``       the agent's process
``function``      the caller's side of a call: passes function and arguments to the workers, returns their results
``worker``        the worker's side of a call
``forking``       workers that are forked from the caller
``held_signals``  signals that are held back until the process has an owner
``metrics``       torch's metrics, from the agent's process to the caller's handlers

The agent has its own process because it changes process-wide state (signals, limits, the reaping of orphans) that
belongs to the caller. Caller, agent and workers exchange data only through inherited anonymous memory
(memfd_create(2)), so no other process can write it, and nothing is left behind.
"""
