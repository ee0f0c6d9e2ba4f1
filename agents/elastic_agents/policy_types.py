"""The policy's types: its view, the events that come in, and the actions that go out. All names are public."""

from __future__ import annotations

import signal
from enum import Enum

from elastic_launch.contract import Message
from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import AfterAhead, NodeCause, NodeWarning
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.node.membership_events import LinkDown, RendezvousLost
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.values import Value

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

DISCONNECTED = 0.1
"""Seconds for which a worker's report on a broken connection waits for its cause.

The exit of the worker that it has lost, or the leader's order, says more.
"""

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


class AheadWorkers(Value):
    """The workers of a node that are started ahead of a place in a round; see :mod:`elastic_agents.policy_ahead`.

    Attributes:
        slow: whether a start is expected to take longer than other workers should wait for it.
        coming: local ranks whose workers are starting.
        waiting: those whose workers wait for a place.
        in_round: those that start with their next round, since ahead of it they have not come.
        lost: workers in a row that were killed before they had a place.
        fails: times in a row that workers ended by themselves, or did not come in time; those that end before the same
            round count once.
        arguments: what the last one that came was given; see :class:`elastic_launch.contract.Ahead`.
        ended: whether one has ended with 0 before it needed a place: the node is not offered until its next round.
    """

    slow: bool = False
    coming: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    in_round: frozenset[int] = frozenset()
    lost: int = 0
    fails: int = 0
    arguments: str = ""
    ended: bool = False


class View(Value):
    """The policy's complete state.

    Attributes:
        round: number of the current or last round.
        members: incarnations of the nodes in it.
        slots: local ranks with which this node takes part in it.
        alive: local ranks of the workers not yet reaped, other than the suspended ones.
        ready: local ranks whose workers train with this project's library: they can be drained.
        live: those in ``alive`` that can be suspended; while the round is being stopped, those that were told to be.
        suspended: local ranks whose workers have left the round, and wait for a place in the next one.
        drained: local ranks whose workers have stopped by agreement of all ranks, after the same step, and saved.
        finished: those whose workers have ended with 0 before they were asked to stop.
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
        parked: the node began to leave when its round was over, and maybe no other goes on with its state.
        lives: the workers that last began to train here can be suspended.
        ahead: the workers that are started ahead of a place.
    """

    phase: Phase = Phase.WAITING
    round: int = 0
    members: frozenset[str] = frozenset()
    slots: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    live: frozenset[int] = frozenset()
    suspended: frozenset[int] = frozenset()
    drained: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    stopping: frozenset[int] = frozenset()
    step: int = 0
    keeps: bool = False
    serving: bool = False
    final: bool = False
    told: bool = False
    held: frozenset[int] = frozenset()
    leaving: int | None = None
    cause: NodeCause = ""
    parked: bool = False
    lives: bool = False
    ahead: AheadWorkers = AheadWorkers()


class NodeFacts(Value):
    """What the policy knows of its node besides the view.

    Attributes:
        nproc: workers of the node: whole replicas.
        hosts: whether the run's leader is on this node, and no other could take its place.
        snapshot: step of the newest snapshot in the node's memory; None without one.
        idle: whether nothing is being copied to durable storage, nor served to another node.
        held: whether the guard has stopped the workers, since the agent did not run.
        replica_size: workers of a replica.
    """

    nproc: int
    node_id: str = ""
    hosts: bool = False
    snapshot: int | None = None
    idle: bool = True
    held: bool = False
    replica_size: int = 1


# Events other than the leader's orders and the membership's (LinkDown, CutOff, RendezvousLost).


class OfRound(Value):
    """An event that counts only in its own round."""

    round: int


class WorkerExit(OfRound):
    """The process of a worker was reaped.

    Attributes:
        round: of its present place; 0 if it was started ahead of one.
        exit_code: -N for signal N.
        unfit: whether it was started ahead, another one would end so, too, and this node has not completed a step.
        rank: None if it had no place.
        ran: seconds from its start.
        ended: when it was reaped, by the agent's clock.
    """

    local_rank: int
    exit_code: int
    unfit: bool = False
    rank: int | None = None
    pid: int = 0
    ran: float = 0.0
    ended: float = 0.0


class Reported(OfRound):
    """What a worker of this node has reported.

    Attributes:
        round: of the worker's present place; 0 if it was started ahead of one.
        report: one of the messages that workers send, see :mod:`elastic_launch.contract`.
    """

    local_rank: int
    report: Message


class HungUp(OfRound):
    """A worker that waits for a place has closed its connection.

    Attributes:
        round: the last one that it had a place in; 0 if it was started ahead of one.
    """

    local_rank: int


class StartsTake(Value):
    """It was learned whether a start is expected to take longer than other workers should wait for it."""

    slow: bool


class AheadOver(Value):
    """The time is over in which a worker that was started ahead had to come to its first use of the world."""

    local_rank: int


class Leave(Value):
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


class CopiesDone(Value):
    """The copies to durable storage are complete, or could not be made.

    Attributes:
        given_up: there was no time for them, or this node is no longer a member.
    """

    given_up: bool = False


class DrainOver(OfRound):
    """The time for the drain has passed."""


class TeardownOver(OfRound):
    """The time is over in which a worker had to exit that is drained, or whose script has ended.

    Attributes:
        ended: whether its script has ended.
    """

    local_rank: int
    ended: bool = False


class SuspendOver(OfRound):
    """The time is over in which the workers that were told to leave the round had to do so."""


class GraceOver(OfRound):
    """The workers' grace has passed."""


class StartFailed(Value):
    """A worker could not be started.

    Attributes:
        missing: local ranks of the workers of the round that will not run.
        code: exit code with which the node leaves.
    """

    cause: str
    missing: frozenset[int]
    code: int = int(ExitCode.STARTUP_FAILURE)


class HoldOver(OfRound):
    """The wait for the agent's own signal is over."""

    local_rank: int


class DisconnectedOver(OfRound):
    """The wait for the cause of a broken connection is over."""

    local_rank: int
    error: str


Event = (
    m.Form
    | m.DrainRound
    | m.Break
    | m.Released
    | m.Evicted
    | m.RunEnd
    | m.LeftOut
    | m.StartAhead
    | LinkDown
    | CutOff
    | RendezvousLost
    | WorkerExit
    | Reported
    | HungUp
    | StartsTake
    | AheadOver
    | Leave
    | CopiesDone
    | DrainOver
    | TeardownOver
    | SuspendOver
    | StartFailed
    | GraceOver
    | HoldOver
    | DisconnectedOver
)

# Actions.


class StartWorkers(Value):
    """Start the round's workers and report that they have started.

    Attributes:
        kept: local ranks whose workers are suspended: they get their places instead.
        waiting: those whose workers were started ahead, and wait: likewise.
        coming: those whose workers were started ahead: they get their places with :class:`GivePlace`.
    """

    form: m.Form
    kept: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()


class GivePlace(Value):
    """Give a worker that was started ahead the place in the round that was formed before it had come."""

    local_rank: int


class StartWorkersAhead(Value):
    """Start workers ahead of a place in a round, and raise AheadOver for each after the time that it has to come.

    Attributes:
        yields: whether others of this node enter a round now, and need the processor time first.
    """

    local_ranks: frozenset[int]
    yields: bool = False


class ForgetSnapshots(Value):
    """Drop the snapshots in this node's memory: the run has begun anew without them."""


class KillAhead(Value):
    """Kill workers that were started ahead and have no place yet."""

    local_ranks: frozenset[int]


class ReportAheadExit(Value):
    """Print that a worker that was started ahead has ended before it had a place."""

    local_rank: int
    next: AfterAhead


class SuspendWorkers(Value):
    """Tell workers to leave the round, and raise SuspendOver after the time that they have for it."""

    round: int
    cause: NodeCause
    local_ranks: frozenset[int]


class SendExit(Value):
    """Tell suspended workers to exit."""

    local_ranks: frozenset[int]


class Terminate(Value):
    """Send a signal to workers (None: all that are left, none of them suspended); raise GraceOver after the grace."""

    round: int
    local_ranks: frozenset[int] | None = None
    number: int = signal.SIGTERM


class Kill(Value):
    """Kill workers (None: all that are left of the round, suspended ones too), with their entire sessions.

    Attributes:
        ending: whether they seem to end by themselves, for a reason that is to be found.
    """

    local_ranks: frozenset[int] | None = None
    ending: bool = False


class AskStop(Value):
    """Ask the round's workers that are not suspended to stop after the same step.

    Raise DrainOver after the seconds, if given.
    """

    round: int
    cause: NodeCause
    seconds: float | None


class AwaitCopies(Value):
    """Raise CopiesDone once what is in memory is copied to durable storage, and no node is fetching a snapshot.

    Attributes:
        bounded: also raise DrainOver after the time that this node has left, since no drain has set a limit.
        begun: only what is being copied already: the script is done, and needs no newer state.
    """

    bounded: bool = False
    begun: bool = False


class Later(Value):
    """Raise the event after the seconds."""

    seconds: float
    event: TeardownOver | HoldOver | DisconnectedOver


class ReportFailure(Value):
    """Report a worker's failure to the leader."""

    local_rank: int


class ReportUnfit(Value):
    """Report to the leader that a worker that was started ahead has ended, and that others would, too."""

    local_rank: int


class ReportDisconnected(Value):
    """Report to the leader that a worker's connection to another rank broke; the worker itself has not failed."""

    local_rank: int
    error: str


class ReportReady(Value):
    """Report that all of the round's workers can be drained."""

    round: int


class ReportStopped(Value):
    """Report that the round's workers are reaped or suspended.

    Attributes:
        drained: optimizer steps done, if all have stopped by agreement, else None.
        serve: whether to serve the snapshot to others from now on.
        secured: whether the node has waited for copies to durable storage.
        slots: local ranks with which the node could take part in the next round; empty for all, or if it is importing.
        importing: whether all of its workers are starting ahead.
    """

    round: int
    drained: int | None = None
    serve: bool = False
    secured: bool = False
    slots: tuple[int, ...] = ()
    importing: bool = False


class Warn(Value):
    """Print a warning."""

    of: NodeWarning


class Finish(Value):
    """Exit with the code."""

    code: int
    cause: NodeCause


Action = (
    StartWorkers
    | SuspendWorkers
    | SendExit
    | GivePlace
    | StartWorkersAhead
    | ForgetSnapshots
    | KillAhead
    | ReportAheadExit
    | AskStop
    | AwaitCopies
    | Later
    | Terminate
    | Kill
    | ReportReady
    | ReportFailure
    | ReportUnfit
    | ReportDisconnected
    | ReportStopped
    | m.Done
    | m.RankOffer
    | m.Imported
    | m.Leaving
    | Warn
    | Finish
)
