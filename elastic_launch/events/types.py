"""The typed events of a run, and their files.

Each node writes its own ``events-<node id>.jsonl``; the leader's decisions are in the file of the leader's node. A line
contains ``event`` (the name), ``time`` (UTC, for readers), ``clock`` (this host's monotonic clock in seconds, for
durations) and the fields of the event. Times of different hosts are not comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from elastic_launch.events.node_types import (
    CheckpointSaved,
    FirstStep,
    LinkChanged,
    NodeChecked,
    NodeEnded,
    NoticeReceived,
    OrderReceived,
    RoundProgress,
    RoundSteps,
    SnapshotsLeftOut,
    StragglerFound,
    TrainingBegun,
    WorkerAhead,
    WorkerExited,
    WorkerKept,
    WorkerPlaced,
    WorkerStarted,
)
from elastic_launch.events.sinks import Event, EventSink, JsonLines, event_name

__all__ = [
    "CauseFound",
    "CheckpointSaved",
    "DrillEnded",
    "Event",
    "EventSink",
    "FaultLanded",
    "FirstStep",
    "HangFound",
    "JsonLines",
    "LeaderElected",
    "LinkChanged",
    "NodeChecked",
    "NodeDiffers",
    "NodeEnded",
    "NodeExcluded",
    "NodeJoined",
    "NodeLeft",
    "NodeLost",
    "NodeRefused",
    "NoticeReceived",
    "OrderReceived",
    "Parked",
    "ResizeSkipped",
    "RestartCharged",
    "RoundBroken",
    "RoundDrained",
    "RoundDraining",
    "RoundFormed",
    "RoundProgress",
    "RoundSteps",
    "RunEnded",
    "RunResized",
    "SnapshotsLeftOut",
    "StragglerFound",
    "TrainingBegun",
    "WorkerAhead",
    "WorkerExited",
    "WorkerKept",
    "WorkerPlaced",
    "WorkerStarted",
    "counted",
    "event_name",
]


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
        broke: number of the round that was broken because of it; 0 if none was.
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
class NodeExcluded(Event):
    """A node is left out of rounds for a while, as long as there are enough others.

    Attributes:
        faults: how many faults in a row its workers have caused.
        seconds: for how long it is left out.
    """

    leader: ClassVar[bool] = True
    node: str
    faults: int
    seconds: float

    def line(self) -> str:
        return (
            f"node {self.node} is left out for {self.seconds:g} s, as long as there are enough others: "
            f"its workers have caused the last {self.faults} faults"
        )


@dataclass(frozen=True, slots=True)
class FaultLanded(Event):
    """A fault of the drill happens.

    Attributes:
        node: the node whose worker has come to it.
        fault: its position in the plan, from 0.
        step: optimizer steps done.
    """

    leader: ClassVar[bool] = True
    round: int
    node: str
    fault: int
    step: int

    def line(self) -> str:
        return f"drill: fault {self.fault} happens on node {self.node} at step {self.step}"


@dataclass(frozen=True, slots=True)
class DrillEnded(Event):
    """The run ends, and with it its drill.

    Attributes:
        planned: number of faults in the plan.
        missing: positions of those that have not happened, from 0.
    """

    leader: ClassVar[bool] = True
    planned: int
    missing: tuple[int, ...]

    def line(self) -> str:
        if not self.missing:
            return f"drill: {'all ' if self.planned > 1 else ''}{counted(self.planned, 'fault')} happened"
        names = ", ".join(map(str, self.missing))
        return (
            f"drill: {self.planned - len(self.missing)} of {counted(self.planned, 'fault')} happened; not fault {names}"
        )


@dataclass(frozen=True, slots=True)
class NodeLeft(Event):
    """A node announced that it leaves.

    Attributes:
        broke: number of the round that was drained or broken because of it; 0 if none was.
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
    """A node that does not fit the run was refused."""

    leader: ClassVar[bool] = True
    node: str
    cause: str

    def line(self) -> str:
        return f"node {self.node} refused: {self.cause}"


@dataclass(frozen=True, slots=True)
class NodeDiffers(Event):
    """An accepted node has other arguments or limits than the run; emitted once for nodes with the same differences.

    Attributes:
        arguments: the differences between its script's arguments and those of the leader's node.
        limits: its limits and the run's, if they differ.
    """

    leader: ClassVar[bool] = True
    node: str
    arguments: str = ""
    limits: str = ""

    def line(self) -> str:
        parts = [f"other arguments: {self.arguments}"] if self.arguments else []
        parts += [f"other limits: {self.limits}"] if self.limits else []
        return f"node {self.node} came with {'; and with '.join(parts)}"


@dataclass(frozen=True, slots=True)
class RoundFormed(Event):
    """A round was recorded and ordered.

    Attributes:
        form_s: seconds since the last round was broken, or since the leader's term began.
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
        kind, cause: as first reported.
        lasted_s: seconds since it was formed; None if an earlier leader formed it, whose clock is unknown.
        next: what follows; empty if the round may cost a restart, for example after a worker's failure: then what
            follows is reported once the round is judged.
    """

    leader: ClassVar[bool] = True
    round: int
    kind: str
    cause: str
    lasted_s: float | None
    next: str

    def line(self) -> str:
        following = f"; {self.next}" if self.next else ""
        after = f" after {self.lasted_s:.1f} s" if self.lasted_s is not None else ""
        return f"round {self.round} broken{after}: {self.cause}{following}"


@dataclass(frozen=True, slots=True)
class HangFound(Event):
    """A round stands still and is broken for it.

    Attributes:
        ranks, nodes, hosts, places: of the workers that hang, in the same order; empty if no rank stands out.
    """

    leader: ClassVar[bool] = True
    round: int
    cause: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def line(self) -> str:
        return ""  # that of the round's end has the same cause


@dataclass(frozen=True, slots=True)
class CauseFound(Event):
    """A later report gives the actual cause of a broken round, from which the first report had followed."""

    leader: ClassVar[bool] = True
    round: int
    kind: str
    cause: str

    def line(self) -> str:
        return f"round {self.round} was broken by {self.cause}"


@dataclass(frozen=True, slots=True)
class RoundDraining(Event):
    """A round was ordered to end after the same step on all ranks.

    Attributes:
        kind: the kind as of a broken round.
        seconds: time after which it is broken instead; None for no limit.
    """

    leader: ClassVar[bool] = True
    round: int
    kind: str
    cause: str
    seconds: float | None

    def line(self) -> str:
        limit = "" if self.seconds is None else f", within {round(self.seconds, 1):g} s"
        return f"round {self.round} drains: {self.cause}; its workers stop after the same step{limit}"


@dataclass(frozen=True, slots=True)
class RoundDrained(Event):
    """A round has ended after the same step on all ranks.

    Attributes:
        step: optimizer steps done.
        drain_s: seconds since the drain was ordered.
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
    """A broken round was charged to the restart budget.

    Attributes:
        idle: consecutive restarts without progress, if it is charged for that; else 0.
        delay_s: seconds for which the next round is delayed because workers again failed soon after their start.
        refilled: how many of ``max_restarts`` were given back.
    """

    leader: ClassVar[bool] = True
    round: int
    kind: str
    restarts: int
    max_restarts: int
    next: str = ""
    idle: int = 0
    delay_s: float = 0.0
    refilled: int = 0

    def line(self) -> str:
        back = f", {self.refilled} given back" if self.refilled else ""
        flag = f"--max-restarts {self.max_restarts - self.refilled}"
        budget = f"restart {self.restarts} of {self.max_restarts} ({flag}{back})"
        why = f", since the training has not advanced in {self.idle} restarts" if self.idle else ""
        delay = f" in {self.delay_s:g} s, as workers failed soon after their start again" if self.delay_s else ""
        following = f"; {self.next}{delay}" if self.next else ""
        return f"{budget}, charged for a {self.kind}{why}{following}"


@dataclass(frozen=True, slots=True)
class ResizeSkipped(Event):
    """Nodes wait although the running round has room for them, since the run ends before a resize would pay off.

    Attributes:
        remaining_s: seconds that the current round still needs, by its own estimate.
        saved_s: seconds of these that the larger round would save; see
            :mod:`elastic_launch.rendezvous.leader.resize_payoff`.
        cost_s: seconds that a resize costs.
    """

    leader: ClassVar[bool] = True
    nodes: tuple[str, ...]
    remaining_s: float
    saved_s: float
    cost_s: float

    def line(self) -> str:
        nodes = ", ".join(self.nodes[:8]) + (", ..." if len(self.nodes) > 8 else "")
        return (
            f"no resize for node {nodes}: of about {self.remaining_s:.0f} s left it would save {self.saved_s:.1f} s, "
            f"and it costs {self.cost_s:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class LeaderElected(Event):
    """A node became the leader; only emitted if no node hosts the run.

    Attributes:
        cause: ``first``, or why the previous leader no longer leads.
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
    """A user changed how many nodes the run may have."""

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
        return ""  # every agent's summary shows it


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
