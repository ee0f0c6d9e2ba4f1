"""Events of one node. :mod:`elastic_launch.events.types` exports them, too, and has the leader's decisions."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.events.sinks import Event

__all__ = [
    "CheckpointSaved",
    "FirstStep",
    "LinkChanged",
    "NodeEnded",
    "NoticeReceived",
    "OrderReceived",
    "RoundProgress",
    "RoundSteps",
    "TrainingBegun",
    "WorkerAhead",
    "WorkerExited",
    "WorkerKept",
    "WorkerPlaced",
    "WorkerStarted",
]


@dataclass(frozen=True, slots=True)
class OrderReceived(Event):
    """The node received an order from the leader.

    Attributes:
        kind: for a break or drain, the kind as of a broken round.
        workers: for the forming of a round, how many workers of this node are in it.
    """

    order: str
    round: int
    term: int
    cause: str
    kind: str = ""
    workers: int = 0


@dataclass(frozen=True, slots=True)
class LinkChanged(Event):
    """The node's link to the leader came up or went down, or the node found itself frozen or cut off."""

    up: bool
    cause: str


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
        cause: why, with how much memory they need and how much there is.
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
