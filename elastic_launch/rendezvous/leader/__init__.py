"""The leader, which decides which nodes train together.

``phases``          the phases of a run and their transitions
``machine``         the pure state machine: an event in, instructions out
``rounds``          how rounds drain, break and end; ``forming`` forms them
``state``           the machine's state in every phase
``types``           instructions
``nodes``           the connected nodes, grouped by their flags
``admission``       which nodes may take part
``ranks``           the members of a round and their order
``resizing``        when to interrupt a running round for waiting nodes
``resize_payoff``   whether a resize saves more time than it costs
``verdict``         the root cause of a broken round
``hangs``           which workers of a round that stands still hang
``restart_budget``  what a broken round costs, and whether it ends the run
``exclusion``       nodes that are left out for a while because their workers fail again and again
``newcomers``       nodes that cannot do what the others do, and for how long their hosts are left out
``leavers``         which nodes serve their snapshot, and which of those that have left stay for that
``service``         the machine's input and output: links, clock and control store
"""
