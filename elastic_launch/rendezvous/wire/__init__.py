"""The protocol of a link between node and leader.

``codec``           strict, bounded JSON for frozen dataclasses
``messages``        the types that reports and orders share
``reports``         from node to leader
``orders``          from leader to node
``authentication``  proof of the run's token, and MACs; ``seal`` is the MAC of a stored value
``addresses``       addresses to advertise, sockets to listen on
``log_once``        one log line for repeated faults of one peer
"""
