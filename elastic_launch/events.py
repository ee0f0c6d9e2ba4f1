"""What happens in a run, as typed events, and where they go.

Each node writes its own ``events-<node id>.jsonl``; the leader's decisions are in the leader's node's file. A line
holds ``event`` (the name), ``time`` (UTC, for people), ``clock`` (this host's monotonic clock in seconds, for
durations) and the fields of the event. Times of two hosts are not comparable.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol

from elastic_launch.clock import Clock

__all__ = [
    "Event",
    "EventSink",
    "JsonLines",
    "LeaderElected",
    "LinkChanged",
    "NodeJoined",
    "NodeLeft",
    "NodeLost",
    "NodeRefused",
    "OrderReceived",
    "Parked",
    "RestartCharged",
    "RoundBroken",
    "RoundDrained",
    "RoundDraining",
    "RoundFormed",
    "RunEnded",
    "RunResized",
    "WorkerExited",
    "WorkerStarted",
    "counted",
    "event_name",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. ``leader`` events are decisions about membership: shown to people, one line each.

    An event whose ``line`` is empty is told by another one.
    """

    leader: ClassVar[bool] = False

    def line(self) -> str:
        """Who, why, what is next, in one line."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True, slots=True)
class NodeJoined(Event):
    """A node's hello was accepted."""

    leader: ClassVar[bool] = True
    node: str
    workers: int
    address: str
    next: str

    def line(self) -> str:
        return f"node {self.node} joined from {self.address} with {counted(self.workers, 'worker')}; {self.next}"


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """A node is dead: its connection closed, or it was silent for too long.

    Attributes:
        detect_s: seconds from its last sign of life, as far as the leader can tell.
        broke: number of the round that was broken for it, 0 if none was.
    """

    leader: ClassVar[bool] = True
    node: str
    cause: str
    detect_s: float
    broke: int
    next: str

    def line(self) -> str:
        return "" if self.broke else f"node {self.node} lost ({self.cause}); {self.next}"


@dataclass(frozen=True, slots=True)
class NodeLeft(Event):
    """A node said that it leaves.

    Attributes:
        broke: number of the round that was drained or broken for it, 0 if none was.
    """

    leader: ClassVar[bool] = True
    node: str
    cause: str
    broke: int
    next: str

    def line(self) -> str:
        return "" if self.broke else f"node {self.node} leaves ({self.cause}); {self.next}"


@dataclass(frozen=True, slots=True)
class NodeRefused(Event):
    """A node that does not fit the run was sent away."""

    leader: ClassVar[bool] = True
    node: str
    cause: str

    def line(self) -> str:
        return f"node {self.node} refused: {self.cause}"


@dataclass(frozen=True, slots=True)
class RoundFormed(Event):
    """A round is recorded and ordered.

    Attributes:
        form_s: seconds since the last round was broken, or since the leader began.
    """

    leader: ClassVar[bool] = True
    round: int
    term: int
    nodes: tuple[str, ...]
    world_size: int
    restarts: int
    cause: str
    form_s: float

    def line(self) -> str:
        nodes = ", ".join(self.nodes[:8]) + (", ..." if len(self.nodes) > 8 else "")
        return (
            f"round {self.round} formed in {self.form_s:.2f} s: world size {self.world_size} on "
            f"{counted(len(self.nodes), 'node')} ({nodes})"
        )


@dataclass(frozen=True, slots=True)
class RoundBroken(Event):
    """A round ended before its work was done.

    Attributes:
        lasted_s: seconds since it was formed.
    """

    leader: ClassVar[bool] = True
    round: int
    kind: str
    cause: str
    lasted_s: float
    next: str

    def line(self) -> str:
        return f"round {self.round} broken after {self.lasted_s:.1f} s: {self.cause}; {self.next}"


@dataclass(frozen=True, slots=True)
class RoundDraining(Event):
    """A round is to end after the same step on all ranks.

    Attributes:
        kind: as of a broken round.
        seconds: after which it is broken instead; None for no such limit.
    """

    leader: ClassVar[bool] = True
    round: int
    kind: str
    cause: str
    seconds: float | None

    def line(self) -> str:
        limit = "" if self.seconds is None else f", within {self.seconds:g} s"
        return f"round {self.round} drains: {self.cause}; its workers stop after the same step and save{limit}"


@dataclass(frozen=True, slots=True)
class RoundDrained(Event):
    """A round has ended after the same step on all ranks.

    Attributes:
        step: optimizer steps done.
        drain_s: seconds since it was ordered.
    """

    leader: ClassVar[bool] = True
    round: int
    step: int
    kind: str
    cause: str
    drain_s: float
    next: str

    def line(self) -> str:
        return f"round {self.round} drained in {self.drain_s:.2f} s after step {self.step}; {self.next}"


@dataclass(frozen=True, slots=True)
class RestartCharged(Event):
    """A broken round was charged to the restart budget."""

    leader: ClassVar[bool] = True
    round: int
    kind: str
    restarts: int
    max_restarts: int

    def line(self) -> str:
        budget = f"restart {self.restarts} of {self.max_restarts} (--max-restarts {self.max_restarts})"
        return f"{budget}, charged for a {self.kind}"


@dataclass(frozen=True, slots=True)
class LeaderElected(Event):
    """A node leads from now on; only where no node hosts the store.

    Attributes:
        cause: ``first``, or why the one before leads no longer.
    """

    leader: ClassVar[bool] = True
    node: str
    term: int
    cause: str

    def line(self) -> str:
        why = "" if self.cause == "first" else f": {self.cause}"
        return f"node {self.node} leads the run (term {self.term}){why}"


@dataclass(frozen=True, slots=True)
class Parked(Event):
    """The run waits for nodes."""

    leader: ClassVar[bool] = True
    nodes: int
    min_nodes: int
    min_wait_s: float

    def line(self) -> str:
        return (
            f"parked with {counted(self.nodes, 'node')}, {self.min_nodes} needed; "
            f"goes on when they are there, ends in {self.min_wait_s:g} s otherwise"
        )


@dataclass(frozen=True, slots=True)
class RunResized(Event):
    """Somebody changed how many nodes the run may have."""

    leader: ClassVar[bool] = True
    min_nodes: int
    max_nodes: int
    had_min: int
    had_max: int

    def line(self) -> str:
        return f"the run is resized to {self.min_nodes}:{self.max_nodes} nodes, from {self.had_min}:{self.had_max}"


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The run is over."""

    leader: ClassVar[bool] = True
    code: int
    cause: str
    restarts: int
    rounds: int
    lasted_s: float

    def line(self) -> str:
        return ""  # every agent's summary tells it


@dataclass(frozen=True, slots=True)
class OrderReceived(Event):
    """The node got an order from the leader."""

    order: str
    round: int
    term: int
    cause: str


@dataclass(frozen=True, slots=True)
class LinkChanged(Event):
    """The node's link to the leader came up or went down, or the node found itself frozen or cut off."""

    up: bool
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """A worker process was started.

    Attributes:
        start_s: seconds that its start took the agent.
    """

    round: int
    rank: int
    local_rank: int
    pid: int
    cause: str
    start_s: float


@dataclass(frozen=True, slots=True)
class WorkerExited(Event):
    """A worker process was reaped.

    Attributes:
        exit_code: its exit code, -N for signal N.
        ran_s: seconds since its start.
        stopped: whether the agent had told it to stop.
    """

    round: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    ran_s: float
    stopped: bool


class EventSink(Protocol):
    """Takes events from any thread."""

    def emit(self, event: Event) -> None:
        """Record the event; never blocks for long, never fails."""
        ...


class JsonLines:
    """Appends events to a file as JSON lines.

    Args:
        path: the file; made with its directory at the first event.
        on_error: told once, if the file cannot be written; the run goes on.
    """

    def __init__(self, path: Path, clock: Clock, on_error: Callable[[OSError], None]) -> None:
        self.path = path
        self._clock = clock
        self._on_error: Callable[[OSError], None] | None = on_error
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        line = json.dumps(
            {
                "event": event_name(type(event)),
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "clock": round(self._clock.now(), 6),
                **asdict(event),
            }
        )
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(line + "\n")
            except OSError as error:
                on_error, self._on_error = self._on_error, None
                if on_error:
                    on_error(error)


def event_name(kind: type[Any]) -> str:
    """``RoundFormed`` -> ``round_formed``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
