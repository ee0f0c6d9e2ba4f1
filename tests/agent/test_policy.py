"""The agent's decisions: each phase with each event."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT, SIGTERM

import pytest
from policy_events import CUT_OFF, GONE, INT_CODE, LOST, OUT, SILENT, TERM_CODE, brk, decide, form, gone, leave

from elastic_agents import policy_types as v
from elastic_agents.policy_types import Phase, View
from elastic_launch import contract as c
from elastic_launch.events.facts import NodeEnd, NotInTime, UserStop
from elastic_launch.rendezvous.node.membership_events import LinkDown
from elastic_launch.rendezvous.wire import messages as m


def view(*events: v.Event, nodes: int = 2) -> View:
    """The policy's view on a node of two workers, in round 1, after further events."""
    found, _ = decide(View(), form(1, nodes), 2)
    for event in events:
        found, _ = decide(found, event, 2)
    return found


def after(before: View, event: v.Event) -> tuple[Phase, list[v.Action]]:
    """The resulting phase and actions, on a node of two workers that has nothing to save when it ends."""
    found, actions = decide(before, event, 2)
    if actions[-1:] == [v.AwaitCopies(bounded=True)]:
        found, last = decide(found, v.CopiesDone(), 2)
        actions = [x for x in actions[:-1] if not isinstance(x, v.ReportStopped)] + last
    return found.phase, actions


WAITING = View()
RUNNING = view()
FINISHED = view(gone(0, 0), gone(1, 0))
STOPPING = view(brk(1))
OVER = view(leave(SIGTERM), gone(0, 0), gone(1, 0), v.CopiesDone())


def test_the_phases_that_the_tests_start_from() -> None:
    phases = [before.phase for before in (WAITING, RUNNING, FINISHED, STOPPING, OVER)]
    assert phases == [Phase.WAITING, Phase.RUNNING, Phase.FINISHED, Phase.STOPPING, Phase.OVER]


# Rounds begin.


def test_waiting_a_round_is_formed() -> None:
    assert decide(WAITING, form(3, nodes=4), 2) == (
        View(
            Phase.RUNNING,
            round=3,
            members=frozenset({"i0", "i1", "i2", "i3"}),
            slots=frozenset({0, 1}),
            alive=frozenset({0, 1}),
        ),
        [v.StartWorkers(form(3, nodes=4))],
    )


@pytest.mark.parametrize("before", [RUNNING, FINISHED, STOPPING, OVER], ids=lambda before: before.phase.value)
def test_no_workers_are_started_while_others_live(before: View) -> None:
    assert decide(before, form(2), 2) == (before, [])


def test_a_node_that_leaves_starts_no_workers() -> None:
    assert decide(View(leaving=143), form(1), 2) == (View(leaving=143), [])


# Rounds end by order.


def test_running_a_break_stops_the_workers() -> None:
    assert after(RUNNING, brk(1)) == (Phase.STOPPING, [v.Terminate(1)])


def test_finished_a_break_takes_the_node_back() -> None:
    assert after(FINISHED, brk(1)) == (Phase.WAITING, [v.ReportStopped(1)])


@pytest.mark.parametrize("before", [WAITING, STOPPING, OVER], ids=lambda before: before.phase.value)
def test_a_break_is_nothing_new_for_a_node_that_stopped_or_stops(before: View) -> None:
    assert decide(before, brk(1), 2) == (before, [])


@pytest.mark.parametrize("before", [RUNNING, FINISHED], ids=lambda before: before.phase.value)
def test_a_break_of_another_round_is_ignored(before: View) -> None:
    assert decide(before, brk(2), 2) == (before, [])
    assert decide(before, brk(0), 2) == (before, [])


def test_stopping_the_node_waits_again_when_all_workers_are_reaped() -> None:
    stopping, actions = decide(STOPPING, gone(0, TERM_CODE), 2)
    assert (stopping.phase, actions) == (Phase.STOPPING, [])
    assert after(stopping, gone(1, 1)) == (Phase.WAITING, [v.ReportStopped(1)])


def test_stopping_the_grace_ends_with_a_kill() -> None:
    assert after(STOPPING, v.GraceOver(1)) == (Phase.STOPPING, [v.Kill()])


@pytest.mark.parametrize(
    ("before", "number"),
    [(STOPPING, 2), (RUNNING, 1), (WAITING, 1), (FINISHED, 1), (view(brk(1), gone(0, 0), gone(1, 0)), 1)],
)
def test_the_end_of_an_outdated_grace_period_kills_no_worker(before: View, number: int) -> None:
    assert decide(before, v.GraceOver(number), 2) == (before, [])


@pytest.mark.parametrize("before", [RUNNING, STOPPING], ids=lambda before: before.phase.value)
def test_an_evicted_node_kills_its_workers_and_waits_again(before: View) -> None:
    evicted, actions = decide(before, m.Evicted(1, "too slow"), 2)
    assert (evicted.phase, actions) == (Phase.STOPPING, [v.Kill()])
    evicted, _ = decide(evicted, gone(0, -9), 2)
    assert after(evicted, gone(1, -9)) == (Phase.WAITING, [v.ReportStopped(1)])


def test_an_evicted_node_that_had_finished_waits_again() -> None:
    assert after(FINISHED, m.Evicted(1, "its round is over")) == (Phase.WAITING, [v.ReportStopped(1)])


def test_an_evicted_node_that_waits_does_not_report_again() -> None:
    """The next round may already be formed, with the port of the worker store that was reported before."""
    before, _ = decide(FINISHED, brk(1), 2)
    assert after(before, m.Evicted(1, "too slow")) == (Phase.WAITING, [])


def test_a_node_of_a_run_that_has_begun_anew_forgets_its_snapshots() -> None:
    before, _ = decide(FINISHED, brk(1), 2)
    assert after(before, m.Evicted(1, "anew", anew=True)) == (Phase.WAITING, [v.ForgetSnapshots()])
    suspended = replace(before, phase=Phase.SUSPENDED, suspended=frozenset({0}))
    assert after(suspended, m.Evicted(1, "anew", anew=True)) == (Phase.WAITING, [v.Kill(), v.ForgetSnapshots()])


def test_a_node_that_leaves_as_the_run_has_begun_anew_saves_first() -> None:
    leaving = replace(FINISHED, phase=Phase.SAVING, leaving=0)
    assert v.ForgetSnapshots() not in decide(leaving, m.Evicted(1, "anew", anew=True), 2)[1]


def test_a_node_whose_place_was_taken_kills_its_workers_and_exits() -> None:
    evicted, actions = decide(RUNNING, m.Evicted(1, "another took its place", final=True), 2)
    assert actions == [v.Kill()]
    evicted, _ = decide(evicted, gone(0, -9), 2)
    assert after(evicted, gone(1, -9)) == (Phase.OVER, [v.Finish(95, "another took its place")])


@pytest.mark.parametrize("before", [WAITING, FINISHED], ids=lambda before: before.phase.value)
def test_a_node_without_workers_whose_place_was_taken_exits_at_once(before: View) -> None:
    assert after(before, m.Evicted(1, "taken", final=True)) == (Phase.OVER, [v.Finish(95, "taken")])


# Workers end.


def test_finished_workers_make_a_finished_node() -> None:
    one, actions = decide(RUNNING, gone(0, 0), 2)
    assert (one.phase, actions) == (Phase.RUNNING, [])
    assert after(one, gone(1, 0)) == (Phase.FINISHED, [m.Done(1)])


@pytest.mark.parametrize("code", [1, 3, -9, -11])
def test_a_failed_worker_is_reported_and_ends_the_round_here_at_once(code: int) -> None:
    assert after(RUNNING, gone(1, code)) == (Phase.STOPPING, [v.ReportFailure(1), v.Terminate(1)])


def test_the_failure_of_the_last_worker_is_followed_by_stopped() -> None:
    one = view(gone(0, 0))
    assert after(one, gone(1, 1)) == (Phase.WAITING, [v.ReportFailure(1), v.ReportStopped(1)])


def test_the_exit_of_a_stopping_worker_is_not_a_failure() -> None:
    assert after(STOPPING, gone(0, 1)) == (Phase.STOPPING, [])


@pytest.mark.parametrize("event", [gone(0, 1, number=2), gone(0, 1, number=0), gone(7, 1)])
def test_exits_of_other_rounds_and_of_unknown_workers_are_ignored(event: v.WorkerExit) -> None:
    assert decide(RUNNING, event, 2) == (RUNNING, [])


def test_an_exit_counts_once() -> None:
    before = view(gone(0, 0))
    assert decide(before, gone(0, 1), 2) == (before, [])


@pytest.mark.parametrize("phase", [WAITING, FINISHED], ids=lambda before: before.phase.value)
def test_exits_without_workers_are_ignored(phase: View) -> None:
    assert decide(phase, gone(0, 1), 2) == (phase, [])


# Workers stopped from outside.


@pytest.mark.parametrize("code", [TERM_CODE, INT_CODE])
def test_an_exit_by_a_stop_signal_waits_for_the_agents_own(code: int) -> None:
    held, actions = decide(RUNNING, gone(0, code), 2)
    assert (held.phase, held.held, actions) == (Phase.RUNNING, {0}, [v.Later(v.HOLD, v.HoldOver(1, 0))])


def test_without_the_agents_own_signal_it_counts_as_preemption() -> None:
    held = view(gone(0, TERM_CODE))
    assert after(held, v.HoldOver(1, 0)) == (Phase.STOPPING, [v.ReportFailure(0), v.Terminate(1)])


def test_with_the_agents_own_signal_it_is_not_a_preemption() -> None:
    signalled = view(gone(0, TERM_CODE), leave(SIGTERM))
    assert signalled.held == frozenset()
    assert decide(signalled, v.HoldOver(1, 0), 2) == (signalled, [])
    assert after(signalled, gone(1, TERM_CODE)) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_a_round_in_which_a_worker_was_ended_is_not_drained_even_if_the_others_could_be() -> None:
    """Else the node would count as finished once the others have ended."""
    held = view(v.Reported(1, 1, c.Ready(0)), gone(0, TERM_CODE))
    assert after(held, leave(SIGTERM, 5.0)) == (Phase.STOPPING, [m.Leaving("SIGTERM"), v.Kill()])


def test_all_workers_ended_by_a_stop_signal() -> None:
    held = view(gone(0, TERM_CODE), gone(1, TERM_CODE))
    assert (held.phase, held.held) == (Phase.RUNNING, {0, 1})
    phase, actions = after(held, v.HoldOver(1, 0))
    assert phase is Phase.WAITING
    assert sorted(map(str, actions[:-1])) == sorted(map(str, [v.ReportFailure(0), v.ReportFailure(1)]))
    assert actions[-1] == v.ReportStopped(1)


def test_a_held_worker_does_not_count_as_finished() -> None:
    held = view(gone(0, TERM_CODE), gone(1, 0))
    assert held.phase is Phase.RUNNING
    assert after(held, v.HoldOver(1, 0)) == (
        Phase.WAITING,
        [v.ReportFailure(0), v.ReportStopped(1)],
    )


def test_a_failure_next_to_a_held_worker_reports_the_preemption_first() -> None:
    held = view(gone(0, TERM_CODE))
    assert after(held, gone(1, 1)) == (
        Phase.WAITING,
        [v.ReportFailure(0), v.ReportFailure(1), v.ReportStopped(1)],
    )


def test_a_break_during_the_hold_does_not_swallow_the_preemption() -> None:
    """Workers elsewhere crash at once; without this report the leader would charge these crashes."""
    held = view(gone(0, TERM_CODE), gone(1, TERM_CODE))
    _, actions = decide(held, brk(1), 2)
    assert v.ReportFailure(0) in actions
    assert v.ReportFailure(1) in actions
    assert actions[-1] == v.ReportStopped(1)


@pytest.mark.parametrize("event", [v.HoldOver(1, 1), v.HoldOver(2, 0)])
def test_holds_of_others_are_ignored(event: v.HoldOver) -> None:
    held = view(gone(0, TERM_CODE))
    assert decide(held, event, 2) == (held, [])


# Signals to the agent.


def test_waiting_a_signal_ends_at_once() -> None:
    assert after(WAITING, leave(SIGINT)) == (
        Phase.OVER,
        [m.Leaving("SIGINT"), v.Finish(130, UserStop("SIGINT"))],
    )


def test_finished_a_signal_ends_at_once() -> None:
    phase, actions = after(FINISHED, leave(SIGTERM))
    assert (phase, actions[-1]) == (Phase.OVER, v.Finish(143, UserStop("SIGTERM")))


def test_running_a_signal_stops_the_workers_first() -> None:
    assert after(RUNNING, leave(SIGTERM)) == (Phase.STOPPING, [m.Leaving("SIGTERM"), v.Terminate(1)])
    signalled = view(leave(SIGTERM), gone(0, 0))
    assert after(signalled, gone(1, TERM_CODE)) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_running_a_signal_is_forwarded_to_the_workers_unchanged() -> None:
    left = [m.Leaving("SIGINT"), v.Terminate(1, number=SIGINT)]
    assert after(RUNNING, leave(SIGINT)) == (Phase.STOPPING, left)
    mixed = view(v.Reported(1, 1, c.Ready(0)), leave(SIGINT))
    assert mixed.phase is Phase.STOPPING
    _, actions = decide(view(v.Reported(1, 1, c.Ready(0))), leave(SIGINT), 2)
    assert actions[1:] == [v.Kill(frozenset({1})), v.Terminate(1, frozenset({0}), SIGINT)]


def test_stopping_a_signal_leaves_when_the_workers_are_gone() -> None:
    assert after(STOPPING, leave(SIGTERM)) == (Phase.STOPPING, [m.Leaving("SIGTERM")])
    signalled = view(brk(1), leave(SIGTERM), gone(0, 0))
    assert after(signalled, gone(1, 0)) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_the_second_signal_kills_and_the_code_is_the_firsts() -> None:
    signalled = view(leave(SIGINT))
    assert after(signalled, leave(SIGTERM)) == (Phase.STOPPING, [v.Kill()])
    killed = view(leave(SIGINT), leave(SIGTERM), gone(0, -9))
    assert after(killed, gone(1, -9)) == (Phase.OVER, [v.Finish(130, UserStop("SIGINT"))])


def test_a_signal_while_the_run_ends_kills() -> None:
    assert after(view(m.RunEnd(1, 91, "spent")), leave(SIGTERM)) == (Phase.STOPPING, [v.Kill()])


@pytest.mark.parametrize(
    "event",
    [
        m.RunEnd(1, 91, "spent"),
        m.Evicted(1, "taken", final=True),
        m.Evicted(1, "slow"),
        *(LOST, GONE, SILENT, CUT_OFF),
        brk(1),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_comes_after_a_signal_does_not_change_the_code(event: v.Event) -> None:
    signalled = view(leave(SIGTERM), event, gone(0, -9))
    assert after(signalled, gone(1, -9)) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


# The end of the run.


@pytest.mark.parametrize("before", [WAITING, FINISHED], ids=lambda before: before.phase.value)
@pytest.mark.parametrize("code", [0, 91])
def test_without_workers_the_runs_end_is_the_nodes(before: View, code: int) -> None:
    cause = "because" if before.round or code else NodeEnd("never")
    assert after(before, m.RunEnd(1, code, "because")) == (Phase.OVER, [v.Finish(code, cause)])


def test_running_the_runs_end_stops_the_workers_first() -> None:
    assert after(RUNNING, m.RunEnd(1, 91, "spent")) == (Phase.STOPPING, [v.Terminate(1)])
    ending = view(m.RunEnd(1, 91, "spent"), gone(0, TERM_CODE))
    assert after(ending, gone(1, 0)) == (Phase.OVER, [v.Finish(91, "spent")])


def test_stopping_the_runs_end_waits_for_the_workers() -> None:
    assert after(STOPPING, m.RunEnd(1, 91, "spent")) == (Phase.STOPPING, [])
    ending = view(brk(1), m.RunEnd(1, 91, "spent"), gone(0, 0))
    assert after(ending, gone(1, 0)) == (Phase.OVER, [v.Finish(91, "spent")])


def test_a_run_that_is_done_awaits_the_copies_that_have_begun() -> None:
    """Its script has ended without its session, as by sys.exit() in the loop; a checkpoint was due before."""
    found, actions = decide(FINISHED, m.RunEnd(1, 0, "done"), 2, idle=False)
    assert (found.phase, actions) == (Phase.SAVING, [v.AwaitCopies(bounded=True, begun=True)])
    assert decide(found, v.CopiesDone(), 2, idle=False) == (found, [])
    assert after(found, v.CopiesDone()) == (Phase.OVER, [v.Finish(0, "done")])


SAVING = view(leave(SIGTERM), gone(0, -9), gone(1, -9))


def test_a_node_that_leaves_without_a_drain_reports_it_and_saves_its_memory() -> None:
    """They form a round meanwhile; this node's memory goes with it."""
    before = view(leave(SIGTERM), gone(0, -9))
    found, actions = decide(before, gone(1, -9), 2)
    assert (found.phase, actions) == (Phase.SAVING, [v.ReportStopped(1), v.AwaitCopies(bounded=True)])
    assert after(found, v.CopiesDone()) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


@pytest.mark.parametrize("before", [RUNNING, FINISHED, STOPPING], ids=lambda before: before.phase.value)
def test_a_run_that_ends_before_its_work_is_done_is_saved_first(before: View) -> None:
    for event in (m.RunEnd(1, 91, "spent"), gone(0, -9), gone(1, -9)):
        before, actions = decide(before, event, 2)
    assert before.phase is Phase.SAVING
    assert after(before, v.CopiesDone()) == (Phase.OVER, [v.Finish(91, "spent")])
    assert v.ReportStopped(1) not in actions, "the leader has ended the run"


def test_a_second_signal_ends_the_save() -> None:
    assert after(SAVING, leave(SIGINT)) == (Phase.OVER, [v.Finish(143, UserStop("SIGTERM"))])


def test_a_save_that_is_too_slow_is_reported() -> None:
    phase, (warning, finish) = after(SAVING, v.DrainOver(1))
    assert (phase, finish) == (Phase.OVER, v.Finish(143, UserStop("SIGTERM")))
    assert isinstance(warning, v.Warn)
    assert warning.of == NotInTime("save")


EVENTS = [
    form(2),
    brk(1),
    m.Evicted(1, "x"),
    m.Evicted(1, "x", final=True),
    m.RunEnd(1, 0, "x"),
    SILENT,
    GONE,
    CUT_OFF,
    OUT,
    LOST,
    gone(0, 1),
    leave(SIGTERM),
    v.GraceOver(1),
    v.HoldOver(1, 0),
    v.StartFailed("x", frozenset({0, 1})),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_after_the_end_nothing_happens(event: v.Event) -> None:
    assert decide(OVER, event, 2) == (OVER, [])


# Starts that fail.


def test_a_command_that_cannot_be_executed_ends_the_node_with_90() -> None:
    """No worker was started, so none will be reaped: nothing is to be waited for."""
    phase, actions = after(RUNNING, v.StartFailed("train.sh cannot be executed: Exec format error", frozenset({0, 1})))
    assert phase is Phase.OVER
    assert [action for action in actions if isinstance(action, m.Leaving)]
    assert actions[-1] == v.Finish(90, "train.sh cannot be executed: Exec format error")


def test_workers_started_before_the_failed_one_are_stopped_first() -> None:
    failed, actions = decide(RUNNING, v.StartFailed("no memory", frozenset({1})), 2)
    assert (failed.phase, failed.alive) == (Phase.STOPPING, {0})
    assert v.Terminate(1) in actions
    assert after(failed, gone(0, TERM_CODE)) == (Phase.OVER, [v.Finish(90, "no memory")])


# The leader cannot be reached.


@pytest.mark.parametrize("event", [SILENT, GONE], ids=["silent", "gone"])
def test_waiting_without_a_leader_is_logged(event: LinkDown) -> None:
    found, actions = decide(WAITING, event, 2)
    assert found == WAITING
    assert [type(action) for action in actions] == [v.Warn]


def test_running_the_workers_train_through_the_silence_of_the_leader() -> None:
    found, actions = decide(RUNNING, SILENT, 2)
    assert found == RUNNING
    assert [type(action) for action in actions] == [v.Warn]


def test_running_alone_the_workers_are_stopped_when_the_leader_is_silent() -> None:
    """The leader may have formed a round without this node."""
    phase, actions = after(view(nodes=1), SILENT)
    assert phase is Phase.STOPPING
    assert actions[1:] == [v.Terminate(1)]


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (view(nodes=1), CUT_OFF),
        (view(nodes=1), OUT),
        (view(leave(SIGTERM), nodes=1), CUT_OFF),
        (RUNNING, OUT),
        (STOPPING, CUT_OFF),
        (RUNNING, replace(CUT_OFF, leader="i7")),
        (RUNNING, replace(CUT_OFF, leader="")),
    ],
    ids=["alone", "alone, frozen", "alone, leaving", "frozen", "in its grace", "led from outside", "led until now"],
)
def test_cut_off_workers_that_could_train_or_save_concurrently_are_killed(before: View, event: v.Event) -> None:
    found, actions = decide(before, event, 2)
    assert found.phase is Phase.STOPPING
    assert isinstance(actions[0], v.Warn)
    assert actions[1:] == [v.Kill()]


@pytest.mark.parametrize(
    ("before", "event"),
    [(RUNNING, CUT_OFF), (view(leave(SIGTERM)), CUT_OFF), (WAITING, OUT), (FINISHED, OUT)],
    ids=["with others", "leaving", "no workers", "finished"],
)
def test_cut_off_nothing_else_is_killed(before: View, event: v.Event) -> None:
    assert decide(before, event, 2) == (before, [])


@pytest.mark.parametrize("nodes", [1, 2])
def test_running_the_workers_are_stopped_when_the_leader_is_gone(nodes: int) -> None:
    phase, actions = after(view(nodes=nodes), GONE)
    assert phase is Phase.STOPPING
    assert isinstance(actions[0], v.Warn)
    assert actions[1:] == [v.Terminate(1)]


@pytest.mark.parametrize("event", [SILENT, GONE], ids=["silent", "gone"])
def test_finished_the_node_waits_for_a_leader_that_knows_of_the_others(event: LinkDown) -> None:
    found, actions = decide(FINISHED, event, 2)
    assert found == FINISHED
    assert [type(action) for action in actions] == [v.Warn]


def test_finished_without_a_leader_success_is_not_claimed() -> None:
    phase, actions = after(FINISHED, LOST)
    assert phase is Phase.OVER
    assert actions == [v.Finish(95, NodeEnd("unknown", "the run refuses this node"))]


def test_waiting_the_loss_of_the_rendezvous_ends_with_its_code() -> None:
    assert after(WAITING, LOST) == (Phase.OVER, [v.Finish(95, "the run refuses this node")])


def test_running_the_loss_of_the_rendezvous_stops_the_workers_first() -> None:
    assert after(RUNNING, LOST) == (Phase.STOPPING, [v.Terminate(1)])
    lost = view(LOST, gone(0, 0))
    assert after(lost, gone(1, 0)) == (Phase.OVER, [v.Finish(95, "the run refuses this node")])


@pytest.mark.parametrize(
    ("before", "parked"), [(RUNNING, False), (STOPPING, True), (view(brk(1), gone(0, -9), gone(1, -9)), True)]
)
def test_a_node_that_leaves_when_its_round_is_over_may_be_the_only_one_with_its_state(
    before: View, parked: bool
) -> None:
    left, _ = decide(before, leave(SIGTERM), 2)
    assert left.parked is parked


LEFT_OUT = m.LeftOut(2, 93, "why")


def test_a_node_that_is_left_out_leaves_once_its_workers_have_ended_and_the_leader_knows() -> None:
    assert after(view(gone(0, 1), gone(1, 1)), LEFT_OUT) == (Phase.OVER, [v.Finish(93, "why")])
    stopping = view(gone(0, 1), LEFT_OUT)
    assert stopping.phase is Phase.STOPPING
    saving, actions = decide(stopping, gone(1, -9), 2)
    assert (saving.phase, actions) == (Phase.SAVING, [v.ReportStopped(1), v.AwaitCopies(bounded=True)])


def test_a_node_that_leaves_already_is_not_left_out() -> None:
    leaving = view(leave(SIGTERM))
    assert decide(leaving, LEFT_OUT, 2) == (leaving, [])
