"""Finds out that the workers of a node make no progress, and where each of them stands.

``lateness``     when workers are late, by what they report in shared memory; pure
``stacks``       what a worker's stack says: the user's frame, an exchange with others, the data loader; pure
``collectives``  what the dump of its flight recorder says: the last collective in each process group; pure
``processes``    a process' state and use of CPU, the stacks of its threads, and the dump of its flight recorder
``hang_watch``   the thread that watches the workers, and reports them to the leader
``hanging``      which workers of the agent's round it watches, and how those end that hang, also at exit

The leader judges, once the workers of all nodes stand still: :mod:`elastic_launch.rendezvous.leader.hangs`.
"""
