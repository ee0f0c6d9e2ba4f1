"""The leader decides which nodes train together.

``phases``          the phases of a run, and what moves it from one to the next
``machine``         the pure state machine: an event in, instructions out
``rounds``          how rounds drain, break and end; ``forming`` forms them
``state``           what the machine knows in every phase
``types``           nodes and instructions
``admission``       which nodes may take part
``ranks``           the members of a round and their order
``resizing``        when a running round is interrupted for waiting nodes
``resize_payoff``   whether that pays
``verdict``         the root cause of a broken round
``restart_budget``  what a broken round costs, and when the run ends with it
``leavers``         nodes that have left and still serve their snapshot
``outlook``         what comes next, as text for people
``service``         the machine's input and output: links, clock and control store
``link``            the leader's end of a link to a node
"""
