"""Where the control record is kept.

``control_store``  the interface of a store
``etcd``           the record in etcd; ``etcd_service`` describes etcd to the command line
``majority``       the record kept by hosts of the run; see ``voters``
``static_store``   the TCPStore at the master's address
``claimed_store``  repairs the record when other clients overwrite it
"""
