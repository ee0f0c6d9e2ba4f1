"""Rendezvous: nodes form rounds of workers under an elected leader.

``leader/``             decides which nodes train together
``node/``               the member's side of the protocol
``backends/``           how a node finds or becomes the leader: c10d, etcd, voters, static
``stores/``             storage of the control record
``voters/``             the control record kept by a majority of named hosts
``wire/``               messages, their encoding and authentication
``admin/``              the protocol of ``elasticctl``
``record``              the control record, one value per run; ``continuity`` decides which values a node accepts
``worker_store``        the TCPStore through which the workers of a round meet
``run_file``            ``run.json``: how to reach a run
``old_runs``            the directories of runs that are over, removed except for the newest
``torch_handler``       the rendezvous for plain torchrun, registered by ``torch_entry_points``
"""
