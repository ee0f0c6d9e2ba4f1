"""The policy's types: its view, the events that come in, and the actions that go out."""

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
    "SAVING",
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
    "ReportDisconnected",
    "ReportFailed",
    "ReportReady",
    "ReportStopped",
    "SendExit",
    "StartFailed",
    "StartWorkers",
    "Suspend",
    "SuspendOver",
    "TeardownOver",
    "Terminate",
    "View",
    "Warn",
    "WorkerDisconnected",
    "WorkerDrained",
    "WorkerEnded",
    "WorkerGone",
    "WorkerReady",
    "WorkerStopping",
    "WorkerSuspended",
]

HOLD = 0.2
"""Seconds for which a worker's exit by SIGTERM or SIGINT waits for the agent's own signal.

Schedulers signal whole groups.
"""

SERVES = 600.0
"""Seconds for which a leaving node serves its snapshot at most, even if it has more time left."""

TEARDOWN = 5.0
"""Seconds that a worker has to exit, or to be suspended, after reporting that it is drained; it may hang meanwhile."""

SAVING = 600.0
"""Seconds that a script has to save its state and exit after its ranks have agreed to stop; it may hang meanwhile."""

ENDING = 30.0
"""Seconds that a worker has to exit once its script, threads and exit functions have ended: its data may be large."""


class Phase(Enum):
    """See :mod:`elastic_agents.policy`."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    SAVING = "saving"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class View:
    """The policy's complete state.

    Attributes:
        round: number of the current or last round.
        nodes: nodes in it.
        alive: local ranks of the workers not yet reaped, other than the suspended ones.
        ready: local ranks whose workers train with this project's library: they can be drained.
        live: those in ``alive`` that can be suspended; while the round is being stopped, those that were told to be.
        suspended: local ranks whose workers have left the round, and wait for a place in the next one.
        drained: local ranks whose workers have stopped by agreement of all ranks, after the same step, and saved.
        stopping: those that have agreed to stop likewise, and whose script is saving; they are drained if it exits with
            0.
        step: optimizer steps that the drained workers have done.
        keeps: this node has a snapshot of that step, and can serve it to others when it leaves.
        serving: this node has left and stopped, and others may need that snapshot.
        final: the run ends when the round is drained: the node saves before it reports that.
        told: the leader knows that the round's workers are gone, or need not know.
        held: local ranks that ended by SIGTERM or SIGINT and are not reported yet.
        leaving: exit code with which the node leaves once its workers are reaped, or None.
        cause: why it leaves.
    """

    phase: Phase = Phase.WAITING
    round: int = 0
    nodes: int = 0
    alive: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    live: frozenset[int] = frozenset()
    suspended: frozenset[int] = frozenset()
    drained: frozenset[int] = frozenset()
    stopping: frozenset[int] = frozenset()
    step: int = 0
    keeps: bool = False
    serving: bool = False
    final: bool = False
    told: bool = False
    held: frozenset[int] = frozenset()
    leaving: int | None = None
    cause: str = ""


# Events other than the leader's orders and the membership's (LinkDown, CutOff, RendezvousLost).


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker was reaped; -N for signal N."""

    round: int
    local_rank: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker reported that it has begun to train and can be drained.

    Attributes:
        live: whether it can be suspended.
    """

    round: int
    local_rank: int
    live: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """A worker reported that it has stopped by agreement of all ranks, with its state in memory.

    It then ends or, if it can, is suspended.

    Attributes:
        keeps: whether the node now has a snapshot of that step, and can serve it to others.
    """

    round: int
    local_rank: int
    step: int
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStopping:
    """A worker reported that all ranks stop after the same step, and that its script saves the state and exits."""

    round: int
    local_rank: int
    step: int


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """A worker that can be suspended reported that an exchange with other ranks failed; it waits for orders.

    Attributes:
        error: its exception, in one line.
    """

    round: int
    local_rank: int
    error: str


@dataclass(frozen=True, slots=True)
class WorkerSuspended:
    """A worker reported that it has left the round's process groups, and waits for its place in another round."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker reported that its script has ended, and that only its objects remain to be destroyed."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Leave:
    """This node is to leave the run: because of a signal, a notice, or a request.

    Attributes:
        code: exit code with which it leaves.
        seconds: time for a drain; 0 if there is none.
        number: the signal sent to workers that cannot be drained.
    """

    reason: str
    code: int
    seconds: float = 0.0
    number: int = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class CopiesDone:
    """The copies to durable storage are complete, or could not be made.

    Attributes:
        given_up: there was no time for them, or this node is no longer a member.
    """

    given_up: bool = False


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The time for the drain has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class TeardownOver:
    """The time is over in which a worker had to exit that is drained, or whose script has ended."""

    round: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class SuspendOver:
    """The time is over in which the workers that were told to leave the round had to do so."""

    round: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The workers' grace has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not be started.

    Attributes:
        started: local ranks of the workers that were started before it.
        code: exit code of this node.
    """

    cause: str
    started: frozenset[int] = frozenset()
    code: int = int(ExitCode.STARTUP_FAILURE)


@dataclass(frozen=True, slots=True)
class HoldOver:
    """The wait for the agent's own signal is over."""

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
    | WorkerStopping
    | WorkerDisconnected
    | WorkerSuspended
    | WorkerEnded
    | Leave
    | CopiesDone
    | DrainOver
    | TeardownOver
    | SuspendOver
    | StartFailed
    | GraceOver
    | HoldOver
)

# Actions.


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the round's workers and report that they have started.

    Attributes:
        kept: local ranks whose workers are suspended: they get their places instead.
    """

    form: m.Form
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Suspend:
    """Tell workers to leave the round, and raise SuspendOver after the time that they have for it."""

    round: int
    cause: str
    local_ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class SendExit:
    """Tell suspended workers to exit."""

    local_ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send a signal to workers (None: all that are left, none of them suspended); raise GraceOver after the grace."""

    round: int
    local_ranks: frozenset[int] | None = None
    number: int = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill workers (None: all that are left, suspended ones too), with their entire sessions."""

    local_ranks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask the round's workers that are not suspended to stop after the same step.

    Raise DrainOver after the seconds, if given.
    """

    round: int
    cause: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class AwaitCopies:
    """Raise CopiesDone once what is in memory is copied to durable storage, and no node is fetching a snapshot.

    Attributes:
        bounded: also raise DrainOver after the time that this node has left, since no drain has set a limit.
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


@dataclass(frozen=True, slots=True)
class ReportDisconnected:
    """Report to the leader that a worker's connection to another rank broke; the worker itself has not failed."""

    local_rank: int
    error: str


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Report that all of the round's workers can be drained."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportStopped:
    """Report that the round's workers are reaped or suspended.

    Attributes:
        drained: optimizer steps done, if all have stopped by agreement, else -1.
        serve: whether to serve the snapshot to others from now on.
        secured: whether the node has waited for copies to durable storage.
    """

    round: int
    drained: int = -1
    serve: bool = False
    secured: bool = False


@dataclass(frozen=True, slots=True)
class Warn:
    """Print a warning."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Exit with the code."""

    code: int
    cause: str


Action = (
    StartWorkers
    | Suspend
    | SendExit
    | AskStop
    | AwaitCopies
    | AwaitEnd
    | Terminate
    | Kill
    | Hold
    | ReportReady
    | ReportFailed
    | ReportDisconnected
    | ReportStopped
    | m.Done
    | m.Leaving
    | Warn
    | Finish
)
