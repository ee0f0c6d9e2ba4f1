"""Requests of ``elasticctl`` to a run's leader.

``messages``  requests and answers
``client``    finds the leader, sends a request, reads the answers
``server``    carries out requests alongside the leader's state machine
"""
