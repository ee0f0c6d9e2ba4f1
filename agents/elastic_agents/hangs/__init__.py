"""Finds out that the workers of a node make no progress, and where each of them stands.

``lateness``   when workers are late, by what they report in shared memory; pure
``stacks``     what a worker's stack says: the frame of the user's code, an exchange with others, the data loader; pure
``processes``  a process' state and use of CPU, and the stacks of its threads
``watch``      the thread that watches the workers, and reports them to the leader

The leader judges, once the workers of all nodes stand still: :mod:`elastic_launch.rendezvous.leader.hangs`.
"""
