"""Rendezvous: a control record that is hard to lose, and links that are fast.

``record``      the one value that a run keeps in its control store
``store``       what a control store must do, and the one in the leader's own memory; ``etcd`` is another
``messages``    what nodes and leader say to each other: ``reports`` up, ``orders`` down
``leader``      who decides: a pure state machine, whose output are ``instructions``
                (``leader_phases`` has its phases and the table of its moves, ``rounds`` makes these moves,
                ``forming`` forms the next round, ``leader_state`` is what all of these share, ``admission``
                refuses strangers, ``ranks`` orders the members, ``verdict`` judges faults, ``resizing`` reckons
                whether a larger round pays, ``leavers`` who stays for his snapshot)
``service``     the leader's input and output: links, clock, store
``membership``  a node's side: finds the leader by a ``backend``, holds the link, comes back
``handler``     the same rendezvous for plain torchrun, made by ``entry``
``worker_store`` the store under which the workers of a round meet
"""
