"""The agent's decisions about workers that can be suspended."""

from __future__ import annotations

from signal import SIGTERM

import pytest
from policy_events import CUT_OFF, GONE, LOST, OUT, SILENT, TERM_CODE, brk, decide, form, gone, leave

from elastic_agents import policy_types as v
from elastic_agents.policy_types import Phase, View
from elastic_launch import contract as c
from elastic_launch.events.facts import NodeEnd, NotInTime, UserStop
from elastic_launch.events.sentences import warning
from elastic_launch.rendezvous.wire import messages as m

ZERO, ONE, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
FAILED = NodeEnd("failed")
ERROR = "RuntimeError: Connection closed by peer"


def live(local_rank: int, number: int = 1) -> v.Reported:
    return v.Reported(number, local_rank, c.Ready(0, live=True))


def suspended(local_rank: int) -> v.Reported:
    return v.Reported(1, local_rank, c.Suspended(0))


def drained(local_rank: int) -> v.Reported:
    return v.Reported(1, local_rank, c.Drained(7, 0.0))


def view(*events: v.Event, nodes: int = 2, snapshot: int | None = None) -> View:
    """The policy's view on a node whose two workers can be suspended, in round 1, after further events.

    Args:
        snapshot: step of the newest snapshot in the node's memory.
    """
    found, _ = decide(View(), form(1, nodes), 2)
    for event in (live(0), live(1), *events):
        found, _ = decide(found, event, 2, snapshot=snapshot)
    return found


def after(before: View, event: v.Event) -> tuple[Phase, list[v.Action]]:
    found, actions = decide(before, event, 2)
    return found.phase, actions


LIVE = view()
SUSPENDING = view(brk(1))
SUSPENDED = view(brk(1), suspended(0), suspended(1))
DRAINED = [m.DrainRound(1, 1, "membership", "resize"), drained(0), drained(1), suspended(0)]


# The round ends.


def test_a_break_suspends_live_workers_and_ends_the_others() -> None:
    assert after(LIVE, brk(1)) == (Phase.STOPPING, [v.SuspendWorkers(1, "rank 0 crashed", BOTH)])
    mixed = view(v.Reported(1, 1, c.Ready(0, live=False)))
    assert after(mixed, brk(1)) == (Phase.STOPPING, [v.SuspendWorkers(1, "rank 0 crashed", ZERO), v.Kill(ONE)])
    first, _ = decide(View(), form(1), 2)
    first, _ = decide(first, live(0), 2)
    assert after(first, brk(1)) == (Phase.STOPPING, [v.SuspendWorkers(1, "rank 0 crashed", ZERO), v.Terminate(1, ONE)])


def test_the_worker_beside_a_failed_one_is_suspended() -> None:
    failed, actions = decide(LIVE, gone(1, -9), 2)
    assert actions == [v.SuspendWorkers(1, FAILED, ZERO), v.ReportFailure(1)]
    assert after(failed, suspended(0)) == (Phase.SUSPENDED, [v.ReportStopped(1)])


def test_a_lost_leader_suspends_workers_once_it_is_gone() -> None:
    parking, actions = decide(LIVE, GONE, 2)
    assert actions[1:] == [v.SuspendWorkers(1, GONE.reason, BOTH)]
    assert parking.phase is Phase.STOPPING
    assert after(LIVE, SILENT)[0] is Phase.RUNNING


def test_a_round_is_stopped_once_each_worker_is_reaped_or_suspended() -> None:
    assert after(SUSPENDING, suspended(0)) == (Phase.STOPPING, [])
    one = view(brk(1), suspended(0))
    assert after(one, suspended(1)) == (Phase.SUSPENDED, [v.ReportStopped(1)])
    assert after(one, gone(1, -9)) == (Phase.SUSPENDED, [v.ReportStopped(1)])
    assert after(view(brk(1), gone(0, -9)), gone(1, 1)) == (Phase.WAITING, [v.ReportStopped(1)])


def test_workers_that_are_late_are_killed() -> None:
    one = view(brk(1), suspended(0))
    late, actions = decide(one, v.SuspendOver(1), 2)
    assert [type(actions[0]), *actions[1:]] == [v.Warn, v.Kill(ONE)]
    assert decide(late, suspended(1), 2) == (late, []), "it is being killed"
    assert after(late, gone(1, -9)) == (Phase.SUSPENDED, [v.ReportStopped(1)])
    for before in (LIVE, SUSPENDED, late):
        assert decide(before, v.SuspendOver(1), 2) == (before, [])
    assert decide(one, v.SuspendOver(0), 2) == (one, [])


def test_the_end_of_the_grace_spares_those_that_were_told_to_leave() -> None:
    first, _ = decide(View(), form(1), 2)
    for event in (live(0), brk(1)):
        first, _ = decide(first, event, 2)
    assert after(first, v.GraceOver(1)) == (Phase.STOPPING, [v.Kill(ONE)])


@pytest.mark.parametrize("event", [suspended(0), v.Reported(2, 0, c.Suspended(0))], ids=["unasked", "another round"])
def test_what_is_not_asked_for_is_ignored(event: v.Event) -> None:
    assert decide(LIVE, event, 2) == (LIVE, [])


# A broken connection.


def test_a_broken_connection_is_reported_and_ends_the_round_here() -> None:
    broken, actions = decide(LIVE, v.DisconnectedOver(1, 0, ERROR), 2)
    assert actions == [v.SuspendWorkers(1, FAILED, BOTH), v.ReportDisconnected(0, ERROR)]
    assert broken.alive == BOTH, "it is not dead"


@pytest.mark.parametrize("before", [SUSPENDING, SUSPENDED, view(brk(1), suspended(0))])
def test_a_worker_that_was_told_to_leave_may_lose_its_connections(before: View) -> None:
    assert decide(before, v.DisconnectedOver(1, 1, ERROR), 2) == (before, [])


def test_a_broken_connection_of_others_is_ignored() -> None:
    assert decide(LIVE, v.DisconnectedOver(2, 0, ERROR), 2) == (LIVE, [])
    plain = view(v.Reported(1, 0, c.Ready(0, live=False)))
    assert decide(plain, v.DisconnectedOver(1, 0, ERROR), 2) == (plain, [])


# The next round.


def test_a_broken_connection_waits_for_its_cause() -> None:
    said = v.Reported(1, 0, c.Disconnected(7, ERROR))
    assert decide(LIVE, said, 2) == (LIVE, [v.Later(v.DISCONNECTED, v.DisconnectedOver(1, 0, ERROR))])


@pytest.mark.parametrize(
    ("hung_up", "killed"),
    [(v.HungUp(1, 0), True), (v.HungUp(1, 1), False), (v.HungUp(2, 0), False), (v.HungUp(0, 0), False)],
    ids=["suspended", "training", "another round", "ahead"],
)
def test_a_suspended_worker_that_hangs_up_is_killed_and_its_own_end_is_looked_for(
    hung_up: v.HungUp, killed: bool
) -> None:
    before = view(m.DrainRound(1, 1, "membership", "resize"), drained(0), suspended(0))
    assert decide(before, hung_up, 2) == (before, [v.Kill(ZERO, ending=True)] if killed else [])


def test_the_next_round_keeps_suspended_workers() -> None:
    kept, actions = decide(SUSPENDED, form(2), 2)
    assert (kept.phase, kept.alive, kept.ready, kept.suspended) == (Phase.RUNNING, BOTH, frozenset(), frozenset())
    assert actions == [v.StartWorkers(form(2), BOTH)]
    assert decide(view(brk(1), suspended(0), gone(1, -9)), form(2), 2)[1] == [v.StartWorkers(form(2), ZERO)]


def test_a_kept_worker_can_be_suspended_again_before_it_is_ready() -> None:
    kept, _ = decide(view(brk(1), suspended(0), gone(1, -9)), form(2), 2)
    assert after(kept, brk(2)) == (Phase.STOPPING, [v.SuspendWorkers(2, "rank 0 crashed", ZERO), v.Terminate(2, ONE)])


def test_a_round_that_is_over_revives_nothing() -> None:
    assert decide(SUSPENDED, form(1), 2) == (SUSPENDED, [])


def test_a_suspended_worker_that_dies_is_missing_in_the_next_round() -> None:
    one, actions = decide(SUSPENDED, gone(0, -9), 2)
    assert (one.phase, one.suspended, actions) == (Phase.SUSPENDED, ONE, [])
    assert after(one, gone(1, 0)) == (Phase.WAITING, [])


# No further round.

EXITING = [v.SendExit(BOTH), v.Later(v.TEARDOWN, v.TeardownOver(1, 0)), v.Later(v.TEARDOWN, v.TeardownOver(1, 1))]


@pytest.mark.parametrize(
    "event", [m.RunEnd(1, 91, "spent"), m.Evicted(1, "taken", final=True), LOST], ids=lambda e: type(e).__name__
)
def test_suspended_workers_end_with_the_run(event: v.Event) -> None:
    ending, actions = decide(SUSPENDED, event, 2)
    assert ending.phase is Phase.STOPPING
    # Those of a node that the others have left out have nothing to save.
    assert actions == ([v.Kill()] if isinstance(event, m.Evicted) else EXITING)
    assert after(ending, v.TeardownOver(1, 1)) == (Phase.STOPPING, [v.Kill(ONE)])
    ending, _ = decide(ending, gone(0, 0), 2)
    phase, actions = after(ending, gone(1, -9))
    assert phase in (Phase.OVER, Phase.SAVING)
    assert v.ReportStopped(1) not in actions, "that was said"


@pytest.mark.parametrize("event", [m.Evicted(1, "slow"), OUT], ids=["evicted", "cut off"])
def test_a_node_that_is_no_member_waits_without_its_workers(event: v.Event) -> None:
    found, actions = decide(SUSPENDED, event, 2)
    assert (found.phase, found.suspended) == (Phase.WAITING, frozenset())
    assert v.Kill() in actions
    assert v.ReportStopped(1) not in actions
    assert decide(found, gone(0, -9), 2) == (found, [])


@pytest.mark.parametrize("event", [SILENT, GONE, CUT_OFF, brk(1)], ids=["silent", "gone", "cut off", "break"])
def test_suspended_workers_outlive_their_leader(event: v.Event) -> None:
    found, actions = decide(SUSPENDED, event, 2)
    assert found == SUSPENDED
    assert [action for action in actions if not isinstance(action, v.Warn)] == []


def test_a_node_that_leaves_ends_its_suspended_workers() -> None:
    assert after(SUSPENDED, leave(SIGTERM, 30.0)) == (Phase.STOPPING, [m.Leaving("SIGTERM"), *EXITING])
    half = view(brk(1), suspended(0))
    half, actions = decide(half, leave(SIGTERM, 30.0), 2)
    assert actions == [m.Leaving("SIGTERM"), v.SendExit(frozenset({0})), v.Later(v.TEARDOWN, v.TeardownOver(1, 0))]
    half, actions = decide(half, suspended(1), 2)
    assert (half.phase, actions) == (Phase.STOPPING, []), "one after the other"
    assert after(half, gone(0, 143)) == (Phase.STOPPING, [v.SendExit(ONE), v.Later(v.TEARDOWN, v.TeardownOver(1, 1))])


# Planned stops.


def test_a_drain_is_complete_once_all_workers_are_suspended() -> None:
    assert after(view(*DRAINED), suspended(1)) == (Phase.SUSPENDED, [v.ReportStopped(1, 7)])
    assert after(view(*DRAINED), gone(1, 0)) == (Phase.SUSPENDED, [v.ReportStopped(1, 7)])


def test_the_limit_of_a_drained_workers_teardown_spares_suspended_ones() -> None:
    before = view(*DRAINED)
    assert decide(before, v.TeardownOver(1, 0), 2) == (before, [])
    assert after(before, v.TeardownOver(1, 1)) == (Phase.DRAINING, [v.Kill(ONE)])


@pytest.mark.parametrize("final", [False, True], ids=["the node leaves", "the run ends"])
def test_drained_workers_exit_if_no_round_follows(final: bool) -> None:
    order: v.Event = m.DrainRound(1, 1, "preemption", "elasticctl", None, True) if final else leave(SIGTERM, 30.0)
    before = view(order, *DRAINED[1:])
    exiting, actions = decide(before, suspended(1), 2)
    assert exiting.phase is Phase.DRAINING
    # The others of a node that leaves do not wait until its workers have exited. At the end, the node saves first.
    assert actions == (EXITING if final else [v.ReportStopped(1, 7), *EXITING])
    assert decide(exiting, suspended(0), 2) == (exiting, []), "it exits"
    assert after(exiting, v.TeardownOver(1, 1)) == (Phase.DRAINING, [v.Kill(ONE)])
    exiting, _ = decide(exiting, gone(0, TERM_CODE), 2)
    phase, actions = after(exiting, gone(1, -9))
    assert phase is Phase.SAVING
    assert actions == [v.AwaitCopies()]


def test_the_workers_of_a_single_node_that_leaves_exit_before_it_has_stopped() -> None:
    """Its successor needs what is in durable storage."""
    before = view(leave(SIGTERM, 30.0), *DRAINED[1:], nodes=1)
    assert after(before, suspended(1)) == (Phase.DRAINING, EXITING)


SERVED = view(leave(SIGTERM, 30.0), drained(0), drained(1), suspended(0), snapshot=7)


def test_a_node_that_leaves_serves_its_snapshot_while_its_workers_exit() -> None:
    exiting, actions = decide(SERVED, suspended(1), 2)
    assert actions == [v.ReportStopped(1, 7, serve=True), *EXITING]
    exiting, _ = decide(exiting, gone(0, 0), 2)
    saving, actions = decide(exiting, gone(1, 0), 2)
    assert (saving.phase, saving.serving, actions) == (Phase.SAVING, True, [v.AwaitCopies()])


def test_workers_of_a_node_that_leaves_which_do_not_exit_in_time_are_killed_and_had_stopped() -> None:
    exiting, _ = decide(SERVED, suspended(1), 2)
    late, actions = decide(exiting, v.DrainOver(1), 2)
    unserved = ", and the next round has not restored this node's snapshot"
    text = "the workers have stopped, but not exited in time{}; they are killed"
    assert (late.phase, actions) == (Phase.STOPPING, [v.Warn(NotInTime("serve, exit")), v.Kill()])
    assert warning(NotInTime("serve, exit")) == text.format(unserved)
    released, _ = decide(exiting, m.Released(1), 2)
    assert decide(released, v.DrainOver(1), 2)[1] == [v.Warn(NotInTime("exit")), v.Kill()]
    assert warning(NotInTime("exit")) == text.format("")


@pytest.mark.parametrize("event", [m.Released(1), GONE, m.RunEnd(1, 0, "done"), LOST], ids=lambda e: type(e).__name__)
def test_what_releases_a_node_that_leaves_spares_its_workers(event: v.Event) -> None:
    exiting, _ = decide(SERVED, suspended(1), 2)
    assert after(exiting, SILENT) == (Phase.DRAINING, [])
    released, actions = decide(exiting, event, 2)
    assert (released.phase, actions) == (Phase.DRAINING, [])
    for local_rank in (0, 1):
        released, actions = decide(released, gone(local_rank, 0), 2)
    assert (released.phase, released.serving, actions) == (Phase.SAVING, False, [v.AwaitCopies()])
    assert after(released, v.CopiesDone()) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_a_single_node_that_leaves_and_is_released_meanwhile_reports_once_that_it_has_stopped() -> None:
    before = view(leave(SIGTERM, 30.0), drained(0), drained(1), suspended(0), nodes=1, snapshot=7)
    exiting, actions = decide(before, suspended(1), 2)
    assert actions == [v.ReportStopped(1, 7, serve=True), *EXITING]
    released, _ = decide(exiting, m.Released(1), 2)
    for local_rank in (0, 1):
        released, actions = decide(released, gone(local_rank, 0), 2)
    assert actions == [v.AwaitCopies()]
    assert after(released, v.CopiesDone()) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_workers_suspended_after_a_drain_exit_when_the_run_ends() -> None:
    before = view(*DRAINED, suspended(1))
    assert after(before, m.RunEnd(1, 143, "over")) == (Phase.STOPPING, EXITING)


def test_a_drain_that_takes_too_long_suspends_the_rest() -> None:
    before = view(*DRAINED, m.DrainRound(1, 1, "membership", "resize", 5.0))
    late, actions = decide(before, v.DrainOver(1), 2)
    assert late.phase is Phase.STOPPING
    assert actions[1:] == [v.SuspendWorkers(1, NodeEnd("late"), ONE)]
