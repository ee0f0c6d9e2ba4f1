"""The instructions of the leader's machine."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.events.types import Event
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """Write the record by compare-and-set."""

    record: ControlRecord


@dataclass(frozen=True, slots=True)
class Send:
    """Send an order over a link."""

    link: int
    order: m.Order


@dataclass(frozen=True, slots=True)
class Close:
    """Close a link once its output has been sent."""

    link: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Record an event."""

    event: Event


Instruction = CommitRecord | Send | Close | Emit
