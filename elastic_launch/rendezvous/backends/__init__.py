"""How a node finds or becomes the run's leader.

``registry``    returns the backend that a configuration names
``c10d``        the endpoint's host leads and listens there; also the interface of a backend
``hosting``     explains why this node does or does not host the run
``election``    the leader is elected in an external store, such as etcd
``voting``      the leader is elected by the hosts that keep the record together
``succession``  decides when a node takes over from the recorded leader
``rival``       handles another leader with the same run id
``static``      node 0 leads
"""
