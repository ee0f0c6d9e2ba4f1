"""What ``elasticctl`` asks of a run's leader.

``messages``  requests and answers
``client``    finds the leader, sends a request, reads the answers
``server``    carries out requests beside the leader's state machine
"""
