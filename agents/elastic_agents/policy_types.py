"""What the agent's policy speaks of: its view, the events that come in, the actions that go out."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.node.membership_events import LinkDown, RendezvousLost
from elastic_launch.rendezvous.wire import messages as m

__all__ = [
    "ENDING",
    "HOLD",
    "SERVES",
    "TEARDOWN",
    "Action",
    "AskStop",
    "AwaitCopies",
    "AwaitEnd",
    "CopiesDone",
    "DrainOver",
    "Event",
    "Finish",
    "GraceOver",
    "Hold",
    "HoldOver",
    "Kill",
    "Leave",
    "Phase",
    "ReportDone",
    "ReportFailed",
    "ReportLeaving",
    "ReportReady",
    "ReportStopped",
    "StartFailed",
    "StartWorkers",
    "TeardownOver",
    "Terminate",
    "View",
    "Warn",
    "WorkerDrained",
    "WorkerEnded",
    "WorkerGone",
    "WorkerReady",
]

HOLD = 0.2
"""Seconds for which a worker's exit by SIGTERM or SIGINT waits for the agent's own signal.

Schedulers signal whole groups.
"""

SERVES = 600.0
"""Seconds for which a node that leaves serves its snapshot at most, however many it has left."""

TEARDOWN = 5.0
"""Seconds that a worker which has said that it is drained has to end; it may hang in what it leaves."""


ENDING = 30.0
"""Seconds that a worker has to exit whose script, threads and exit functions have ended: what it holds may be large."""


class Phase(Enum):
    """See :mod:`elastic_agents.policy`."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPING = "stopping"
    SAVING = "saving"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class View:
    """All that the policy knows.

    Attributes:
        round: number of the present or last round.
        nodes: nodes in it.
        alive: local ranks of the workers not yet reaped.
        ready: local ranks whose workers train by this project's library: they can be drained.
        drained: local ranks whose workers have stopped by agreement of all ranks, after the same step, and saved.
        step: optimizer steps that these have done.
        keeps: this node has a snapshot of that step, and can serve it to others when it leaves.
        serving: it left, stopped, and others may need that snapshot.
        final: the run ends when the round is drained: the node saves before it reports that.
        told: the leader knows that the round's workers are gone, or need not.
        held: local ranks that ended by SIGTERM or SIGINT and are not reported yet.
        leaving: exit code with which the node leaves once its workers are reaped, or None.
        cause: why it leaves.
    """

    phase: Phase = Phase.WAITING
    round: int = 0
    nodes: int = 0
    alive: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    drained: frozenset[int] = frozenset()
    step: int = 0
    keeps: bool = False
    serving: bool = False
    final: bool = False
    told: bool = False
    held: frozenset[int] = frozenset()
    leaving: int | None = None
    cause: str = ""


# Events beside the leader's orders and the membership's (LinkDown, CutOff, RendezvousLost).


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker was reaped; -N for signal N."""

    round: int
    local_rank: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker said that it has begun to train and can be drained."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """A worker said that it has stopped by agreement of all ranks, with its state in memory, and ends now.

    Attributes:
        keeps: whether the node has a snapshot of that step by now, and can serve it to others.
    """

    round: int
    local_rank: int
    step: int
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker said that its script has ended, and that only what it holds is still to be destroyed."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Leave:
    """This node is to leave the run: a signal, a notice, somebody's wish.

    Attributes:
        code: exit code with which it leaves.
        seconds: that it has for a drain; 0 if there is no time for one.
        number: the signal that workers get which cannot be drained.
    """

    reason: str
    code: int
    seconds: float = 0.0
    number: int = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class CopiesDone:
    """What was to be copied to durable storage is copied, or could not be.

    Attributes:
        given_up: there was no time for it, or this node is no member any more.
    """

    given_up: bool = False


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The time for the drain has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class TeardownOver:
    """The time has passed that a worker has to exit which is drained, or whose script has ended."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The workers' grace has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not be started.

    Attributes:
        started: local ranks of those that were started before it.
        code: that this node ends with.
    """

    cause: str
    started: frozenset[int] = frozenset()
    code: int = int(ExitCode.STARTUP_FAILURE)


@dataclass(frozen=True, slots=True)
class HoldOver:
    """The wait for the agent's own signal has passed."""

    round: int
    local_rank: int


Event = (
    m.Form
    | m.Drain
    | m.Break
    | m.Released
    | m.Evicted
    | m.RunEnd
    | LinkDown
    | CutOff
    | RendezvousLost
    | WorkerGone
    | WorkerReady
    | WorkerDrained
    | WorkerEnded
    | Leave
    | CopiesDone
    | DrainOver
    | TeardownOver
    | StartFailed
    | GraceOver
    | HoldOver
)

# Actions.


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the round's workers and report that they are."""

    form: m.Form


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send a signal to workers (None: all that are left) and raise GraceOver after the grace."""

    round: int
    local_ranks: frozenset[int] | None = None
    number: int = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill workers (None: all that are left), with their whole sessions."""

    local_ranks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask the round's workers to stop after the same step; raise DrainOver after the seconds, if there are any."""

    round: int
    cause: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class AwaitCopies:
    """Raise CopiesDone once what is in memory is copied to durable storage, and nobody fetches a snapshot.

    Attributes:
        bounded: raise DrainOver after the time that this node has left: no drain has set a limit.
    """

    bounded: bool = False


@dataclass(frozen=True, slots=True)
class AwaitEnd:
    """Raise TeardownOver for the worker after the seconds."""

    round: int
    local_rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Raise HoldOver for the worker after HOLD seconds."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Report a worker's failure to the leader."""

    local_rank: int
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Report that all of the round's workers can be drained."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportStopped:
    """Report that the round's workers are reaped.

    Attributes:
        drained: optimizer steps done, if all have stopped by agreement, else -1.
        serve: whether to serve the snapshot to others from now on.
        secured: copies to durable storage were waited for.
    """

    round: int
    drained: int = -1
    serve: bool = False
    secured: bool = False


@dataclass(frozen=True, slots=True)
class ReportDone:
    """Report that the round's workers have all finished with 0."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportLeaving:
    """Tell the leader that this node leaves, and how many seconds there are for a drain."""

    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Exit with the code."""

    code: int
    cause: str


Action = (
    StartWorkers
    | AskStop
    | AwaitCopies
    | AwaitEnd
    | Terminate
    | Kill
    | Hold
    | ReportReady
    | ReportFailed
    | ReportStopped
    | ReportDone
    | ReportLeaving
    | Warn
    | Finish
)
