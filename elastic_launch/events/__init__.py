"""Typed events: the only source for logs, the ledger, metrics and torch's event handlers.

``types``       every event, with those that the leader emits
``node_types``  events of a single node
``sentences``   each event as a sentence for people
``sinks``       the base class of events, and where they are written
"""
