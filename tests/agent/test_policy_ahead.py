"""The agent's decisions about workers that start ahead of a place in a round."""

from __future__ import annotations

from signal import SIGTERM

import policy_events
import pytest
from policy_events import CUT_OFF, GONE, LOST, OUT, SILENT, brk, form, gone, leave

from elastic_agents import policy_ahead
from elastic_agents import policy_types as v
from elastic_agents.policy_types import Phase, View
from elastic_launch import contract as c
from elastic_launch.rendezvous.wire import messages as m

ZERO, ONE, BOTH, NONE = frozenset({0}), frozenset({1}), frozenset({0, 1}), frozenset[int]()
START = m.StartAhead(1, 1)
WAITING = View(ahead=v.AheadWorkers(slow=True))
CAME, CAME_TOO = v.Reported(0, 0, c.Ahead()), v.Reported(0, 1, c.Ahead())
KILLED, RAISED = v.WorkerExit(0, 0, -9), v.WorkerExit(0, 0, 1)


def decide(view: View, event: v.Event) -> tuple[View, list[v.Action]]:
    return policy_events.decide(view, event, 2, "n0")


def after(view: View, *events: v.Event) -> View:
    for event in events:
        view, _ = decide(view, event)
    return view


def actions(view: View, event: v.Event) -> list[v.Action]:
    return decide(view, event)[1]


def ready(local_rank: int, number: int = 1) -> v.Reported:
    return v.Reported(number, local_rank, c.Ready(0, live=True))


def suspended(local_rank: int, number: int = 1) -> v.Reported:
    return v.Reported(number, local_rank, c.Suspended(0))


LIVE = after(WAITING, form(1), ready(0), ready(1))
LEFT = after(LIVE, gone(0, -9))  # the other one is told to leave the round
WITHOUT = after(LEFT, suspended(1))
PARTIAL = after(WITHOUT, form(2, slots=(1,)))


# A worker is lost.


def test_a_node_goes_on_without_a_lost_worker_while_another_one_starts() -> None:
    assert actions(LEFT, suspended(1)) == [v.ReportStopped(1, slots=(1,)), v.StartWorkersAhead(ZERO, yields=True)]
    assert WITHOUT.ahead.coming == ZERO
    assert (PARTIAL.slots, PARTIAL.alive, PARTIAL.live) == (ONE, ONE, ONE)
    assert actions(WITHOUT, form(2, slots=(1,))) == [v.StartWorkers(form(2, slots=(1,)), ONE)]


def test_it_says_so_when_all_that_were_missing_have_come_and_gives_them_places_in_the_next_round() -> None:
    ready = after(PARTIAL, v.Reported(2, 1, c.Ready(0, live=True)))
    there, said = decide(ready, CAME)
    assert said == [m.RankOffer(())]
    drained = after(there, m.DrainRound(1, 2, "membership", "resize"), v.Reported(2, 1, c.Drained(9, 0.0)))
    assert actions(drained, suspended(1, 2)) == [v.ReportStopped(2, 9)], "all of them"
    whole, starts = decide(after(drained, suspended(1, 2)), form(3))
    assert starts == [v.StartWorkers(form(3), ONE, waiting=ZERO)]
    assert (whole.slots, whole.ahead) == (BOTH, v.AheadWorkers(slow=True))


def test_those_that_have_not_come_are_left_out_of_the_next_round_too() -> None:
    broken = after(PARTIAL, brk(2))
    assert actions(broken, suspended(1, 2)) == [v.ReportStopped(2, slots=(1,))], "the other one starts already"


@pytest.mark.parametrize(
    "before",
    [
        after(LIVE, v.StartsTake(slow=False)),
        after(WAITING, form(1), ready(1)),
        after(LIVE, v.Reported(1, 1, c.Ready(0, live=False))),
    ],
    ids=["a start is short", "it was not known yet", "not all are live"],
)
def test_otherwise_the_others_wait_for_the_next_one(before: View) -> None:
    ended = after(before, gone(0, -9))
    last = suspended(1) if ended.live else gone(1, -9)
    assert actions(ended, last) == [v.ReportStopped(1)]


def test_a_node_without_workers_is_left_out_while_they_start_if_there_are_others() -> None:
    assert actions(LEFT, gone(1, -9)) == [v.ReportStopped(1, importing=True), v.StartWorkersAhead(BOTH)]
    alone = after(WAITING, form(1, nodes=1), ready(0), ready(1))
    assert actions(after(alone, gone(0, -9)), gone(1, -9)) == [v.ReportStopped(1)]


def test_a_worker_that_begins_to_train_and_is_no_longer_live_ends_this() -> None:
    assert LIVE.lives
    again = after(WITHOUT, form(2), v.Reported(2, 1, c.Ready(0, live=True)))
    assert again.lives, "as far as is known"
    assert not after(again, v.Reported(2, 0, c.Ready(0, live=False))).lives


# The leader's order.


def test_the_leader_is_told_when_all_workers_wait() -> None:
    starting, starts = decide(WAITING, START)
    assert starts == [v.StartWorkersAhead(BOTH)]
    assert decide(starting, START) == (starting, []), "the order may be repeated"
    one, said = decide(starting, CAME_TOO)
    assert said == []
    there, said = decide(one, CAME)
    assert said == [m.RankOffer(()), m.Imported()]
    assert decide(there, START) == (there, [m.Imported()])
    joined, starts = decide(there, form(4))
    assert starts == [v.StartWorkers(form(4), waiting=BOTH)]
    assert joined.ahead == v.AheadWorkers(slow=True)


def test_a_node_whose_worker_ends_with_0_before_it_needs_a_place_is_not_offered() -> None:
    """A round with it would wait for that worker, or end at once."""
    starting, _ = decide(WAITING, START)
    ended, said = decide(starting, v.WorkerExit(0, 0, 0))
    assert said == [v.ReportAheadExit(0, "lacking")]
    assert actions(ended, CAME_TOO) == []
    taken, starts = decide(ended, form(4))
    assert starts == [v.StartWorkers(form(4), coming=ONE)], "a run that lacks nodes takes it"
    assert (taken.phase, taken.ahead.ended) == (v.Phase.RUNNING, False)


def test_a_node_whose_start_is_short_could_begin_at_once() -> None:
    assert decide(View(), START) == (View(), [m.Imported()])


def test_a_node_in_a_round_ignores_the_order() -> None:
    assert decide(LIVE, START) == (LIVE, [])


def test_a_round_may_be_formed_with_workers_that_have_not_come() -> None:
    one = after(WAITING, START, CAME)
    joined, starts = decide(one, form(4))
    assert starts == [v.StartWorkers(form(4), waiting=ZERO, coming=ONE)]
    assert actions(joined, CAME_TOO) == [v.GivePlace(1)]
    broken, stops = decide(joined, brk(4))
    assert stops == [v.SuspendWorkers(4, "rank 0 crashed", ZERO), v.Terminate(4, ONE)], "one has its place"
    assert decide(broken, CAME_TOO) == (broken, [])


@pytest.mark.parametrize("came", [(CAME, CAME_TOO, form(4)), (CAME, form(4), CAME_TOO)], ids=["before", "after"])
def test_workers_ahead_with_places_are_suspended_if_the_round_breaks_before_they_train(
    came: tuple[v.Event, ...],
) -> None:
    broken, stops = decide(after(WAITING, START, *came), brk(4))
    assert stops == [v.SuspendWorkers(4, "rank 0 crashed", BOTH)]
    waiting = after(broken, suspended(0, 4), suspended(1, 4))
    assert actions(waiting, form(5)) == [v.StartWorkers(form(5), BOTH)], "they keep their processes"


# Workers ahead that end.


def test_a_worker_ahead_that_was_killed_is_started_again_but_not_for_ever() -> None:
    lost = PARTIAL
    for _ in range(policy_ahead.MOST_LOST - 1):
        lost, starts = decide(lost, KILLED)
        assert starts == [v.ReportAheadExit(0, "again"), v.StartWorkersAhead(ZERO)]
    given_up, said = decide(lost, KILLED)
    assert said == [v.ReportAheadExit(0, "next round"), m.RankOffer(())]
    whole, starts = decide(after(given_up, brk(2), suspended(1, 2)), form(3))
    assert starts == [v.StartWorkers(form(3), ONE)]
    assert whole.ahead == v.AheadWorkers(slow=True)


def test_one_that_waits_may_be_killed_likewise() -> None:
    lost = after(PARTIAL, KILLED, CAME)
    again, starts = decide(lost, KILLED)
    assert starts[1:] == [v.StartWorkersAhead(ZERO), m.RankOffer((1,))], "it was offered"
    assert again.ahead.coming == ZERO
    assert actions(after(again, CAME), KILLED)[1:] == [m.RankOffer(())], "it starts with its next round"


def test_one_that_gets_a_place_ends_the_count() -> None:
    lost = after(PARTIAL, KILLED, KILLED, CAME)
    assert after(lost, brk(2), suspended(1, 2), form(3, slots=(1,))).ahead.lost == 2
    assert after(lost, brk(2), suspended(1, 2), form(3)).ahead.lost == 0


NEXT, NEVER = "next round", "never"


def lost_again(view: View, number: int) -> View:
    """After a worker failed ahead of it, a round begins with all workers, and one of them is lost."""
    whole = after(view, brk(number - 1), suspended(1, number - 1), form(number), ready(1, number))
    return after(whole, ready(0, number), gone(0, -9, number))


def test_if_the_script_fails_ahead_of_a_round_twice_no_worker_starts_so_again() -> None:
    failed, said = decide(PARTIAL, RAISED)
    assert said == [v.ReportAheadExit(0, NEXT), m.RankOffer(())]
    assert actions(after(failed, brk(2), suspended(1, 2)), form(3)) == [v.StartWorkers(form(3), ONE)]
    again = lost_again(failed, 3)
    assert actions(again, suspended(1, 3)) == [
        v.ReportStopped(3, slots=(1,)),
        v.StartWorkersAhead(ZERO, yields=True),
    ], "once more"
    failed, said = decide(after(again, suspended(1, 3), form(4, slots=(1,))), RAISED)
    assert said == [v.ReportAheadExit(0, NEVER), m.RankOffer(())]
    assert actions(lost_again(failed, 5), suspended(1, 5)) == [v.ReportStopped(5)]
    assert decide(failed, START)[1] == []


def test_one_that_came_shows_that_the_script_can_be_started_ahead() -> None:
    again = after(lost_again(after(PARTIAL, RAISED), 3), suspended(1, 3), form(4, slots=(1,)), CAME)
    assert (again.ahead.fails, again.ahead.waiting) == (0, ZERO)


def test_workers_that_fail_ahead_of_the_same_round_count_once() -> None:
    one, said = decide(after(WAITING, START), RAISED)
    assert said == [v.ReportAheadExit(0, NEXT)], "the other one may come"
    assert actions(one, CAME_TOO) == [m.RankOffer(()), m.Imported()]
    both, said = decide(one, v.WorkerExit(0, 1, 1))
    assert said == [v.ReportAheadExit(1, NEXT), m.RankOffer(()), m.Imported()]
    assert both.ahead.fails == 1


def test_one_that_waits_may_end_by_itself() -> None:
    """Its agent's link has closed, or the like: it has shown that it can start ahead."""
    found = after(PARTIAL, CAME, RAISED)
    assert not found.ahead.fails
    assert found.ahead.coming == ZERO


def test_one_that_does_not_come_is_killed_and_starts_with_its_next_round() -> None:
    late, kills = decide(PARTIAL, v.AheadOver(0))
    assert [type(kills[0]), *kills[1:]] == [v.Warn, v.KillAhead(ZERO)]
    ended, said = decide(late, KILLED)
    assert said == [v.ReportAheadExit(0, NEXT), m.RankOffer(())]
    assert ended.ahead.fails == 1
    there = after(PARTIAL, CAME)
    assert decide(there, v.AheadOver(0)) == (there, [])


@pytest.mark.parametrize("event", [CAME, KILLED, v.AheadOver(0)], ids=lambda event: type(event).__name__)
def test_what_is_not_known_is_ignored(event: v.Event) -> None:
    assert decide(WAITING, event) == (WAITING, [])


# No further round.


@pytest.mark.parametrize("before", [PARTIAL, WITHOUT, after(WAITING, START), after(PARTIAL, CAME)])
@pytest.mark.parametrize(
    "event",
    [m.RunEnd(1, 0, "done"), m.Evicted(1, "taken", final=True), LOST, leave(SIGTERM), leave(SIGTERM, 30.0)],
    ids=["end", "evicted", "lost", "told to leave", "with time"],
)
def test_workers_ahead_end_with_their_node_s_part_of_the_run(before: View, event: v.Event) -> None:
    ahead = before.ahead.coming | before.ahead.waiting
    found, said = decide(before, event)
    assert said[0] == v.KillAhead(ahead)
    assert not found.ahead.coming | found.ahead.waiting
    for local_rank in ahead:
        assert actions(found, v.WorkerExit(0, local_rank, -9)) == []


def test_they_end_when_the_last_round_is_drained() -> None:
    ready = after(PARTIAL, v.Reported(2, 1, c.Ready(0, live=True)))
    assert actions(ready, m.DrainRound(1, 2, "preemption", "elasticctl", None, True))[0] == v.KillAhead(ZERO)


@pytest.mark.parametrize(
    "event", [SILENT, GONE, CUT_OFF, OUT, m.Evicted(1, "slow"), brk(2)], ids=lambda event: type(event).__name__
)
def test_they_outlive_rounds_and_leaders(event: v.Event) -> None:
    assert after(PARTIAL, event).ahead.coming == ZERO


def test_a_node_has_finished_when_those_of_its_workers_have_that_are_in_the_round() -> None:
    finished, said = decide(PARTIAL, gone(1, 0, 2))
    assert finished.phase is Phase.FINISHED
    assert said == [m.Done(2)]
    assert actions(finished, brk(2)) == [v.ReportStopped(2, slots=(1,))]


# A node that has not trained.


UNFIT = v.WorkerExit(0, 0, 1, unfit=True)
ASKS = "asks"


def test_the_leader_decides_about_a_node_whose_worker_would_fail_again() -> None:
    found, said = decide(after(WAITING, START), UNFIT)
    assert said == [v.ReportAheadExit(0, ASKS), v.ReportUnfit(0)]
    assert actions(found, m.LeftOut(1, 90, "why")) == [v.KillAhead(ONE), v.Finish(90, "why")]
    assert actions(found, form(1)) == [v.StartWorkers(form(1), coming=ONE)], "a run that has not trained"


def test_a_node_of_a_round_goes_on_without_asking() -> None:
    assert actions(PARTIAL, UNFIT) == [v.ReportAheadExit(0, NEXT), m.RankOffer(())]


def test_a_node_says_what_its_workers_were_given() -> None:
    there = after(WAITING, START, v.Reported(0, 0, c.Ahead("seed 7")))
    assert actions(there, v.Reported(0, 1, c.Ahead("seed 7"))) == [m.RankOffer(()), m.Imported("seed 7")]
    again = after(there, v.Reported(0, 1, c.Ahead("seed 7")))
    assert actions(again, START) == [m.Imported("seed 7")], "the leader is another one"
