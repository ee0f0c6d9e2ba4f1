"""The agent's decisions about workers that start ahead, if several workers are a replica: only whole ones take part."""

from __future__ import annotations

from dataclasses import replace

import policy_events
from policy_events import brk, gone

from elastic_agents import policy_types as v
from elastic_agents.policy_types import View
from elastic_launch import contract as c
from elastic_launch.rendezvous.wire import messages as m

FIRST, LAST, ALL = frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1, 2, 3})


def decide(view: View, event: v.Event, nproc: int = 4) -> tuple[View, list[v.Action]]:
    return policy_events.decide(view, event, nproc, "n0", replica_size=2)


def after(view: View, *events: v.Event, nproc: int = 4) -> View:
    for event in events:
        view, _ = decide(view, event, nproc)
    return view


def form(number: int, slots: tuple[int, ...] = (), nodes: int = 2, nproc: int = 4) -> m.Form:
    """The order to form a round in which n0 takes part with some of its workers; by default, with all."""
    formed = policy_events.form(number, nodes)
    first, *others = formed.round.members
    first = replace(first, workers=len(slots) or nproc, slots=slots)
    return replace(formed, round=replace(formed.round, members=(first, *others)))


def ready(*local_ranks: int, number: int = 1) -> list[v.Event]:
    return [v.Reported(number, local_rank, c.Ready(0, live=True)) for local_rank in local_ranks]


def suspended(*local_ranks: int, number: int = 1) -> list[v.Event]:
    return [v.Reported(number, local_rank, c.Suspended(0)) for local_rank in local_ranks]


def came(*local_ranks: int) -> list[v.Event]:
    return [v.Reported(0, local_rank, c.Ahead()) for local_rank in local_ranks]


SLOW = View(ahead=v.AheadWorkers(slow=True))
LIVE = after(SLOW, form(1), *ready(0, 1, 2, 3))
LEFT = after(LIVE, gone(1, -9), *suspended(0, 2))
BROKEN = after(LEFT, *suspended(3))
HALF = after(BROKEN, form(2, (2, 3)), *ready(2, 3, number=2))


def test_the_whole_replicas_go_on_and_a_broken_one_starts_anew() -> None:
    _, actions = decide(LEFT, *suspended(3))
    assert actions == [
        v.Kill(frozenset({0})),
        v.ReportStopped(1, slots=(2, 3)),
        v.StartWorkersAhead(FIRST, yields=True),
    ]
    assert (BROKEN.suspended, BROKEN.ahead.coming) == (LAST, FIRST)
    assert after(BROKEN, gone(0, -9)) == BROKEN, "the exit of the killed one changes nothing"
    _, starts = decide(BROKEN, form(2, (2, 3)))
    assert starts == [v.StartWorkers(form(2, (2, 3)), LAST)]


def test_a_replica_is_offered_once_all_of_its_workers_have_come() -> None:
    one = after(HALF, *came(1))
    there, said = decide(one, *came(0))
    assert said == [m.RankOffer(())]
    drained = after(there, m.DrainRound(1, 2, "membership", "resize"))
    drained = after(drained, *[v.Reported(2, local_rank, c.Drained(9, 0.0)) for local_rank in (2, 3)])
    whole, starts = decide(after(drained, *suspended(2, 3, number=2)), form(3))
    assert starts == [v.StartWorkers(form(3), LAST, waiting=FIRST)]
    assert whole.slots == ALL


def test_if_a_waiting_worker_is_lost_its_replica_is_withdrawn() -> None:
    there = after(HALF, *came(0, 1))
    withdrawn, said = decide(there, v.WorkerExit(0, 0, -9))
    assert said[1:] == [v.StartWorkersAhead(frozenset({0})), m.RankOffer((2, 3))]
    again, said = decide(after(withdrawn, brk(2), *suspended(2, number=2)), *suspended(3, number=2))
    assert said == [v.ReportStopped(2, slots=(2, 3))]
    assert (again.suspended, again.ahead.waiting) == (LAST, frozenset({1}))


def test_if_no_replica_of_the_node_is_whole_its_workers_wait_and_keep_their_state() -> None:
    """A round that can do without this node is formed without it; another one gets the worker once it has come."""
    left = after(LIVE, gone(1, -9), gone(3, -9), *suspended(0))
    broken, actions = decide(left, *suspended(2))
    assert actions == [
        v.ReportStopped(1, importing=True),
        v.StartWorkersAhead(frozenset({1, 3}), yields=True),
    ]
    _, starts = decide(broken, form(2))
    assert starts == [v.StartWorkers(form(2), frozenset({0, 2}), coming=frozenset({1, 3}))]
    there, said = decide(after(broken, *came(1)), *came(3))
    assert said == [m.RankOffer(()), m.Imported()]
    assert there.suspended == frozenset({0, 2})


def test_so_do_they_on_a_node_with_one_replica() -> None:
    live = after(SLOW, form(1, nproc=2), *ready(0, 1), nproc=2)
    _, actions = decide(after(live, gone(0, -9), nproc=2), *suspended(1), nproc=2)
    assert actions == [v.ReportStopped(1, importing=True), v.StartWorkersAhead(frozenset({0}), yields=True)]


def test_a_replica_whose_workers_live_is_not_ended_for_one_that_has_to_start() -> None:
    """The workers of the last replica start with their next round: their state is only in the first one."""
    ahead = replace(LIVE.ahead, in_round=LAST)
    left = after(replace(LIVE, ahead=ahead), gone(2, -9), gone(3, -9), gone(1, -9))
    broken, actions = decide(left, *suspended(0))
    assert actions == [v.ReportStopped(1, importing=True), v.StartWorkersAhead(frozenset({1}), yields=True)]
    assert broken.suspended == frozenset({0})


def test_if_starts_are_short_the_next_round_has_all_workers() -> None:
    live = after(View(), form(1), *ready(0, 1, 2, 3))
    _, actions = decide(after(live, gone(1, -9), *suspended(0, 2)), *suspended(3))
    assert actions == [v.ReportStopped(1)]
