"""The instructions of the leader's machine."""

from __future__ import annotations

from elastic_launch.events.types import Event
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.values import Value


class CommitRecord(Value):
    """Write the record by compare-and-set."""

    record: ControlRecord


class Send(Value):
    """Send an order over a link."""

    link: int
    order: m.Order


class Close(Value):
    """Close a link once its output has been sent."""

    link: int


class Emit(Value):
    """Record an event."""

    event: Event


Instruction = CommitRecord | Send | Close | Emit
