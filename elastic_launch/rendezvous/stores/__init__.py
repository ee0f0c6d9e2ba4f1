"""Where the control record is kept.

``control_store``  the interface of a store, and the one in the leader's memory
``registry``       stores by name
``etcd``           the record in etcd
``majority``       the record kept by hosts of the run; see ``voters``
``static_store``   the TCPStore at the master's address
``claimed_store``  repairs the record when other clients overwrite it
"""
