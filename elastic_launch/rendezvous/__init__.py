"""Rendezvous: nodes form rounds of workers under an elected leader.

``leader/``             decides who trains together
``node/``               a member's side
``backends/``           finding the leader, or becoming it: c10d, etcd, static
``stores/``             where the control record is kept
``wire/``               messages, their encoding and authentication
``admin/``              what ``elasticctl`` asks
``record``              the control record, one value per run; ``continuity`` says which values a node believes
``snapshot_holders``    which node holds which snapshot, and who serves it
``worker_store``        the TCPStore under which the workers of a round meet
``run_file``            ``run.json``: how a run can be reached
``torch_handler``       the rendezvous for plain torchrun, registered by ``torch_entry_points``
"""
