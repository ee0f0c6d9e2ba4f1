"""The member's side of the rendezvous.

``membership``         finds the leader, holds the link, reconnects after an outage
``machine``            the pure state machine behind it, without sockets and threads
``membership_events``  what a membership reports to the agent
``reach``              tries whether the node can connect to where a round's workers meet
``failure_detector``   measures how long the leader has been silent, and decides what follows
"""
