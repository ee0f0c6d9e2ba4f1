"""What an agent does in response to events: pure decisions.

``decide(view, event)`` returns the new view and the actions to carry out, in order. It has no access to processes,
sockets or time. A node is always in one phase:

- WAITING: no workers; waits for the leader to form a round (or for the leader itself).
- RUNNING: the round's workers run, or some have finished.
- DRAINING: the workers have been asked to stop, all after the same step.
- FINISHED: all of this node's workers finished with 0; the run ends when those of all nodes have.
- STOPPING: the remaining workers are being ended or suspended; then the node waits again, with or without suspended
  workers, or exits if ``leaving`` is set.
- SUSPENDED: like WAITING, but some workers of the last round still run: they have left it, and get a place in the next
  round. The leader knows the node as stopped.
- SAVING: this node leaves, or the run ends; what is only in its memory is being copied to durable storage, or served
  to the next round.
- OVER: nothing left to do.

Where a round ends but the run does not, workers that can be suspended are, within a limit; all others are ended. Only a
round with a higher number revives suspended workers. If their node leaves, is evicted or was certainly cut off, or if
the run ends, they are ended: by an order to exit if they are drained, else by SIGKILL. The loss of the leader does not
end them. Those that die meanwhile are simply missing in the next round.

A node may take part in a round with only some of its workers, while others start ahead of a place:
:mod:`elastic_agents.policy_ahead`.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from elastic_agents import policy_ahead
from elastic_agents import policy_types as v
from elastic_launch import contract as c
from elastic_launch.errors import ExitCode
from elastic_launch.events import facts as f
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.node.membership_events import LinkDown, RendezvousLost
from elastic_launch.rendezvous.wire import messages as m

Decision = tuple[v.View, list[v.Action]]

_STOPPED = (-signal.SIGTERM, -signal.SIGINT)


def decide(view: v.View, event: v.Event, node: v.NodeFacts) -> Decision:
    """Return the response to an event on a node."""
    if view.phase is v.Phase.OVER:
        return view, []
    after, actions = _decide(view, event, node)
    return policy_ahead.settled(view, after, actions, node)


def _decide(view: v.View, event: v.Event, node: v.NodeFacts) -> Decision:
    if isinstance(event, v.WorkerExit | v.Reported | v.HungUp) and event.round == 0:
        return _ahead(view, event, node)
    if isinstance(event, m.DrainRound | m.Break | v.OfRound) and event.round != view.round:
        return view, []
    match event:
        case m.Form():
            return _form(view, event, policy_ahead.slots_of(event, node.node_id, node.nproc))
        case m.StartAhead():
            return policy_ahead.ordered(view, node)
        case m.DrainRound():
            return _drain(view, event)
        case m.Break(cause=cause):
            if view.phase is v.Phase.SAVING and view.leaving is None:
                return _saved(view)
            return _stop(view, cause)
        case m.Evicted(reason=reason, final=final, anew=anew):
            if final and view.leaving is None:
                view = replace(view, leaving=int(ExitCode.RENDEZVOUS), cause=reason)
            if anew and view.leaving is not None:
                return view, []  # it saves what it has; storage refuses that if the run has saved since
            view, actions = _kill(view)
            return view, [*actions, v.ForgetSnapshots()] if anew else actions
        case m.Released():
            return _released(view)
        case m.RunEnd(code=code, cause=cause):
            return _end(view, code, cause if view.round or code else f.NodeEnd("never"), idle=node.idle)
        case m.LeftOut(code=code, cause=cause):
            return _left_out(view, code, cause)
        case LinkDown():
            return _link_down(view, event, held=node.held)
        case CutOff():
            return _cut_off(view, event)
        case RendezvousLost(error=error):
            text = " ".join(filter(None, (error.message, error.hint)))
            if view.phase is v.Phase.FINISHED:
                return _over(view, error.exit_code, f.NodeEnd("unknown", text))
            return _end(view, error.exit_code, text)
        case v.WorkerExit():
            return _exited(view, event)
        case v.HungUp(local_rank=local_rank):
            return view, [v.Kill(frozenset({local_rank}), ending=True)] if local_rank in view.suspended else []
        case v.AheadOver(local_rank=local_rank):
            return policy_ahead.over(view, local_rank)
        case v.StartsTake(slow=slow):
            return replace(view, ahead=replace(view.ahead, slow=slow)), []
        case v.HoldOver(local_rank=local_rank):
            if local_rank not in view.held:
                return view, []
            return _fail(replace(view, held=view.held - {local_rank}), [v.ReportFailure(local_rank)])
        case v.StartFailed(cause=cause, missing=missing, code=code):
            view, actions = _end(replace(view, alive=view.alive - missing, live=view.live - missing), code, cause)
            return view, [m.Leaving(cause), *actions]
        case v.DisconnectedOver(local_rank=local_rank, error=error):
            return _disconnected(view, local_rank, error)
        case v.Reported(report=report, local_rank=local_rank):
            return _reported(view, report, local_rank, node)
        case v.Leave():
            return _leave(view, event)
        case v.CopiesDone(given_up=given_up):
            # If something is being copied, the event belongs to an earlier copy.
            done = (given_up or node.idle) and view.phase is v.Phase.SAVING and not view.serving
            return _saved(view) if done else (view, [])
        case v.DrainOver():
            return _drain_over(view)
        case v.TeardownOver(local_rank=local_rank, ended=ended):
            if local_rank not in view.alive:
                return view, []
            # Its script's exit code counts, also where that is a failure: no other worker would be charged for it.
            return replace(view, live=view.live - {local_rank}), [v.Kill(frozenset({local_rank}), ending=ended)]
        case v.SuspendOver():
            return _suspend_over(view)
        case v.GraceOver():
            overdue = view.alive - view.live
            if view.phase is not v.Phase.STOPPING or not overdue:
                return view, []
            return view, [v.Kill(_all_or(view, overdue))]


def _ahead(view: v.View, event: v.WorkerExit | v.Reported | v.HungUp, node: v.NodeFacts) -> Decision:
    """Respond to an event of a worker that was started ahead of a place; the node may have one for it meanwhile."""
    local_rank = event.local_rank
    match event:
        case v.WorkerExit():
            return policy_ahead.exited(view, event, node)
        case v.HungUp():
            return view, [v.Kill(frozenset({local_rank}), ending=True)] if local_rank in view.ahead.waiting else []
        case v.Reported(report=c.Ahead()) if local_rank in view.alive:
            return _placed(view, local_rank) if view.phase is v.Phase.RUNNING else (view, [])
        case v.Reported(report=c.Ahead(arguments=arguments)):
            return policy_ahead.waits(view, local_rank, arguments)
        case _:
            return view, []


def _reported(view: v.View, report: c.Message, local_rank: int, node: v.NodeFacts) -> Decision:
    """Respond to what a worker of the round has reported."""
    if isinstance(report, c.Suspended):
        return _suspended(view, local_rank)
    if local_rank not in view.alive:
        return view, []
    over = v.TeardownOver(view.round, local_rank)
    match report:
        case c.Ready():
            return _ready(view, report, local_rank)
        case c.Drained(step=step):
            # The host of a c10d run serves no snapshot: the other nodes cannot continue without it.
            keeps = not node.hosts and node.snapshot == step
            view = replace(view, drained=view.drained | {local_rank}, step=max(view.step, step), keeps=keeps)
            return view, [v.Later(v.TEARDOWN, over)]
        case c.Stopping(step=step):
            view = replace(view, stopping=view.stopping | {local_rank}, step=max(view.step, step))
            return view, [v.Later(v.SAVING, over)]
        case c.Disconnected(error=error):
            return view, [v.Later(v.DISCONNECTED, v.DisconnectedOver(view.round, local_rank, error))]
        case c.WorkerEnding():
            return view, [v.Later(v.ENDING, replace(over, ended=True))]
        case _:
            return view, []


def _form(view: v.View, form: m.Form, slots: frozenset[int]) -> Decision:
    number, ahead = form.round.number, view.ahead
    revives = view.phase is v.Phase.SUSPENDED and number > view.round
    if not (view.phase is v.Phase.WAITING or revives) or view.leaving is not None:
        return view, []
    kept, waiting, coming = view.suspended & slots, ahead.waiting & slots, ahead.coming & slots
    starts = v.StartWorkers(form, kept, waiting, coming)
    left_out: list[v.Action] = [v.Kill(view.suspended - slots)] if view.suspended - slots else []
    ahead = replace(
        ahead,
        coming=ahead.coming - slots,
        waiting=ahead.waiting - slots,
        in_round=ahead.in_round - slots,
        ended=False,
        lost=0 if waiting else ahead.lost,
    )
    # The round may end before they are ready: those that have their places can be suspended from the start.
    members, live = frozenset(member.incarnation for member in form.round.members), kept | waiting
    view = v.View(v.Phase.RUNNING, number, members, slots, alive=slots, live=live, lives=view.lives, ahead=ahead)
    return view, [*left_out, starts]


def _placed(view: v.View, local_rank: int) -> Decision:
    """A worker of the round that was started ahead waits for its place now."""
    return replace(view, live=view.live | {local_rank}), [v.GivePlace(local_rank)]


def _ready(view: v.View, report: c.Ready, local_rank: int) -> Decision:
    """A worker has begun to train, or can be drained from now on."""
    if view.phase is not v.Phase.RUNNING or not report.drains:
        return view, []
    live = view.live | {local_rank} if report.live else view.live - {local_rank}
    first = local_rank not in view.ready
    view = replace(view, ready=view.ready | {local_rank}, live=live)
    all_train = view.alive <= view.ready
    view = replace(view, lives=report.live and (view.lives or (all_train and view.alive <= live)))
    return view, [v.ReportReady(view.round)] if first and all_train else []


def _disconnected(view: v.View, local_rank: int, error: str) -> Decision:
    """Have the worker leave the round: another rank is gone, and may be known to this node only by this."""
    waits = local_rank in view.live - view.drained
    if view.phase not in (v.Phase.RUNNING, v.Phase.DRAINING) or not waits:
        return view, []
    return _fail(view, [v.ReportDisconnected(local_rank, error)])


def _suspended(view: v.View, local_rank: int) -> Decision:
    asked = view.phase is v.Phase.STOPPING or local_rank in view.drained
    if local_rank not in view.live or not asked:
        return view, []
    one = frozenset({local_rank})
    view = replace(view, alive=view.alive - one, live=view.live - one, suspended=view.suspended | one)
    if view.phase is v.Phase.STOPPING:
        return (view, []) if view.alive else _settle(view)
    return _drained(view)


def _suspend_over(view: v.View) -> Decision:
    if view.phase is not v.Phase.STOPPING or not view.live:
        return view, []
    warning = v.Warn(f.NotInTime("leave", tuple(sorted(view.live))))
    return replace(view, live=frozenset()), [warning, v.Kill(_all_or(view, view.live))]


def _all_or(view: v.View, local_ranks: frozenset[int]) -> frozenset[int] | None:
    """Return the local ranks; None if no other worker of this node runs."""
    return None if local_ranks == view.alive | view.suspended else local_ranks


def _can_drain(view: v.View) -> bool:
    return bool(view.alive) and view.alive <= view.ready and not view.held


def _drain(view: v.View, order: m.DrainRound) -> Decision:
    """Have the workers stop after the same step, or end the round here if some cannot."""
    ask = v.AskStop(view.round, order.cause, order.seconds)
    if view.phase is v.Phase.DRAINING:
        # A worker that waits for a background program goes on with that, unless the run ends.
        ends = order.final and not view.final
        return replace(view, final=view.final or order.final), [ask] if ends else []
    if view.phase is not v.Phase.RUNNING:
        return view, []
    if not _can_drain(view):
        return _stop(view, order.cause)
    return replace(view, phase=v.Phase.DRAINING, final=order.final), [ask]


def _drain_over(view: v.View) -> Decision:
    if view.phase is v.Phase.FINISHED and view.leaving is not None:
        return _over(view, view.leaving, view.cause)
    if view.phase is v.Phase.SAVING:
        warning = v.Warn(f.NotInTime("serve" if view.serving else "save"))
        view, actions = _saved(view)
        return view, [warning, *actions]
    if view.phase is not v.Phase.DRAINING:
        return view, []
    if _exits(view):
        warning = v.Warn(f.NotInTime("serve, exit" if view.keeps else "exit"))
        view, actions = _kill(view)
        return view, [warning, *actions]
    killed = not view.live or _ends(view)
    view, actions = _kill(view) if killed else _stop(view, f.NodeEnd("late"))
    return view, [v.Warn(f.NotInTime("drain, killed" if killed else "drain")), *actions]


def _stop(view: v.View, cause: f.NodeCause, number: int = signal.SIGTERM) -> Decision:
    """End the round on this node; workers that get a signal get ``number``.

    Unless the node leaves, workers that can be suspended are told to be. The others that save as they train need no
    grace, and waiting for others that may be dead would only cost time.
    """
    # Without these reports the leader would charge the crashes that these workers caused elsewhere.
    held: list[v.Action] = [v.ReportFailure(local_rank) for local_rank in sorted(view.held)]
    cut_short = view.phase is v.Phase.DRAINING and view.leaving is not None
    view = replace(view, held=frozenset(), parked=view.parked or cut_short)
    match view.phase:
        case v.Phase.RUNNING | v.Phase.DRAINING if view.alive:
            suspends = frozenset() if _ends(view) else view.live
            kills, ends = (view.alive & view.ready) - suspends, view.alive - view.ready - suspends
            stopping: list[v.Action] = [v.SuspendWorkers(view.round, cause, suspends)] if suspends else []
            stopping += [v.Kill(_all_or(view, kills))] if kills else []
            stopping += [v.Terminate(view.round, _all_or(view, ends), number)] if ends else []
            view, exits = _dismiss(replace(view, phase=v.Phase.STOPPING, live=suspends))
            return view, [*held, *stopping, *exits]
        case v.Phase.RUNNING | v.Phase.DRAINING | v.Phase.FINISHED:
            view, actions = _settle(view)
            return view, [*held, *actions]
        case v.Phase.STOPPING | v.Phase.SUSPENDED:
            return _dismiss(view)
        case _:
            return view, []


def _ends(view: v.View) -> bool:
    """Whether no further round follows on this node."""
    return view.leaving is not None or view.final


def _exits(view: v.View) -> bool:
    """Whether this node leaves after a drain that it has reported, and its workers only have to exit."""
    return view.phase is v.Phase.DRAINING and view.leaving is not None and view.told


def _dismiss(view: v.View) -> Decision:
    """Have suspended workers exit if they get no place any more; others follow once they are suspended.

    Before, they save a state that is newer than the node's snapshot.
    """
    exits = view.suspended
    if not exits or not _ends(view):
        return view, []
    actions: list[v.Action] = [v.SendExit(exits)]
    actions += [v.Later(v.TEARDOWN, v.TeardownOver(view.round, local_rank)) for local_rank in sorted(exits)]
    phase = v.Phase.DRAINING if view.phase is v.Phase.DRAINING else v.Phase.STOPPING
    return replace(view, phase=phase, alive=view.alive | exits, suspended=frozenset()), actions


def _kill(view: v.View) -> Decision:
    """End the round on this node, without grace, and the suspended workers with it."""
    if view.phase is v.Phase.SUSPENDED and view.leaving is None:
        # The leader may form a round at once: it knows the node as stopped.
        return replace(view, phase=v.Phase.WAITING, suspended=frozenset()), [v.Kill()]
    if workers := view.alive | view.suspended:
        nothing: frozenset[int] = frozenset()
        return replace(view, phase=v.Phase.STOPPING, alive=workers, live=nothing, suspended=nothing), [v.Kill()]
    if view.phase is v.Phase.WAITING and view.leaving is None:
        return view, []  # already reported; the next round may be formed with the port that was reported then
    return _settle(view)


def _settle(view: v.View, drained: int | None = None) -> Decision:
    """All workers are reaped or suspended."""
    if view.suspended and _ends(view):
        reports: list[v.Action] = []
        if (
            view.leaving is not None
            and not view.final
            and drained is not None
            and (len(view.members) > 1 or view.keeps)
        ):
            # The others need not wait until these workers have exited: what they have to save is in memory.
            view = replace(view, told=True)
            reports.append(v.ReportStopped(view.round, drained, view.keeps))
        view, actions = _dismiss(view)
        return view, [*reports, *actions]
    if view.leaving is None and (not view.final or drained is None):
        phase = v.Phase.SUSPENDED if view.suspended else v.Phase.WAITING
        reports = [] if view.told else [v.ReportStopped(view.round, drained)]
        return replace(view, phase=phase, held=frozenset(), told=True), reports
    if view.leaving is None:
        return replace(view, phase=v.Phase.SAVING), [v.AwaitCopies()]
    if drained is None:
        told = view.told
        view, actions = _over(view, view.leaving, view.cause)
        # The others must not wait for what this node saves as it leaves.
        return view, actions if told or view.phase is v.Phase.OVER else [v.ReportStopped(view.round), *actions]
    # Others continue from their own memory or this node's; if neither has the state, new nodes need the disk's.
    told = view.told
    view = replace(view, phase=v.Phase.SAVING, serving=view.keeps, told=told or len(view.members) > 1 or view.keeps)
    stopped: list[v.Action] = [v.ReportStopped(view.round, drained, view.keeps)] if view.told and not told else []
    return view, [*stopped, v.AwaitCopies()]


def _released(view: v.View) -> Decision:
    """No node needs this node's snapshot (any more), or the leader that would say so is gone."""
    if _exits(view):
        return replace(view, keeps=False), []
    if view.phase is not v.Phase.SAVING or not view.serving:
        return view, []
    return replace(view, serving=False), [v.AwaitCopies()]


def _saved(view: v.View) -> Decision:
    """Everything that must be saved is saved, or there is no time left for it."""
    stopped: list[v.Action] = [] if view.told else [v.ReportStopped(view.round, view.step, secured=True)]
    if view.leaving is None:
        return replace(view, phase=v.Phase.WAITING, told=True), stopped
    view, actions = _over(view, view.leaving, view.cause)
    return view, [*stopped, *actions]


def _over(view: v.View, code: int, cause: f.NodeCause, *, idle: bool = True) -> Decision:
    """Exit, once what is in memory only is saved: the memory is lost with this node.

    ``idle``: nothing is being copied. Otherwise a script that is done has ended before a checkpoint that was due.
    """
    view, done = replace(view, leaving=int(code), cause=cause), code == ExitCode.DONE
    if view.phase is v.Phase.SAVING or (done and idle) or not view.round:
        return replace(view, phase=v.Phase.OVER), [v.Finish(int(code), cause)]
    return replace(view, phase=v.Phase.SAVING, told=True), [v.AwaitCopies(bounded=True, begun=done)]


def _end(view: v.View, code: int, cause: f.NodeCause, *, idle: bool = True) -> Decision:
    if view.phase is v.Phase.SAVING and view.leaving is None:
        view = replace(view, leaving=int(code), cause=cause, told=True)
        return view, [v.AwaitCopies(bounded=True)]
    if view.phase is v.Phase.SAVING or _exits(view):
        return _released(view)
    finished = view.phase is v.Phase.FINISHED and code == ExitCode.DONE
    if view.leaving is not None and not finished:
        code, cause = view.leaving, view.cause
    view = replace(view, leaving=code, cause=cause, told=True)
    if view.alive or view.suspended:
        return _stop(view, cause)
    return _over(view, code, cause, idle=idle)


def _left_out(view: v.View, code: int, cause: str) -> Decision:
    """The run goes on without this node, and forms its next round once the workers here have ended."""
    if view.leaving is not None or view.phase is v.Phase.SAVING:
        return view, []
    view = replace(view, leaving=code, cause=cause)
    return _stop(view, cause) if view.alive or view.suspended else _over(view, code, cause)


def _link_down(view: v.View, event: LinkDown, *, held: bool) -> Decision:
    if view.phase is v.Phase.SAVING or _exits(view):
        return _released(view) if event.gone else (view, [])
    actions: list[v.Action] = []
    node: f.Meanwhile = "stays stopped" if held else "trains"
    if view.phase in _UNAFFECTED:
        node = _UNAFFECTED[view.phase]
    elif event.gone or len(view.members) == 1:
        # The host's workers died with it: the others would only hang. A single node might train beside the others.
        node = "stops"
        view, actions = _stop(view, event.reason)
    return view, [v.Warn(f.LeaderLost(event.reason, event.gone, event.elects, node)), *actions]


_UNAFFECTED: dict[v.Phase, f.Meanwhile] = {
    v.Phase.FINISHED: "finished",
    v.Phase.DRAINING: "drains",
    v.Phase.WAITING: "waits",
    v.Phase.SUSPENDED: "waits",
}
"""What a node continues to do, with or without its link."""


def _cut_off(view: v.View, event: CutOff) -> Decision:
    """The others may form a round without this node: kill what could train or write in parallel with them.

    If the leader's node is a member of this round, the workers need not be killed: either those of that node are out of
    reach, too, and these can do no step without them, or they are killed there, since their node leads no longer. Else
    all nodes of this round may be on one side of a cut, and the leader, or the next one, on the other.
    """
    stopping = view.phase is v.Phase.STOPPING and view.leaving is None
    whole = len(view.members) == 1 or event.leader not in view.members
    cut_off = event.certain or (bool(view.alive) and (whole or stopping))
    if not (view.alive or view.suspended) or not cut_off:
        return view, []
    view, actions = _kill(view)
    return view, [v.Warn(event.reason), *actions]


def _exited(view: v.View, event: v.WorkerExit) -> Decision:
    one = frozenset({event.local_rank})
    if one <= view.suspended:
        view = replace(view, suspended=view.suspended - one)
        ended = view.phase is v.Phase.SUSPENDED and not view.suspended
        return (replace(view, phase=v.Phase.WAITING) if ended else view), []
    if not one <= view.alive:
        return view, []
    view = replace(view, alive=view.alive - one, live=view.live - one)
    if view.phase is v.Phase.STOPPING:
        return (view, []) if view.alive else _settle(view)
    if event.exit_code == 0:
        finished = one if view.phase is v.Phase.RUNNING and not view.drained else frozenset()
        view = replace(view, drained=view.drained | (one & view.stopping), finished=view.finished | finished)
    # How a drained worker ends does not count: its state is saved.
    if event.exit_code != 0 and event.local_rank not in view.drained:
        if event.exit_code in _STOPPED:
            return replace(view, held=view.held | one), [v.Later(v.HOLD, v.HoldOver(event.round, event.local_rank))]
        return _fail(view, [v.ReportFailure(event.local_rank)])
    return _drained(view)


def _drained(view: v.View) -> Decision:
    """A worker has finished, or is drained and has exited or is suspended."""
    if view.alive or view.held:
        return view, []
    if view.drained:
        # If others were asked, too, and have ended with 0, the script has not honoured the stop.
        return _settle(view, view.step if view.drained | view.finished == view.slots else None)
    return replace(view, phase=v.Phase.FINISHED), [m.Done(view.round)]


def _fail(view: v.View, reports: list[v.Action]) -> Decision:
    """Report failures and end the round here at once, without waiting for the leader's break."""
    view, actions = _stop(view, f.NodeEnd("failed"))
    # First: the report on a failure reads what the worker has left behind.
    suspends = [action for action in actions if isinstance(action, v.SuspendWorkers)]
    held = [action for action in actions if isinstance(action, v.ReportFailure)]
    others = [action for action in actions if not isinstance(action, v.SuspendWorkers | v.ReportFailure)]
    return view, [*suspends, *held, *reports, *others]


def _leave(view: v.View, event: v.Leave) -> Decision:
    """Leave the run, after a drain if there is time for one; on a second request, at once."""
    if view.phase is v.Phase.SAVING and view.leaving is None:
        view = replace(view, leaving=event.code, cause=f.UserStop(event.reason))
        return view, [m.Leaving(event.reason, event.seconds), v.AwaitCopies(bounded=True)]
    if view.phase is v.Phase.SAVING:
        return _saved(view)
    if view.leaving is not None:
        return _kill(view) if view.alive else (view, [])
    drains = view.phase in (v.Phase.RUNNING, v.Phase.DRAINING) and _can_drain(view) and event.seconds > 0
    parked = view.phase in (v.Phase.WAITING, v.Phase.STOPPING, v.Phase.SUSPENDED)
    view = replace(view, leaving=event.code, cause=f.UserStop(event.reason), held=frozenset(), parked=parked)
    if drains:
        # The ranks agree among themselves, so they need not wait for the leader's order.
        actions: list[v.Action] = [v.AskStop(view.round, event.reason, event.seconds)]
        return replace(view, phase=v.Phase.DRAINING), [m.Leaving(event.reason, event.seconds), *actions]
    if view.alive or view.suspended:
        view, actions = _stop(view, view.cause, event.number)
    else:
        view, actions = _over(view, event.code, view.cause)
    return view, [m.Leaving(event.reason), *actions]
