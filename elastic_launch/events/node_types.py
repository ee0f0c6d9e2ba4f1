"""What happens on one node; :mod:`elastic_launch.events.types` has these names, too, and the leader's decisions."""

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
    "RoundSteps",
    "TrainingBegun",
    "WorkerExited",
    "WorkerStarted",
]


@dataclass(frozen=True, slots=True)
class OrderReceived(Event):
    """The node got an order from the leader.

    Attributes:
        kind: of a break or drain, as of a broken round.
    """

    order: str
    round: int
    term: int
    cause: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class LinkChanged(Event):
    """The node's link to the leader came up or went down, or the node found itself frozen or cut off."""

    up: bool
    cause: str


@dataclass(frozen=True, slots=True)
class NoticeReceived(Event):
    """The node was told that it is to go.

    Attributes:
        source: AWS, GCP, Azure, Slurm, file or signal.
        kind: preemption, maintenance, rebalance, scale-in, time limit or request.
        seconds: that are left; None if that is not known.
        leaves: whether it leaves the run because of it.
    """

    source: str
    kind: str
    cause: str
    seconds: float | None
    leaves: bool


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


@dataclass(frozen=True, slots=True)
class TrainingBegun(Event):
    """The first of this node's workers has come to where training begins or goes on.

    Attributes:
        rank: its rank.
        step: optimizer steps done before.
        total: steps of the whole training, 0 if that is not known.
        restore_s: seconds that restoring the state took it.
    """

    round: int
    rank: int
    step: int
    total: int
    restore_s: float


@dataclass(frozen=True, slots=True)
class FirstStep(Event):
    """The round's first optimizer step is done; step counts those done so far."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class RoundSteps(Event):
    """This node's workers of a round do no more steps.

    Attributes:
        first, last: optimizer steps done when training began and when it ended.
        trained_s: seconds from its beginning to the last step done.
    """

    round: int
    first: int
    last: int
    trained_s: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint that this node has written is committed to durable storage.

    Attributes:
        round: in which it was, or which was the last before.
        step: optimizer steps done.
        path: directory or URL; empty where a worker has written it, which does not say.
    """

    round: int
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class NodeEnded(Event):
    """This node's part of the run is over."""

    code: int
    cause: str
