"""Explores every order of events in small worlds of the project's pure machines.

``states`` copies states, and finds out which are equal; ``search`` visits them. ``run_world`` has the leaders, nodes
and policies of a run, with ``agents``, ``workers``, ``bounds`` and ``run_identity``; ``voting`` the voters of a record.
``cases`` lists the worlds. ``recorder`` and ``traces`` hold real runs against the same machines and invariants.
"""
