"""The instructions of the leader's machine, and its state per node."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.events.types import Event
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.system.host_load import HostLoad


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


@dataclass(slots=True)
class Node:
    """A node that the leader has a link to.

    Attributes:
        store_port: where its next worker store listens.
        active: whether it has, or may have, workers of the current round.
        joined, ready, done: whether its workers are started; can all be drained; have all finished with 0.
        live: whether they can all be suspended.
        importing: whether its workers could not begin at once.
        apart: whether it cannot connect to where a round's workers meet; None until it has answered.
        ahead: whether it was ordered to start its workers ahead since it last had a place.
        slots: local ranks with which it could take part in a round; empty for all.
        excluded: whether it is left out of rounds for now; see :mod:`elastic_launch.rendezvous.leader.exclusion`.
        silence: seconds without a sign of life.
        heard: time of the last sign of life, by the leader's clock.
        held: the newest snapshot in its memory when it last had no workers.
        released: whether it was informed that it may exit.
        stalled: its report that its workers are late in the current round; None if they are not.
        trained: whether it has completed a step in this run; see ``messages.Stopped``.
        veteran: whether it had when the current round was formed.
        barred: whether its host is left out of all rounds for now; see ``newcomers``.
        load: how busy its host is, as it said last; only those who ask for the status are told.
    """

    hello: m.NodeHello
    link: int
    arrival: int
    store_port: int
    active: bool = False
    joined: bool = False
    ready: bool = False
    done: bool = False
    live: bool = False
    importing: bool = False
    apart: bool | None = False
    ahead: bool = False
    slots: tuple[int, ...] = ()
    excluded: bool = False
    leaving: bool = False
    silence: float = 0.0
    heard: float = 0.0
    held: m.HeldSnapshot | None = None
    released: bool = False
    stalled: m.Stalled | None = None
    trained: bool = False
    veteran: bool = False
    barred: bool = False
    load: HostLoad | None = None

    @property
    def host(self) -> str:
        """What identifies its host across starts of its agent."""
        return self.hello.host or self.hello.node_id

    @property
    def workers(self) -> int:
        """Number of workers with which it could take part in a round."""
        return len(self.slots) or self.hello.workers

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Local ranks with which it could take part in a round."""
        return self.slots or tuple(range(self.hello.workers))

    def offer(self, slots: tuple[int, ...]) -> None:
        """Note the local ranks that the node reports; ranks that it does not have count as all."""
        exist = bool(slots) and slots[-1] < self.hello.workers
        self.slots = slots if exist and len(slots) < self.hello.workers else ()
