"""What an agent does about what happens: pure decisions.

``decide(view, event)`` returns the new view and the actions to carry out, in order. It knows nothing of processes,
sockets or time. A node is always in one phase:

- WAITING: no workers; waits for the leader to form a round (or for the leader itself).
- RUNNING: the round's workers run, or some have finished.
- FINISHED: all of this node's workers finished with 0; the run ends when those of all nodes have.
- STOPPING: the workers that are left are being ended; then the node waits again, or exits if ``leaving`` is set.
- OVER: nothing left to do.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum

from elastic_agents.inbox import SignalCaught
from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.membership import LinkDown, RendezvousLost

__all__ = [
    "Action",
    "Event",
    "Finish",
    "GraceOver",
    "Hold",
    "HoldOver",
    "Kill",
    "Phase",
    "ReportDone",
    "ReportFailed",
    "ReportLeaving",
    "ReportStopped",
    "StartFailed",
    "StartWorkers",
    "Terminate",
    "View",
    "Warn",
    "WorkerGone",
    "decide",
]

HOLD = 0.2
"""Seconds for which a worker's exit by SIGTERM or SIGINT waits for the agent's own signal.

Schedulers signal whole groups.
"""


class Phase(Enum):
    """See the module."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class View:
    """All that the policy knows.

    Attributes:
        round: number of the present or last round.
        nodes: nodes in it.
        alive: local ranks of the workers not yet reaped.
        held: local ranks that ended by SIGTERM or SIGINT and are not reported yet.
        leaving: exit code with which the node leaves once its workers are reaped, or None.
        cause: why it leaves.
    """

    phase: Phase = Phase.WAITING
    round: int = 0
    nodes: int = 0
    alive: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    leaving: int | None = None
    cause: str = ""


# Events beside the leader's orders (Form, Break, Evicted, RunEnd) and the membership's (LinkDown, RendezvousLost).


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker was reaped; -N for signal N."""

    round: int
    local_rank: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The workers' grace has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker could not be started.

    Attributes:
        started: local ranks of those that were started before it.
    """

    cause: str
    started: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class HoldOver:
    """The wait for the agent's own signal has passed."""

    round: int
    local_rank: int


Event = (
    m.Form
    | m.Break
    | m.Evicted
    | m.RunEnd
    | LinkDown
    | RendezvousLost
    | WorkerGone
    | SignalCaught
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
    """Send SIGTERM to the workers that are left and raise GraceOver after the grace."""

    round: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the workers that are left, with their whole sessions."""


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
class ReportStopped:
    """Report that the round's workers are reaped."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportDone:
    """Report that the round's workers have all finished with 0."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportLeaving:
    """Tell the leader that this node leaves."""

    reason: str


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
    StartWorkers | Terminate | Kill | Hold | ReportFailed | ReportStopped | ReportDone | ReportLeaving | Warn | Finish
)

Decision = tuple[View, list[Action]]

_ON_RETURN = "this node goes on when an agent is back at the endpoint"

_PREEMPTING = (-signal.SIGTERM, -signal.SIGINT)


def decide(view: View, event: Event, nproc: int) -> Decision:
    """Return what follows from an event on a node with nproc workers."""
    if view.phase is Phase.OVER:
        return view, []
    match event:
        case m.Form():
            return _form(view, event, nproc)
        case m.Break(round=number):
            return _stop(view) if number == view.round else (view, [])
        case m.Evicted(reason=reason, final=final):
            if final and view.leaving is None:
                view = replace(view, leaving=int(ExitCode.RENDEZVOUS), cause=reason)
            return _kill(view)
        case m.RunEnd(code=code, cause=cause):
            return _end(view, code, cause)
        case LinkDown():
            return _link_down(view, event)
        case RendezvousLost(error=error):
            if view.phase is Phase.FINISHED:
                return _over(view, ExitCode.DONE, "finished; the rendezvous was lost afterwards")
            return _end(view, error.exit_code, f"{error.message} {error.hint}".strip())
        case WorkerGone():
            return _gone(view, event)
        case HoldOver(round=number, local_rank=local_rank):
            if number != view.round or local_rank not in view.held:
                return view, []
            return _fail(replace(view, held=view.held - {local_rank}), [ReportFailed(local_rank, preempted=True)])
        case StartFailed(cause=cause, started=started):
            view, actions = _end(replace(view, alive=started), ExitCode.STARTUP_FAILURE, cause)
            return view, [ReportLeaving(cause), *actions]
        case SignalCaught(number=number):
            return _signal(view, number)
        case GraceOver(round=number):
            overdue = view.phase is Phase.STOPPING and number == view.round and view.alive
            return view, [Kill()] if overdue else []


def _form(view: View, form: m.Form, nproc: int) -> Decision:
    if view.phase is not Phase.WAITING or view.leaving is not None:
        return view, []
    view = View(Phase.RUNNING, form.round.number, len(form.round.members), frozenset(range(nproc)))
    return view, [StartWorkers(form)]


def _stop(view: View) -> Decision:
    """End the round on this node, with grace."""
    # Without these reports the leader would charge the crashes that they caused elsewhere.
    held: list[Action] = [ReportFailed(local_rank, preempted=True) for local_rank in sorted(view.held)]
    view = replace(view, held=frozenset())
    match view.phase:
        case Phase.RUNNING if view.alive:
            return replace(view, phase=Phase.STOPPING), [*held, Terminate(view.round)]
        case Phase.RUNNING | Phase.FINISHED:
            view, actions = _settle(view)
            return view, [*held, *actions]
        case _:
            return view, []


def _kill(view: View) -> Decision:
    """End the round on this node, without grace."""
    if view.alive:
        return replace(view, phase=Phase.STOPPING), [Kill()]
    return _settle(view)


def _settle(view: View) -> Decision:
    """All workers are reaped."""
    if view.leaving is not None:
        return _over(view, view.leaving, view.cause)
    return replace(view, phase=Phase.WAITING, held=frozenset()), [ReportStopped(view.round)]


def _over(view: View, code: int, cause: str) -> Decision:
    return replace(view, phase=Phase.OVER, leaving=int(code)), [Finish(int(code), cause)]


def _end(view: View, code: int, cause: str) -> Decision:
    if view.leaving is not None:
        code, cause = view.leaving, view.cause
    view = replace(view, leaving=code, cause=cause)
    if view.alive:
        return _stop(view)
    return _over(view, code, cause)


def _link_down(view: View, event: LinkDown) -> Decision:
    if view.phase is Phase.FINISHED:
        if event.gone:
            return _over(view, ExitCode.DONE, f"finished; the run's leader was lost afterwards ({event.reason})")
        return view, [Warn(f"the leader cannot be reached ({event.reason}); this node has finished and waits")]
    if view.phase is Phase.WAITING:
        if not event.gone:
            return view, [Warn(f"waiting for the endpoint: {event.reason}")]
        return view, [Warn(f"parked: the leader is gone ({event.reason}); {_ON_RETURN}")]
    if event.gone or view.nodes == 1:
        # The host's workers died with it: the others would only hang. A node alone might train beside the others.
        view, actions = _stop(view)
        return view, [Warn(f"parking: the leader is gone ({event.reason}); {_ON_RETURN}"), *actions]
    return view, [Warn(f"{event.reason}; the workers train on")]


def _gone(view: View, event: WorkerGone) -> Decision:
    if event.round != view.round or event.local_rank not in view.alive:
        return view, []
    view = replace(view, alive=view.alive - {event.local_rank})
    if view.phase is Phase.STOPPING:
        return (view, []) if view.alive else _settle(view)
    if event.exit_code in _PREEMPTING:
        return replace(view, held=view.held | {event.local_rank}), [Hold(event.round, event.local_rank)]
    if event.exit_code != 0:
        return _fail(view, [ReportFailed(event.local_rank)])
    if view.alive or view.held:
        return view, []
    return replace(view, phase=Phase.FINISHED), [ReportDone(view.round)]


def _fail(view: View, reports: list[Action]) -> Decision:
    """Report failures and end the round here at once, without waiting for the leader's break."""
    view, actions = _stop(view)
    held = [action for action in actions if isinstance(action, ReportFailed)]
    return view, [*held, *reports, *actions[len(held) :]]


def _signal(view: View, number: int) -> Decision:
    name = signal.Signals(number).name
    if view.leaving is not None:
        return view, [Kill()] if view.alive else []
    view = replace(view, leaving=128 + number, cause=f"stopped by {name}", held=frozenset())
    view, actions = _stop(view) if view.alive else _over(view, 128 + number, view.cause)
    return view, [ReportLeaving(name), *actions]
