"""Live rounds: a worker leaves one round and joins the next without ending its process.

``groups``         the process groups of one round
``peerless``       groups in which a divided model is built before its process has a place
``rehearsal``      what a rehearsal of a step must not leave behind
``resharding``     shards a model over the ranks of another round
``sockets``        the connections of these groups
``timeout_watch``  ends a process whose collective takes too long
``turns``          what ends these groups without delay
``waits``          ends waits for exchanges that gloo does not end
"""
