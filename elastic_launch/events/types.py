"""The typed events of a run, and their files.

Each node writes its own ``events-<node id>.jsonl``; the leader's decisions are in the file of the leader's node. A line
contains ``event`` (the name), ``time`` (UTC, for readers), ``clock`` (this host's monotonic clock in seconds, for
durations) and the fields of the event. Times of different hosts are not comparable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events.

    An event whose ``line`` is empty is covered by another event, or is not an event of the leader;
    :func:`elastic_launch.events.sentences.sentence` has a sentence for each.
    """

    leader: ClassVar[bool] = False

    def line(self) -> str:
        """Return which node, why, and what happens next, in one line."""
        return ""


class EventSink(Protocol):
    """Receives events. Thread-safe."""

    def emit(self, event: Event) -> None:
        """Record the event; never blocks for long and never raises."""
        ...


# Decisions of the leader.


@dataclass(frozen=True, slots=True)
class LeaderEvent(Event):
    """Base class of the leader's decisions about membership, which are shown to users, one line each."""

    leader: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class NodeJoined(LeaderEvent):
    """A node's hello was accepted."""

    node: str
    workers: int
    address: str
    next: str

    def line(self) -> str:
        return f"node {self.node} joined from {self.address} with {counted(self.workers, 'worker')}; {self.next}"


@dataclass(frozen=True, slots=True)
class NodeLost(LeaderEvent):
    """A node is dead: its connection closed, or it was silent for too long.

    Attributes:
        detect_s: seconds from its last sign of life, as far as the leader can tell.
        broke: number of the round that was broken because of it; 0 if none was.
    """

    node: str
    cause: str
    detect_s: float
    broke: int
    next: str

    def line(self) -> str:
        return "" if self.broke else f"node {self.node} lost ({self.cause}); {self.next}"


@dataclass(frozen=True, slots=True)
class NodeExcluded(LeaderEvent):
    """A node is left out of rounds for a while, as long as there are enough others.

    Attributes:
        faults: how many faults in a row its workers have caused.
        seconds: for how long it is left out.
    """

    node: str
    faults: int
    seconds: float

    def line(self) -> str:
        return (
            f"node {self.node} is left out for {self.seconds:g} s, as long as there are enough others: "
            f"its workers have caused the last {self.faults} faults"
        )


@dataclass(frozen=True, slots=True)
class NewcomerLeftOut(LeaderEvent):
    """A node that has not trained in this run cannot do what the others do: the run goes on without it.

    Attributes:
        round: number of the run's last round.
        seconds: for how long its host is left out.
    """

    node: str
    round: int
    cause: str
    seconds: float

    def line(self) -> str:
        return (
            f"node {self.node} is left out, at no cost to the run: {self.cause.rstrip('.')}; the others go on, and its "
            f"host may join again after {self.seconds:g} s"
        )


@dataclass(frozen=True, slots=True)
class AdmissionClosed(LeaderEvent):
    """No newcomers take part any more, as long as there are enough: a restart would probably fail as they do."""

    cause: str

    def line(self) -> str:
        return (
            f"no further nodes take part, as long as there are enough: {self.cause}. A restart of the run is likely to "
            "fail, too: mend the script or its environment before"
        )


@dataclass(frozen=True, slots=True)
class FaultLanded(LeaderEvent):
    """A fault of the drill happens.

    Attributes:
        node: the node whose worker has come to it.
        fault: its position in the plan, from 0.
        step: optimizer steps done.
    """

    round: int
    node: str
    fault: int
    step: int

    def line(self) -> str:
        return f"drill: fault {self.fault} happens on node {self.node} at step {self.step}"


@dataclass(frozen=True, slots=True)
class DrillEnded(LeaderEvent):
    """The run ends, and with it its drill.

    Attributes:
        planned: number of faults in the plan.
        missing: positions of those that have not happened, from 0.
    """

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
class NodeLeft(LeaderEvent):
    """A node announced that it leaves.

    Attributes:
        broke: number of the round that was drained or broken because of it; 0 if none was.
    """

    node: str
    cause: str
    broke: int
    next: str

    def line(self) -> str:
        return "" if self.broke else f"node {self.node} leaves ({self.cause}); {self.next}"


@dataclass(frozen=True, slots=True)
class NodeRefused(LeaderEvent):
    """A node that does not fit the run was refused."""

    node: str
    cause: str

    def line(self) -> str:
        return f"node {self.node} refused: {self.cause}"


@dataclass(frozen=True, slots=True)
class JoinBlocked(LeaderEvent):
    """A node cannot connect to where the running round's workers meet: one that waits takes no part until it can.

    If it is a member, in its first round, its workers wait.

    Attributes:
        member: the node whose address and port these are.
    """

    node: str
    member: str
    address: str
    port: int
    cause: str

    def line(self) -> str:
        return (
            f"node {self.node} waits: it cannot connect to node {self.member} ({self.address}, port {self.port}: "
            f"{self.cause}). Nodes must be able to connect to each other on all ports; it tries again every 10 s"
        )


@dataclass(frozen=True, slots=True)
class NodeDiffers(LeaderEvent):
    """An accepted node has other arguments or limits than the run; emitted once for nodes with the same differences.

    Attributes:
        arguments: the differences between its script's arguments and those of the leader's node.
        limits: its limits and the run's, if they differ.
    """

    node: str
    arguments: str = ""
    limits: str = ""

    def line(self) -> str:
        parts = [f"other arguments: {self.arguments}"] if self.arguments else []
        parts += [f"other limits: {self.limits}"] if self.limits else []
        return f"node {self.node} came with {'; and with '.join(parts)}"


@dataclass(frozen=True, slots=True)
class RoundFormed(LeaderEvent):
    """A round was recorded and ordered.

    Attributes:
        form_s: seconds since the last round was broken, or since the leader's term began.
    """

    round: int
    term: int
    nodes: tuple[str, ...]
    world_size: int
    restarts: int
    cause: str
    form_s: float

    def line(self) -> str:
        return (
            f"round {self.round} formed in {self.form_s:.2f} s: world size {self.world_size} on "
            f"{counted(len(self.nodes), 'node')} ({listed(self.nodes)})"
        )


@dataclass(frozen=True, slots=True)
class RoundBroken(LeaderEvent):
    """A round ended before its work was done.

    Attributes:
        kind, cause: as first reported.
        lasted_s: seconds since it was formed; None if an earlier leader formed it, whose clock is unknown.
        next: what follows; empty if the round may cost a restart, for example after a worker's failure: then what
            follows is reported once the round is judged.
    """

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
class HangFound(LeaderEvent):
    """A round stands still and is broken for it: the line of the round's end has the same cause.

    Attributes:
        ranks, nodes, hosts, places: those of the workers that hang, in the same order; empty if no rank stands out.
        collectives: which ranks wait in a collective that others have not begun, by torch's flight recorder; empty if
            it knows of none.
    """

    round: int
    cause: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    collectives: str = ""


@dataclass(frozen=True, slots=True)
class CauseFound(LeaderEvent):
    """A later report gives the actual cause of a broken round, from which the first report had followed."""

    round: int
    kind: str
    cause: str

    def line(self) -> str:
        return f"round {self.round} was broken by {self.cause}"


@dataclass(frozen=True, slots=True)
class RoundDraining(LeaderEvent):
    """A round was ordered to end after the same step on all ranks.

    Attributes:
        kind: the kind as of a broken round.
        seconds: time after which it is broken instead; None for no limit.
    """

    round: int
    kind: str
    cause: str
    seconds: float | None

    def line(self) -> str:
        limit = "" if self.seconds is None else f", within {round(self.seconds, 1):g} s"
        return f"round {self.round} drains: {self.cause}; its workers stop after the same step{limit}"


@dataclass(frozen=True, slots=True)
class RoundDrained(LeaderEvent):
    """A round has ended after the same step on all ranks.

    Attributes:
        step: optimizer steps done.
        drain_s: seconds since the drain was ordered.
    """

    round: int
    step: int
    kind: str
    cause: str
    drain_s: float
    next: str

    def line(self) -> str:
        return f"round {self.round} drained in {self.drain_s:.2f} s after step {self.step}; {self.next}"


@dataclass(frozen=True, slots=True)
class RestartCharged(LeaderEvent):
    """A broken round was charged to the restart budget.

    Attributes:
        idle: consecutive restarts without progress, if it is charged for that; else 0.
        delay_s: seconds for which the next round is delayed because workers again failed soon after their start.
        refilled: how many of ``max_restarts`` were given back.
    """

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
        kind = "lack of memory" if self.kind == "out of memory" else self.kind
        return f"{budget}, charged for a {kind}{why}{following}"


@dataclass(frozen=True, slots=True)
class ResizeSkipped(LeaderEvent):
    """Nodes wait although the running round has room for them, since the run ends before a resize would pay off.

    Attributes:
        remaining_s: seconds that the current round still needs, by its own estimate.
        saved_s: seconds of these that the larger round would save; see
            :mod:`elastic_launch.rendezvous.leader.resize_payoff`.
        cost_s: seconds that a resize costs.
    """

    nodes: tuple[str, ...]
    remaining_s: float
    saved_s: float
    cost_s: float

    def line(self) -> str:
        return (
            f"no resize for node {listed(self.nodes)}: of about {self.remaining_s:.0f} s left it would save "
            f"{self.saved_s:.1f} s, and it costs {self.cost_s:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class LeaderElected(LeaderEvent):
    """A node became the leader; only emitted if no node hosts the run.

    Attributes:
        cause: ``first``, or why the previous leader no longer leads.
    """

    node: str
    term: int
    cause: str

    def line(self) -> str:
        why = "" if self.cause == "first" else f": {self.cause}"
        return f"node {self.node} leads the run (term {self.term}){why}"


@dataclass(frozen=True, slots=True)
class Parked(LeaderEvent):
    """The run waits for nodes."""

    nodes: int
    min_nodes: int
    min_wait_s: float

    def line(self) -> str:
        return (
            f"parked with {counted(self.nodes, 'node')}, {self.min_nodes} needed; "
            f"goes on when they are there, ends in {self.min_wait_s:g} s otherwise"
        )


@dataclass(frozen=True, slots=True)
class RunResized(LeaderEvent):
    """A user changed how many nodes the run may have."""

    min_nodes: int
    max_nodes: int
    had_min: int
    had_max: int

    def line(self) -> str:
        return f"the run is resized to {self.min_nodes}:{self.max_nodes} nodes, from {self.had_min}:{self.had_max}"


@dataclass(frozen=True, slots=True)
class RunEnded(LeaderEvent):
    """The run is over, which every agent's summary shows."""

    code: int
    cause: str
    restarts: int
    rounds: int
    lasted_s: float


# Of one node.


@dataclass(frozen=True, slots=True)
class OrderReceived(Event):
    """The node received an order from the leader.

    Attributes:
        kind: for a break or drain, the kind as of a broken round.
        workers: for the forming of a round, how many workers of this node are in it.
        world_size: likewise, how many workers of all nodes.
    """

    order: str
    round: int
    term: int
    cause: str
    kind: str = ""
    workers: int = 0
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class LinkChanged(Event):
    """The node's link to the leader came up or went down, or the node found itself frozen or cut off."""

    up: bool
    cause: str


@dataclass(frozen=True, slots=True)
class WorkersHeld(Event):
    """The guard had stopped the node's workers, since their agent did not run; they go on.

    Attributes:
        seconds: for how long they stood still.
    """

    round: int
    seconds: float

    def line(self) -> str:
        return f"the leader has answered: the workers go on after {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class NoticeReceived(Event):
    """The node received a preemption or similar notice.

    Attributes:
        source: AWS, GCP, Azure, Slurm, file or signal.
        kind: preemption, maintenance, rebalance, scale-in, time limit or request.
        seconds: seconds that are left; None if unknown.
        leaves: whether the node leaves the run because of it.
    """

    source: str
    kind: str
    cause: str
    seconds: float | None
    leaves: bool


@dataclass(frozen=True, slots=True)
class NodeChecked(Event):
    """The node has passed the test of ``--node-check``; each figure is that of its slowest device.

    Attributes:
        devices: number of GPUs tested, besides the CPU.
        memory_gb_s: memory written and read, in 10**9 bytes per second.
        compute_gflop_s: multiplication of float32 matrices, in 10**9 operations per second.
        disk_mb_s: a file written, synchronized and read in the log directory, in 10**6 bytes per second.
    """

    devices: int
    memory_gb_s: float
    compute_gflop_s: float
    disk_mb_s: float

    def line(self) -> str:
        what = f"CPU and {self.devices} GPUs" if self.devices > 1 else "CPU and GPU" if self.devices else "CPU"
        return (
            f"node check passed: {what}; {self.compute_gflop_s:g} GFLOP/s, memory {self.memory_gb_s:g} GB/s, "
            f"disk {self.disk_mb_s:g} MB/s"
        )


@dataclass(frozen=True, slots=True)
class StragglerFound(Event):
    """A rank of the round needs longer for its part of a step than the others, which wait for it.

    Attributes:
        node: the rank's node.
        phase: what it needs longer for: ``data``, or ``compute`` for everything else but waiting for other ranks.
        ratio: its time for a micro-batch divided by the median of the other ranks.
    """

    round: int
    rank: int
    node: str
    phase: str
    ratio: float

    def line(self) -> str:
        what = "waits longer for data" if self.phase == "data" else "computes longer"
        return (
            f"rank {self.rank} on node {self.node} is slow: it {what}, and needs {self.ratio:.1f} times as long "
            "for its part of a step as the other ranks, which wait for it"
        )


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """A worker process was started.

    Attributes:
        round, rank: its place; 0 and -1 if it was started ahead of one.
        start_s: seconds that the agent took to start it.
    """

    round: int
    rank: int
    local_rank: int
    pid: int
    cause: str
    start_s: float


@dataclass(frozen=True, slots=True)
class WorkerKept(Event):
    """A worker of an earlier round, which was suspended, got its place in the next one; its process stays."""

    round: int
    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerAhead(Event):
    """A worker that was started ahead has come to its first use of the world, and can take a place in a round.

    Attributes:
        took_s: seconds since its start.
    """

    local_rank: int
    pid: int
    took_s: float


@dataclass(frozen=True, slots=True)
class WorkerPlaced(Event):
    """A worker that was started ahead got its place in a round."""

    round: int
    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerExited(Event):
    """A worker process was reaped.

    Attributes:
        round, rank: its place; 0 and -1 if it was started ahead and had none yet.
        exit_code: its exit code, -N for signal N.
        ran_s: seconds since its start.
        stopped: whether the agent had ordered it to stop.
    """

    round: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    ran_s: float
    stopped: bool


@dataclass(frozen=True, slots=True)
class TrainingBegun(Event):
    """The first of this node's workers has reached the point where training begins or resumes.

    Attributes:
        rank: its rank.
        step: optimizer steps done before.
        total: steps of the whole training; 0 if unknown.
        restore_s: seconds that it took to restore the state.
        uncompared: steps between the last comparison of the ranks' states and the restored snapshot; 0 if that snapshot
            was compared, or if this training's states are not compared.
    """

    round: int
    rank: int
    step: int
    total: int
    restore_s: float
    uncompared: int = 0


@dataclass(frozen=True, slots=True)
class FirstStep(Event):
    """The round's first optimizer step is done; ``step`` counts those done so far."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class RoundProgress(Event):
    """How far this node's workers have come in a round that goes on: after 4 s, then ever more rarely, up to a minute.

    It tells what a run has done that is in progress, and what an agent's had that was killed.

    Attributes:
        step: optimizer steps done.
        trained_s: seconds from the beginning of training to that step.
    """

    round: int
    step: int
    trained_s: float


@dataclass(frozen=True, slots=True)
class RoundSteps(Event):
    """This node's workers have done their last step in a round.

    Attributes:
        first, last: optimizer steps done when training began and when it ended.
        trained_s: seconds from the beginning of training to the last step done.
    """

    round: int
    first: int
    last: int
    trained_s: float


@dataclass(frozen=True, slots=True)
class SnapshotsLeftOut(Event):
    """From now on a worker of this node writes no snapshots in memory.

    Attributes:
        cause: why, with how much memory they need and how much there is, or how much they used.
    """

    round: int
    cause: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint written by this node is committed to durable storage.

    Attributes:
        round: the round in which it was committed, or the last one before.
        step: optimizer steps done.
        path: directory or URL; empty if a worker wrote it, since workers do not report it.
    """

    round: int
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class NodeEnded(Event):
    """This node's part of the run is over."""

    code: int
    cause: str


def event_name(kind: type[Any]) -> str:
    """``RoundFormed`` -> ``round_formed``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[object], most: int = 8) -> str:
    """``a, b``; of more than so many names, the first ones: ``a, b, ...``."""
    return ", ".join([*map(str, names[:most]), *(["..."] if len(names) > most else [])])
