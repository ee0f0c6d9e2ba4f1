"""What runs on a node and outlives its workers.

``main``      runs one node's part of a run and says how it ended
``agent``     LocalElasticAgent: takes from the inbox, asks the policy, carries out
``policy``    the pure decisions; ``vocabulary`` what they speak of
``inbox``     one queue for signals, exits, orders and timers; ``departure`` why and until when this node leaves
``notices``   who tells it, some seconds ahead, that its machine is to go
``workers``   the workers of a round; ``processes`` and ``sessions`` start and end their processes
``warm``      what they are forked from, so that they need not import
``output``    their stdout and stderr, on the console and in files
``failures``  what a dead worker left to say
``fixed``     the same for a world of fixed size, without a rendezvous
``guard``     kills the workers if the agent itself is killed
"""
