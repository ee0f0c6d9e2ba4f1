"""What the leader's machine says and what it keeps in mind."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_launch.events import Event
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.verdict import Kind

__all__ = ["NOT_REPORTED", "Broken", "Close", "Commit", "Draining", "Emit", "Instruction", "Node", "Send"]


NOT_REPORTED = "no node has reported a checkpoint of it"
"""Why a state is taken for one that is not saved, where no node says why it is not."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the record by compare-and-set."""

    record: ControlRecord


@dataclass(frozen=True, slots=True)
class Send:
    """Send an order over a link."""

    link: int
    order: m.Order


@dataclass(frozen=True, slots=True)
class Close:
    """Close a link after what was sent over it."""

    link: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Record an event."""

    event: Event


Instruction = Commit | Send | Close | Emit


@dataclass(slots=True)
class Node:
    """A node that the leader has a link to.

    Attributes:
        store_port: where its next worker store listens.
        active: it has, or may have, workers of the current round.
        joined, ready, done: these are started; can all be drained; have all finished with 0.
        importing: its workers could not begin at once.
        leaving: it said that it leaves.
        silence: seconds without a sign of life.
        heard: when the last one came, by the leader's clock.
        held: the newest snapshot in its memory, when it was last without workers.
        released: it was told that it may go.
    """

    hello: m.Hello
    link: int
    arrival: int
    arrived: float
    store_port: int
    active: bool = False
    joined: bool = False
    ready: bool = False
    done: bool = False
    importing: bool = False
    leaving: bool = False
    silence: float = 0.0
    heard: float = 0.0
    held: m.Held | None = None
    released: bool = False


@dataclass(slots=True)
class Broken:
    """A round that was broken and whose successor is not formed yet.

    Attributes:
        imposed: what befell its nodes, of what is known the most significant; None if only workers have failed.
        cause: in words, as known by now.
        failures: reports that came in, each with the leader's time of its receipt.
        judged: it is known what it costs, since ``judged_at``.
    """

    at: float
    imposed: Kind | None
    cause: str
    failures: list[tuple[float, m.Failure]] = field(default_factory=list)
    judged: bool = False
    judged_at: float = 0.0


@dataclass(slots=True)
class Draining:
    """A round whose workers are stopping after the same step.

    Attributes:
        deadline: when it is broken, if some have not stopped by then.
        step: optimizer steps done, as far as reported.
        final: the run ends with it.
        saved: a node has committed that state to durable storage.
        unsaved: why one has not that should have.
    """

    at: float
    kind: Kind
    cause: str
    deadline: float | None = None
    step: int = 0
    final: bool = False
    saved: bool = False
    unsaved: str = ""

    @property
    def kept(self) -> str:
        """Where the state is, in words."""
        return "its state saved" if self.saved else f"its state not saved: {self.unsaved or NOT_REPORTED}"
