"""How a node finds the run's leader, or becomes it.

``registry``    which backend a configuration asks for
``c10d``        the endpoint's host leads and listens there; also the interface of a backend
``hosting``     why this node does or does not host the run, as text
``election``    the leader is elected in a store that no node hosts, such as etcd
``succession``  when a node takes over from the recorded leader
``rival``       another leader with the same run id
``static``      node 0 leads
"""
