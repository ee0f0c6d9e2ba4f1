"""Typed events: the only source for logs, the ledger, metrics and torch's event handlers.

``types``      every event
``facts``      why something ended, or is as it is
``sentences``  each event, and each fact, as a sentence for people
``incidents``  which incident an event belongs to
``sinks``      the file to which events are written
"""
