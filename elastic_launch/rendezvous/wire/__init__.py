"""The protocol of a link between node and leader.

``messages``        the reports of nodes, and the orders of the leader
``outline``         rounds of many members, whose nodes are not sent all of them
``authentication``  proof of the run's token, and MACs; ``seal`` is the MAC of a stored value
``links``           the incoming links of a leader or a voter
``addresses``       addresses to advertise, sockets to listen on
``log_once``        one log line for repeated faults of one peer
"""
