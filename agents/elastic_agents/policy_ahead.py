"""Workers that start ahead of a place in a round: pure decisions, the part of :mod:`elastic_agents.policy` about them.

In a live run a start that is expected to take long holds no other worker up. A node that has lost workers takes part in
the next rounds without them, while their replacements run the script up to its first use of the world; so do all
workers of a node that the leader orders to start ahead. When all that are missing wait for a place, the node says so,
and the leader resizes the round at a step boundary.

A worker ahead that is killed before it has a place is started again, up to :data:`MOST_LOST` in a row. After that, and
at once if it has ended by itself or not come in time, its local rank starts with its next round, where a further
failure is charged as any other. If that has happened :data:`MOST_FAILED` times in a row, the script cannot be started
ahead.

Only whole replicas take part in rounds. If a replica has lost a worker, its others start ahead, too, while another
replica of the node trains; without such a replica they stay suspended until theirs is whole.

If it has ended in a way in which others would, too, and the node has not completed a step in the run, the leader
decides whether the node takes part at all.

Workers ahead belong to no round. They outlive its end, the leader, and an eviction, and end when their node leaves or
the run ends. If a round is formed with one that has not come yet, that worker belongs to the round, and gets its place
as soon as it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_agents import policy_types as v
from elastic_launch.events.facts import NotInTime
from elastic_launch.rendezvous.record import whole_replicas
from elastic_launch.rendezvous.wire import messages as m

Decision = tuple[v.View, list[v.Action]]

MOST_LOST = 3
"""Workers ahead in a row that may be killed before a local rank starts with its next round instead."""

MOST_FAILED = 2
"""Times in a row that workers ahead may fail before all workers of the node start with their rounds.

The first time, the cause may have been a passing one, which a worker of a round would have met, too.
"""


def slots_of(form: m.Form, node_id: str, nproc: int) -> frozenset[int]:
    """Return the local ranks with which a node takes part in the round that an order forms."""
    mine = (member.local_ranks for member in form.round.members if member.node_id == node_id)
    return frozenset(next(mine, range(nproc)))


def settled(before: v.View, view: v.View, actions: list[v.Action], node: v.NodeFacts) -> Decision:
    """Complete a decision: start workers ahead where a round has ended here, and end them where no further one follows.

    Args:
        before: the view before the event.
        view, actions: what was decided about the node's other workers.
    """
    if view.leaving is not None or view.final:
        view, kills = _dismissed(view)
        return view, [*kills, *actions]
    stopped = next((action for action in actions if isinstance(action, v.ReportStopped)), None)
    if stopped is None:
        return view, actions
    others = bool(view.suspended) or len(view.members) > 1
    anew: frozenset[int] = frozenset()
    if _may_start(view) and view.lives and others and before.phase is not v.Phase.FINISHED:
        anew = _missing(view, node)
    slots = _offered(view.ahead.coming | anew, node)
    # Workers of replicas that have lost others.
    broken = view.suspended - frozenset(slots) if slots else frozenset()
    if broken and not whole_replicas(view.suspended, node.replica_size):
        slots, broken = (), frozenset()  # their state may be nowhere else: they wait until their replica is whole
    view = replace(view, suspended=view.suspended - broken)
    view, starts = _start(view, anew | broken, yields=bool(view.suspended))
    report = replace(stopped, slots=slots, importing=bool(view.ahead.coming) and not slots)
    actions = [report if action is stopped else action for action in actions]
    return view, [*([v.Kill(broken)] if broken else []), *actions, *starts]


def ordered(view: v.View, node: v.NodeFacts) -> Decision:
    """The leader orders this node to start its workers ahead; it waits for the report that they are there."""
    if view.phase not in (v.Phase.WAITING, v.Phase.SUSPENDED) or view.ahead.ended:
        return view, []
    actions: list[v.Action] = []
    if _may_start(view) and not view.final:
        view, actions = _start(view, _missing(view, node))
    return view, actions if view.ahead.coming else [*actions, m.Imported(view.ahead.arguments)]


def waits(view: v.View, local_rank: int, arguments: str) -> Decision:
    """A worker ahead waits for its place."""
    one, ahead = frozenset({local_rank}), view.ahead
    if not one <= ahead.coming:
        return view, []
    arguments = arguments or ahead.arguments
    view = _with(view, coming=ahead.coming - one, waiting=ahead.waiting | one, fails=0, arguments=arguments)
    return view, _complete(view)


def exited(view: v.View, event: v.WorkerExit, node: v.NodeFacts) -> Decision:
    """A worker ahead has ended: start another one, or start its local rank with the next round."""
    one, ahead = frozenset({event.local_rank}), view.ahead
    if not one <= ahead.coming | ahead.waiting:
        return view, []
    late = one <= ahead.in_round
    failed = late or (one <= ahead.coming and event.exit_code >= 0)
    fails, lost = ahead.fails + (failed and not ahead.in_round), ahead.lost + 1
    view = _with(view, coming=ahead.coming - one, waiting=ahead.waiting - one, lost=lost, fails=fails)
    if not failed and lost < MOST_LOST:
        view, starts = _start(view, one)
        actions = [v.ReportAheadExit(event.local_rank, "again"), *starts]
        left = _offered(view.ahead.coming, node)
        withdraws = one <= ahead.waiting and left and view.phase is not v.Phase.STOPPING
        return view, [*actions, m.RankOffer(left)] if withdraws else actions
    view = _with(view, in_round=view.ahead.in_round | one, lost=0)
    if event.unfit and view.phase is v.Phase.WAITING:
        return view, [v.ReportAheadExit(event.local_rank, "asks"), v.ReportUnfit(event.local_rank)]
    if event.exit_code == 0 and view.phase is v.Phase.WAITING and not late:
        # A round with such a worker would end at once, or wait for it: the node is not offered to a run that trains.
        return _with(view, ended=True), [v.ReportAheadExit(event.local_rank, "lacking")]
    exit_ = v.ReportAheadExit(event.local_rank, "never" if fails >= MOST_FAILED else "next round")
    return view, [exit_, *([] if view.ahead.coming else _complete(view))]


def over(view: v.View, local_rank: int) -> Decision:
    """A worker ahead has not come in time: the script may never come to a use of the world."""
    one = frozenset({local_rank})
    if not one <= view.ahead.coming:
        return view, []
    fails = view.ahead.fails + (not view.ahead.in_round)
    view = _with(view, in_round=view.ahead.in_round | one, fails=fails)
    return view, [v.Warn(NotInTime("ahead", (local_rank,))), v.KillAhead(one)]


def _may_start(view: v.View) -> bool:
    return view.ahead.slow and view.ahead.fails < MOST_FAILED


def _dismissed(view: v.View) -> Decision:
    ahead, nothing = view.ahead, frozenset[int]()
    if not ahead.coming | ahead.waiting:
        return view, []
    return _with(view, coming=nothing, waiting=nothing), [v.KillAhead(ahead.coming | ahead.waiting)]


def _missing(view: v.View, node: v.NodeFacts) -> frozenset[int]:
    """Return the local ranks without a worker, other than those that start with the next round."""
    ahead = view.ahead
    return frozenset(range(node.nproc)) - view.suspended - ahead.coming - ahead.waiting - ahead.in_round


def _offered(coming: frozenset[int], node: v.NodeFacts) -> tuple[int, ...]:
    """Return the local ranks with which the node could take part in a round; empty for all, and for none."""
    there = frozenset(range(node.nproc)) - coming
    return whole_replicas(there, node.replica_size) if coming else ()


def _start(view: v.View, local_ranks: frozenset[int], *, yields: bool = False) -> Decision:
    if not local_ranks:
        return view, []
    return _with(view, coming=view.ahead.coming | local_ranks), [v.StartWorkersAhead(local_ranks, yields)]


def _complete(view: v.View) -> list[v.Action]:
    """Report that the node can take part with all its workers, if that is news to the leader."""
    if view.ahead.coming or view.ahead.ended or view.phase in (v.Phase.STOPPING, v.Phase.SAVING, v.Phase.OVER):
        return []
    trains = view.phase in (v.Phase.RUNNING, v.Phase.DRAINING, v.Phase.FINISHED)
    return [m.RankOffer(())] if trains else [m.RankOffer(()), m.Imported(view.ahead.arguments)]


def _with(view: v.View, **changes: Any) -> v.View:
    return replace(view, ahead=replace(view.ahead, **changes))
