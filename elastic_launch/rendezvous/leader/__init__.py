"""The leader, which decides which nodes train together.

``phases``          the phases of a run and their transitions
``machine``         the pure state machine: an event in, instructions out
``rounds``          how rounds drain, break and end; ``forming`` forms them, with their members' order
``state``           the machine's state in every phase
``types``           instructions
``nodes``           the connected nodes, grouped by their flags, and what they hold
``admission``       which nodes may take part
``resizing``        when to interrupt a running round for waiting nodes, and whether that pays
``verdict``         the root cause of a broken round
``hangs``           which workers of a round that stands still hang
``restart_budget``  what a broken round costs, and whether it ends the run
``exclusion``       nodes, and hosts, that are left out for a while
``newcomers``       nodes that cannot do what the others do
``service``         the machine's input and output: links, clock and control store
"""
