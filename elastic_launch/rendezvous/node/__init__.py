"""A member's side of the rendezvous.

``membership``         finds the leader, holds the link, reconnects after an outage
``machine``            the same without sockets and threads: a pure state machine
``membership_events``  what a membership reports to the agent
``failure_detector``   how long the leader has been silent, and what follows
"""
