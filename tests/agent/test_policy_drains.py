"""The agent's decisions about drains: workers that stop after the same step, save and end."""

from __future__ import annotations

from signal import SIGTERM

import pytest
from policy_events import GONE, SILENT, brk, decide, form, gone, leave

from elastic_agents import policy_types as v
from elastic_agents.policy_types import Phase, View
from elastic_launch import contract as c
from elastic_launch.events.facts import UserStop
from elastic_launch.rendezvous.wire import messages as m

DRAIN = m.DrainRound(1, 1, "membership", "resize", None)


def ready(local_rank: int, number: int = 1) -> v.Reported:
    return v.Reported(number, local_rank, c.Ready(0))


def drained(local_rank: int, step: int = 7) -> v.Reported:
    return v.Reported(1, local_rank, c.Drained(step, 0.0))


def view(*events: v.Event, nodes: int = 2, snapshot: int | None = None) -> View:
    """A node of two workers in round 1, both of which can be drained, after further events.

    Args:
        snapshot: step of the newest snapshot in the node's memory.
    """
    found = View()
    for event in (form(1, nodes), ready(0), ready(1), *events):
        found, _ = decide(found, event, 2, snapshot=snapshot)
    return found


def after(before: View, event: v.Event) -> tuple[Phase, list[v.Action]]:
    found, actions = decide(before, event, 2)
    return found.phase, actions


READY = view()
DRAINING = view(DRAIN)


@pytest.mark.parametrize("asked", [DRAINING, READY], ids=["by the agent", "by a signal to a worker"])
def test_scripts_that_save_by_themselves_are_drained_once_they_have_exited_with_0(asked: View) -> None:
    saving, actions = decide(asked, v.Reported(1, 0, c.Stopping(9)), 2)
    assert actions == [v.Later(v.SAVING, v.TeardownOver(1, 0))]
    saving, _ = decide(saving, v.Reported(1, 1, c.Stopping(9)), 2)
    saving, actions = decide(saving, gone(0, 0), 2)
    assert actions == []
    assert after(saving, gone(1, 0)) == (Phase.WAITING, [v.ReportStopped(1, 9)])
    _, actions = decide(saving, gone(1, 3), 2)
    assert actions[0] == v.ReportFailure(1), "it may not have saved"


def test_a_script_that_exits_without_having_agreed_to_stop_has_finished() -> None:
    saving, _ = decide(DRAINING, v.Reported(1, 0, c.Stopping(9)), 2)
    saving, _ = decide(saving, gone(1, 0), 2)
    assert after(saving, gone(0, 0)) == (Phase.WAITING, [v.ReportStopped(1)])


def test_ready_is_reported_once_all_workers_are() -> None:
    running, _ = decide(View(), form(1), 2)
    running, actions = decide(running, ready(1), 2)
    assert actions == []
    running, actions = decide(running, ready(0), 2)
    assert actions == [v.ReportReady(1)]
    assert decide(running, ready(0), 2) == (running, [])


def test_ready_of_an_earlier_round_is_ignored() -> None:
    running, _ = decide(View(), form(2), 2)
    assert decide(running, ready(0, number=1), 2) == (running, [])


def test_a_drain_asks_the_workers_to_stop() -> None:
    assert after(READY, DRAIN) == (Phase.DRAINING, [v.AskStop(1, "resize", None)])
    assert decide(DRAINING, DRAIN, 2) == (DRAINING, []), "once is enough"


def test_a_drain_of_another_round_is_ignored() -> None:
    assert decide(READY, m.DrainRound(1, 2, "membership", "resize"), 2) == (READY, [])


def test_workers_that_cannot_be_drained_are_stopped_the_old_way() -> None:
    running, _ = decide(View(), form(1), 2)
    assert after(running, DRAIN) == (Phase.STOPPING, [v.Terminate(1)])


def test_a_drained_node_waits_for_the_next_round() -> None:
    draining = view(DRAIN, drained(0), gone(0, 0), drained(1))
    assert draining.phase is Phase.DRAINING
    assert after(draining, gone(1, 0)) == (Phase.WAITING, [v.ReportStopped(1, 7)])


def test_how_a_drained_worker_ends_does_not_count() -> None:
    """Tearing down torch aborts now and then."""
    draining = view(DRAIN, drained(0), gone(0, -6), drained(1))
    assert after(draining, gone(1, -9)) == (Phase.WAITING, [v.ReportStopped(1, 7)])


def test_a_drained_worker_that_hangs_is_killed() -> None:
    found, actions = decide(DRAINING, drained(1), 2)
    assert actions == [v.Later(v.TEARDOWN, v.TeardownOver(1, 1))]
    assert after(found, v.TeardownOver(1, 1)) == (Phase.DRAINING, [v.Kill(frozenset({1}))])
    ended, _ = decide(found, gone(1, 0), 2)
    assert decide(ended, v.TeardownOver(1, 1), 2) == (ended, [])


def test_a_worker_whose_script_has_ended_is_killed_if_it_hangs() -> None:
    running, _ = decide(View(), form(1), 2)
    over = v.TeardownOver(1, 1, ended=True)
    found, actions = decide(running, v.Reported(1, 1, c.WorkerEnding(0)), 2)
    assert actions == [v.Later(v.ENDING, over)]
    assert after(found, over) == (Phase.RUNNING, [v.Kill(frozenset({1}), ending=True)])
    gone_by_itself, _ = decide(found, gone(1, 0), 2)
    assert decide(gone_by_itself, over, 2) == (gone_by_itself, [])
    assert decide(gone_by_itself, v.Reported(1, 1, c.WorkerEnding(0)), 2) == (gone_by_itself, [])
    assert decide(running, v.Reported(2, 1, c.WorkerEnding(0)), 2) == (running, [])


def test_workers_that_drain_unasked_are_believed() -> None:
    """They received SIGTERM from outside; the ranks agree among themselves."""
    running = view(drained(0), drained(1), gone(0, 0))
    assert after(running, gone(1, 0)) == (Phase.WAITING, [v.ReportStopped(1, 7)])


def test_workers_that_finish_while_asked_to_stop_are_done() -> None:
    assert after(view(DRAIN, gone(0, 0)), gone(1, 0)) == (Phase.FINISHED, [m.Done(1)])


def test_if_some_workers_drain_and_some_finish_the_node_does_not_count_as_drained() -> None:
    assert after(view(DRAIN, drained(0), gone(0, 0)), gone(1, 0)) == (Phase.WAITING, [v.ReportStopped(1)])


@pytest.mark.parametrize("asked", [[DRAIN], []], ids=["by the agent", "by a signal to a worker"])
def test_a_worker_that_had_finished_before_the_stop_needs_no_drain(asked: list[v.Event]) -> None:
    """One waits for a background program at its end."""
    ending = view(gone(0, 0), *asked)
    stopped, _ = decide(ending, drained(1), 2)
    assert after(stopped, gone(1, 0)) == (Phase.WAITING, [v.ReportStopped(1, 7)])
    assert after(ending, gone(1, 0)) == (Phase.FINISHED, [m.Done(1)])


def test_a_worker_that_fails_during_a_drain_is_reported() -> None:
    assert after(DRAINING, gone(0, 1)) == (Phase.STOPPING, [v.ReportFailure(0), v.Kill()])


def test_a_break_ends_a_drain() -> None:
    assert after(DRAINING, brk(1)) == (Phase.STOPPING, [v.Kill()])


def test_a_break_gives_workers_that_save_no_grace_and_others_theirs() -> None:
    assert after(READY, brk(1)) == (Phase.STOPPING, [v.Kill()])
    running, _ = decide(View(), form(1), 2)
    mixed, _ = decide(running, ready(1), 2)
    assert after(mixed, brk(1)) == (Phase.STOPPING, [v.Kill(frozenset({1})), v.Terminate(1, frozenset({0}))])


@pytest.mark.parametrize("event", [SILENT, GONE], ids=["silent", "gone"])
def test_a_drain_continues_without_the_leader(event: v.Event) -> None:
    found, actions = decide(DRAINING, event, 2)
    assert found == DRAINING
    assert [type(action) for action in actions] == [v.Warn]


# Leaving.


def test_a_node_that_leaves_with_time_drains_without_waiting_for_an_order() -> None:
    assert after(READY, leave(SIGTERM, 30.0)) == (
        Phase.DRAINING,
        [m.Leaving("SIGTERM", 30.0), v.AskStop(1, "SIGTERM", 30.0)],
    )


LEFT = [leave(SIGTERM, 30.0), drained(0), gone(0, 0), drained(1), gone(1, 0)]


def test_a_node_that_leaves_others_reports_it_before_it_copies_its_snapshot() -> None:
    assert after(view(*LEFT[:-1]), LEFT[-1]) == (Phase.SAVING, [v.ReportStopped(1, 7), v.AwaitCopies()])
    assert after(view(*LEFT), v.CopiesDone()) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_the_last_node_to_leave_copies_its_snapshot_before_a_successor_starts() -> None:
    """The successor has only what is in durable storage."""
    assert after(view(*LEFT[:-1], nodes=1), LEFT[-1]) == (Phase.SAVING, [v.AwaitCopies()])
    assert after(view(*LEFT, nodes=1), v.CopiesDone()) == (
        Phase.OVER,
        [v.ReportStopped(1, 7, secured=True), v.Finish(143, UserStop("SIGTERM"))],
    )


KEPT = [leave(SIGTERM, 30.0), drained(1), gone(1, 0), drained(0), gone(0, 0)]


def test_only_a_snapshot_of_the_step_is_served_and_none_of_the_host() -> None:
    for snapshot, hosts in ((6, False), (7, True)):
        found, _ = decide(view(*KEPT[:-2]), KEPT[-2], 2, snapshot=snapshot, hosts=hosts)
        assert not found.keeps


def test_the_end_of_an_earlier_copy_is_not_that_of_the_last_one() -> None:
    saving = view(*LEFT)
    assert decide(saving, v.CopiesDone(), 2, idle=False) == (saving, [])
    assert decide(saving, v.CopiesDone(given_up=True), 2, idle=False)[0].phase is Phase.OVER


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_that_leaves_with_a_snapshot_serves_it_until_released(nodes: int) -> None:
    serving = view(*KEPT, nodes=nodes, snapshot=7)
    assert after(view(*KEPT[:-1], nodes=nodes, snapshot=7), KEPT[-1]) == (
        Phase.SAVING,
        [v.ReportStopped(1, 7, serve=True), v.AwaitCopies()],
    )
    assert decide(serving, v.CopiesDone(), 2) == (serving, []), "what is copied says nothing of who fetches"
    assert after(serving, m.Released(1)) == (Phase.SAVING, [v.AwaitCopies()]), "whoever fetches now is waited for"
    assert after(view(*KEPT, m.Released(1), nodes=nodes, snapshot=7), v.CopiesDone()) == (
        Phase.OVER,
        [v.Finish(143, UserStop("SIGTERM"))],
    )


@pytest.mark.parametrize("event", [m.RunEnd(1, 0, "done"), GONE], ids=lambda e: type(e).__name__)
def test_a_serving_node_is_released_by_the_end_of_the_run_and_of_its_leader(event: v.Event) -> None:
    assert after(view(*KEPT, snapshot=7), event) == (Phase.SAVING, [v.AwaitCopies()])
    assert after(view(*KEPT, snapshot=7), SILENT) == (Phase.SAVING, [])


@pytest.mark.parametrize("event", [v.DrainOver(1), leave(SIGTERM, 30.0)], ids=["time is over", "told again"])
def test_serving_ends_when_no_time_is_left(event: v.Event) -> None:
    phase, actions = after(view(*KEPT, snapshot=7), event)
    assert phase is Phase.OVER
    assert actions[-1] == v.Finish(143, UserStop("SIGTERM"))
    assert v.ReportStopped(1, 7) not in actions, "that was said"


@pytest.mark.parametrize("event", [v.DrainOver(1), leave(SIGTERM, 30.0)], ids=["time is over", "told again"])
def test_copying_ends_when_no_time_is_left(event: v.Event) -> None:
    phase, actions = after(view(*LEFT), event)
    assert phase is Phase.OVER
    assert actions[-1] == v.Finish(143, UserStop("SIGTERM"))


@pytest.mark.parametrize("event", [brk(1), SILENT, GONE, m.RunEnd(1, 0, "done")], ids=lambda e: type(e).__name__)
def test_copying_continues_whatever_happens_to_the_run(event: v.Event) -> None:
    saving = view(*LEFT)
    assert decide(saving, event, 2) == (saving, [])


def test_an_evicted_node_copies_nothing() -> None:
    assert after(view(*LEFT), m.Evicted(1, "silent"))[0] is Phase.OVER


def test_a_node_that_leaves_during_a_drain_limits_its_time() -> None:
    phase, actions = after(DRAINING, leave(SIGTERM, 30.0))
    assert phase is Phase.DRAINING
    assert actions == [m.Leaving("SIGTERM", 30.0), v.AskStop(1, "SIGTERM", 30.0)]


def test_a_node_that_leaves_without_time_kills_its_workers_at_once() -> None:
    assert after(READY, leave(SIGTERM)) == (Phase.STOPPING, [m.Leaving("SIGTERM"), v.Kill()])


def test_a_second_request_to_leave_kills_the_workers() -> None:
    assert after(view(leave(SIGTERM, 30.0)), leave(SIGTERM, 30.0)) == (Phase.STOPPING, [v.Kill()])


def test_a_drain_that_takes_too_long_is_ended() -> None:
    phase, actions = after(view(leave(SIGTERM, 30.0)), v.DrainOver(1))
    assert phase is Phase.STOPPING
    assert actions[1:] == [v.Kill()]
    assert decide(READY, v.DrainOver(1), 2) == (READY, [])
    assert decide(DRAINING, v.DrainOver(0), 2) == (DRAINING, [])


def test_a_node_that_leaves_as_its_workers_finish_waits_for_the_end_of_the_run() -> None:
    """To hang up before the others are done would break the round."""
    finished = view(leave(SIGTERM, 30.0), gone(0, 0), gone(1, 0))
    assert finished.phase is Phase.FINISHED
    assert after(finished, m.RunEnd(1, 0, "all workers finished")) == (
        Phase.OVER,
        [v.Finish(0, "all workers finished")],
    )
    assert after(finished, v.DrainOver(1)) == (Phase.SAVING, [v.AwaitCopies(bounded=True)])


# The run ends with the drain.


FINAL = [
    m.DrainRound(1, 1, "preemption", "elasticctl drain", None, True),
    drained(0),
    gone(0, 0),
    drained(1),
    gone(1, 0),
]


def test_a_run_that_ends_with_a_drain_is_saved_before_that_is_reported() -> None:
    assert after(view(*FINAL[:-1]), FINAL[-1]) == (Phase.SAVING, [v.AwaitCopies()])
    assert after(view(*FINAL), v.CopiesDone()) == (Phase.WAITING, [v.ReportStopped(1, 7, secured=True)])


def test_the_drain_may_become_the_last_one_on_its_way() -> None:
    resized = [m.DrainRound(1, 1, "membership", "resize"), *FINAL]
    asked = [v.AskStop(1, "elasticctl drain", None)]
    assert after(view(resized[0]), resized[1]) == (Phase.DRAINING, asked), "one may wait for a background program"
    assert after(view(*resized[:2]), resized[1]) == (Phase.DRAINING, []), "once is enough"
    assert after(view(*resized[:-1]), resized[-1]) == (Phase.SAVING, [v.AwaitCopies()])


@pytest.mark.parametrize("event", [v.DrainOver(1), m.Break(1, 1, "preemption", "too late")], ids=["here", "leader's"])
def test_a_last_drain_that_has_no_time_left_is_reported_all_the_same(event: v.Event) -> None:
    phase, actions = after(view(*FINAL), event)
    assert (phase, actions[-1]) == (Phase.WAITING, v.ReportStopped(1, 7, secured=True))


@pytest.mark.parametrize("event", [m.RunEnd(1, 143, "over"), leave(SIGTERM)], ids=["end", "signal"])
def test_the_end_comes_when_the_last_drain_is_saved(event: v.Event) -> None:
    phase, actions = after(view(*FINAL), event)
    assert (phase, actions[-1]) == (Phase.SAVING, v.AwaitCopies(bounded=True))
    phase, actions = after(view(*FINAL, event), v.CopiesDone())
    assert (phase, type(actions[-1])) == (Phase.OVER, v.Finish)
