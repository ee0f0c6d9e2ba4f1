"""Consequences of faults: causes, the restart budget, and the end of the run."""

from __future__ import annotations

from typing import Any

import pytest
from leader_run import Run, failure, running

from elastic_agents import reporting
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import (
    CauseFound,
    DrillEnded,
    FaultLanded,
    NodeExcluded,
    RestartCharged,
    RoundBroken,
    RunEnded,
)
from elastic_launch.failure import Mistake, Suspect
from elastic_launch.rendezvous.leader.exclusion import FAULTS, SECONDS
from elastic_launch.rendezvous.leader.phases import COLLECT, LATE
from elastic_launch.rendezvous.leader.restart_budget import FREE as MORE
from elastic_launch.rendezvous.leader.restart_budget import JITTER, LONGEST_DELAY
from elastic_launch.rendezvous.wire import messages as m

FREE = MORE + 1
"""Restarts without progress that are free on one node."""

# Faults of workers.


def test_crash_breaks_the_round_on_all_members_at_once() -> None:
    run = running("1:3", "abc")
    run.fail("b", rank=1)
    for node_id in "abc":
        (order,) = run.orders(node_id, m.Break)
        assert (order.round, order.kind) == (1, "crash")
        assert order.cause == "rank 1 on node b: exit code 1: ValueError: boom"


def test_next_round_forms_when_all_have_stopped_before_collect_is_over() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    assert run.number == 1
    run.stop("b")
    assert run.number == 2
    assert run.orders("b", m.Form)[-1].restarts == 1
    assert run.orders("b", m.Form)[-1].cause == "rank 0 on node a: exit code 1: ValueError: boom"


def test_a_slow_member_is_waited_for_after_the_judgement() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    run.advance(COLLECT + 0.01)
    assert len(run.told(RestartCharged)) == 1
    run.advance(10)
    assert run.number == 1
    run.stop("b")
    assert (run.number, run.members) == (2, "ab")


def test_a_crash_with_its_collateral_crashes_is_charged_once() -> None:
    run = running("1:3", "abc")
    run.fail("a")
    run.fail("b")
    run.fail("b", local_rank=1)
    run.stop("a", "b")
    run.fail("c")
    run.stop("c")
    assert [event.restarts for event in run.told(RestartCharged)] == [1]
    assert len(run.told(RoundBroken)) == 1
    assert run.record.restarts == 1


def test_a_report_that_comes_after_the_judgement_costs_nothing_more() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    run.advance(COLLECT + 0.01)
    run.fail("b")
    run.stop("b")
    assert run.record.restarts == 1
    assert run.number == 2


def test_failures_of_an_older_round_are_ignored() -> None:
    run = running("1:1", "a")
    run.fail("a")
    run.stop("a")
    run.join("a")
    run.report("a", failure("a"))
    run.report("a", m.Done(1))
    run.report("a", m.Stopped(1, 7000))
    assert run.number == 2
    assert not run.forming
    assert run.end is None


def test_a_judgement_is_due_after_collect() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    assert run.machine.wait(run.clock.now()) == pytest.approx(COLLECT)


@pytest.mark.parametrize("kind", ["crash", "out of memory", "hang"])
def test_kinds_that_cost(kind: str) -> None:
    run = running("1:1", "a")
    run.fail("a", kind=kind)
    run.stop("a")
    assert run.record.restarts == 1
    assert run.told(RestartCharged)[0].kind == kind


def test_preempted_workers_cost_nothing() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", kind="preemption", exit_code=-15)
    run.fail("b", symptom="broken connection")
    run.stop("a", "b")
    assert (run.number, run.record.restarts) == (2, 0)


def test_preempted_workers_do_not_hide_what_fails_by_itself() -> None:
    run = running("1:2", "ab")
    run.fail("a", kind="preemption", exit_code=-15)
    run.fail("b")
    run.stop("a", "b")
    assert run.told(RestartCharged)[0].kind == "crash"
    assert run.orders("a", m.Form)[-1].cause == "rank 0 on node b: exit code 1: ValueError: boom"


def test_workers_that_are_preempted_again_and_again_without_progress_end_the_run_with_92() -> None:
    run = running("1:1", "a", max_restarts=1)
    for number in range(1, FREE + 3):
        assert run.number == number
        run.join("a")
        run.fail("a", kind="preemption", exit_code=-15, error="", ran=1.0)
        run.stop("a")
        run.advance(3)
    assert run.code == 92
    (charged,) = run.told(RestartCharged)
    assert (charged.round, charged.kind, charged.idle) == (FREE + 1, "preemption", FREE + 1)
    assert "since the training has not advanced in 5 restarts" in sentence(charged)
    (order,) = run.orders("a", m.RunEnd)
    assert order.failure is not None
    assert order.failure.exit_code == -15


def test_preemptions_stay_free_while_training_advances() -> None:
    run = running("1:1", "a", max_restarts=0)
    for step in range(3 * FREE):
        run.report("a", m.NodeReady(run.number, step=10 * step))
        run.fail("a", kind="preemption", exit_code=-15)
        run.stop("a")
    assert (run.number, run.record.restarts, run.end) == (3 * FREE + 1, 0, None)
    assert run.record.last_step == 10 * (3 * FREE - 1)


def test_drained_rounds_without_a_step_are_not_free_without_end() -> None:
    """A worker that trains with the library treats SIGTERM as a request to stop, whatever its sender."""
    run = running("1:1", "a", max_restarts=0)
    for _ in range(FREE):
        run.report("a", m.NodeReady(run.number, step=7))
        run.report("a", m.Stopped(run.number, 7000, drained=7))
        assert run.end is None
    run.report("a", m.NodeReady(run.number, step=7))
    run.report("a", m.Stopped(run.number, 7000, drained=7))
    assert run.code is None, "the first one was progress"
    run.report("a", m.NodeReady(run.number, step=7))
    run.report("a", m.Stopped(run.number, 7000, drained=7))
    assert run.code == 92


# What comes late.


SYMPTOM = {"symptom": "broken connection", "error": "RuntimeError: Connection closed by peer"}


def test_a_symptom_is_charged_at_once_and_the_cause_reported_when_it_is_known() -> None:
    run = running("1:2", "ab")
    run.fail("b", rank=1, **SYMPTOM)
    run.stop("b")
    run.advance(COLLECT + 0.01)
    assert len(run.told(RestartCharged)) == 1
    run.fail("a", ago=1.0)
    run.stop("a")
    (found,) = run.told(CauseFound)
    assert found == CauseFound(1, "crash", "rank 0 on node a: exit code 1: ValueError: boom", 1, (Suspect("a", 0),))
    assert run.orders("a", m.Form)[-1].cause == found.cause
    assert run.number == 2
    assert run.record.restarts == 1


def test_a_cause_that_is_found_later_is_sent_to_all_nodes_but_the_leaders_own() -> None:
    run = running("1:2", "ab")
    run.fail("b", rank=1, **SYMPTOM)
    run.stop("b")
    run.advance(COLLECT + 0.01)
    before = len(run.orders("b", m.UserMessage))
    run.fail("a", ago=1.0)
    (told,) = run.orders("b", m.UserMessage)[before:]
    assert told.text == "round 1 was broken by rank 0 on node a: exit code 1: ValueError: boom"
    assert told not in run.orders("a", m.UserMessage)


def test_the_other_nodes_learn_once_that_the_first_one_has_finished() -> None:
    """Their workers may hang at their end, and a node with one worker does not know that others have finished."""
    run = running("1:3", "abc")
    run.done("b")
    assert [run.orders(node_id, m.PeerDone) for node_id in "abc"] == [[m.PeerDone(1, 1)], [], [m.PeerDone(1, 1)]]
    run.done("c")
    assert len(run.orders("a", m.PeerDone)) == 1
    run.hello("a", holding=1, joined=True)  # its link was lost, and the order with it perhaps
    assert len(run.orders("a", m.PeerDone)) == 2
    run.done("a")
    assert run.end is not None


def test_the_end_of_a_round_has_the_node_and_rank_of_which_its_cause_is() -> None:
    crashes = running("1:3", "abc")
    crashes.fail("b", rank=1)
    loses = running("1:3", "abc")
    loses.close("b")
    for run, suspects in ((crashes, (Suspect("b", 1),)), (loses, (Suspect("b"),))):
        assert [event.suspects for event in run.told(RoundBroken)] == [suspects]
        (order,) = run.orders("c", m.Break)
        assert order.suspects == suspects
        assert reporting.received(order, 1, "c").suspects == suspects, "as the page of a node that does not lead has it"
    crashes.close("c")
    assert crashes.told(CauseFound)[-1].suspects == (Suspect("c"),)


def test_a_symptom_names_the_ranks_of_other_nodes_that_had_ended_before() -> None:
    run = running("1:3", "abc")
    run.done("b")
    run.fail("a", **SYMPTOM)
    (broken,) = run.told(RoundBroken)
    text = "exit code 1, after rank 1 had ended with exit code 0: RuntimeError: Connection closed by peer"
    assert broken.cause == f"rank 0 on node a: {text}"
    run.fail("c", rank=2)
    assert run.told(CauseFound)[-1].cause.endswith("ValueError: boom"), "an error of its own is still the cause"


def test_a_broken_connection_of_a_live_worker_names_them_too() -> None:
    run = running("1:2", "ab")
    run.done("a")
    run.fail("b", rank=1, symptom="broken connection", alive=True, error="RuntimeError: Connection closed by peer")
    (broken,) = run.told(RoundBroken)
    text = "after rank 0 had ended with exit code 0: RuntimeError: Connection closed by peer"
    assert broken.cause == f"rank 1 on node b: {text}"


def test_the_symptom_that_names_ranks_that_had_ended_is_the_cause() -> None:
    run = running("1:2", "ab")
    run.fail("a", **SYMPTOM)
    after = "exit code 1, after rank 1 had ended with exit code 0: RuntimeError: Connection closed by peer"
    run.fail("b", rank=2, **SYMPTOM, ended_before=(1,))
    assert run.told(CauseFound)[-1].cause == f"rank 2 on node b: {after}"


def test_a_symptom_that_comes_later_changes_nothing() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.fail("b", rank=1, **SYMPTOM, ago=5.0)
    run.stop("a", "b")
    assert not run.told(CauseFound)
    assert "rank 0 on node a" in run.orders("a", m.Form)[-1].cause


def test_a_run_that_ends_waits_for_nodes_that_still_stop_and_for_their_reports() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("b", rank=1, exit_code=9, **SYMPTOM)
    run.stop("b")
    run.advance(COLLECT + 0.5)
    assert run.end is None
    run.fail("a", exit_code=3, ago=1.0)
    run.stop("a")
    assert run.end == (3, "no restart allowed (--max-restarts 0): rank 0 on node a: exit code 3: ValueError: boom")
    assert run.orders("b", m.RunEnd)[0].failure == failure("a", exit_code=3, ago=1.0)


def test_a_late_report_may_state_that_a_retry_would_not_help() -> None:
    run = running("1:2", "ab")
    run.fail("b", rank=1, **SYMPTOM)
    run.stop("b")
    run.advance(COLLECT + 0.01)
    run.fail("a", kind="fatal", error="the data set is not complete")
    run.stop("a")
    assert run.code == 93
    assert run.orders("b", m.RunEnd)[0].failure == failure("a", kind="fatal", error="the data set is not complete")


def test_a_lost_node_is_the_cause_of_earlier_reports_of_others() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", **SYMPTOM)
    run.close("b")
    run.stop("a")
    assert (run.number, run.record.restarts) == (2, 0)
    assert run.told(CauseFound) == [
        CauseFound(1, "node loss", "node b lost: its connection closed", None, (Suspect("b"),))
    ]


def test_no_round_is_announced_before_it_is_known_that_one_forms() -> None:
    run = running("1:2", "ab", max_restarts=1)
    run.fail("a")
    run.stop("a", "b")
    assert "forms" not in sentence(run.told(RoundBroken)[0])
    assert sentence(run.told(RestartCharged)[0]).endswith("charged for a crash; a round forms")
    run.join("a", "b")
    run.fail("a")
    run.stop("a", "b")
    assert run.code == 91
    assert "forms" not in sentence(run.told(RoundBroken)[1])


def test_a_node_that_stops_its_workers_unasked_costs_nothing() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.stop("b")
    assert run.told(RoundBroken)[0].kind == "node loss"
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "ab", 0)


def test_the_store_port_of_a_round_is_the_one_that_the_node_reserved_last() -> None:
    run = running("1:1", "a")
    run.fail("a")
    run.stop("a", store_port=7001)
    assert run.record.round.members[0].store_port == 7001


def test_restarts_and_budget_are_announced() -> None:
    run = running("1:1", "a", max_restarts=2)
    run.fail("a")
    run.stop("a")
    assert sentence(run.told(RestartCharged)[0]) == (
        "restart 1 of 2 (--max-restarts 2), charged for a crash; a round forms"
    )


# The budget and the end by faults.


def test_a_spent_budget_ends_the_run_with_91() -> None:
    run = running("1:2", "ab", max_restarts=1)
    run.fail("a")
    run.stop("a", "b")
    run.join("a", "b")
    run.fail("b", error="KeyError: 'x'")
    run.stop("a", "b")
    assert run.code == 91
    assert run.number == 2
    assert run.record.restarts == 1
    for node_id in "ab":
        (order,) = run.orders(node_id, m.RunEnd)
        assert order.code == 91
        assert order.cause == "all restarts spent (--max-restarts 1): rank 0 on node b: exit code 1: KeyError: 'x'"
        assert order.failure == failure("b", error="KeyError: 'x'", round=2)
        assert order.restarts == 1
    assert run.told(RunEnded)[0].rounds == 2


def test_without_budget_the_end_does_not_wait_long_for_workers_that_still_stop() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", exit_code=3)
    run.advance(COLLECT + LATE - 0.1)
    assert run.end is None
    run.advance(0.2)
    assert run.end == (3, "no restart allowed (--max-restarts 0): rank 0 on node a: exit code 3: ValueError: boom")


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [(1, 1), (3, 3), (89, 89), (100, 100), (255, 255), (-9, 137), (-11, 139), (2, 1), (90, 1), (95, 1), (99, 1)],
)
def test_without_budget_the_code_is_the_workers_own_unless_it_has_a_meaning_here(exit_code: int, expected: int) -> None:
    run = running("1:1", "a", max_restarts=0)
    run.fail("a", exit_code=exit_code)
    run.stop("a")
    assert run.code == expected
    assert run.orders("a", m.RunEnd)[0].failure == failure("a", exit_code=exit_code)


def test_the_root_cause_is_the_first_failure_of_all_nodes() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", exit_code=3, ago=0.01)
    run.advance(0.1)
    run.fail("b", exit_code=4, ago=0.15)
    run.stop("a", "b")
    assert run.code == 4


def test_a_failure_declared_fatal_ends_the_run_with_93() -> None:
    run = running("1:1", "a")
    run.fail("a", kind="fatal")
    run.stop("a")
    assert run.code == 93
    assert run.record.restarts == 0


def test_a_script_that_cannot_run_ends_the_run_with_90_at_once() -> None:
    run = running("1:2", "ab")
    run.fail("a", kind="startup", error="SyntaxError: invalid syntax", ran=1.0)
    run.stop("a", "b")
    assert run.code == 90
    assert run.number == 1
    assert run.record.end is not None
    assert run.record.end.cause.startswith(
        "a restart would fail again (the script cannot run as it is): rank 0 on node a"
    )


BAD: dict[str, Any] = {"ran": 1.0, "mistake": Mistake("KeyError", "train.py:4 in main")}


@pytest.mark.parametrize("nodes", ["2:2", "1:2"])
def test_a_mistake_on_all_nodes_in_two_rounds_ends_the_run_with_93(nodes: str) -> None:
    run = running(nodes, "ab")
    for number in (1, 2):
        assert (run.number, run.end) == (number, None)
        run.fail("a", **BAD)
        run.fail("b", rank=1, **BAD)
        run.stop("a", "b")
        run.join("a", "b")
    cause = "a restart would fail again (KeyError at train.py:4 in main ended both rounds as they began: "
    assert run.end == (
        93,
        f"{cause}fix it, and run the same command again): rank 0 on node a: exit code 1: ValueError: boom",
    )
    assert run.orders("b", m.RunEnd)[0].failure == failure("a", **BAD, round=2)


def test_a_mistake_on_one_node_and_then_on_another_is_the_scripts() -> None:
    """Each time, the other node was stopped before it came to it."""
    run = running("1:2", "ab")
    for node_id in "ab":
        assert run.end is None
        run.fail(node_id, **BAD)
        run.stop("a", "b")
        run.join("a", "b")
    assert run.code == 93


@pytest.mark.parametrize(("nodes", "code"), [("2:2", 93), ("1:2", None)])
def test_a_node_with_a_mistake_that_the_run_can_spare_is_left_out(nodes: str, code: int | None) -> None:
    run = running(nodes, "ab")
    for _ in range(FAULTS):
        run.fail("b", rank=1, **BAD)
        run.fail("a", symptom="broken connection", error="RuntimeError: Connection closed by peer")
        run.stop("a", "b")
        run.advance(LONGEST_DELAY)
        if run.end is None:
            run.join(*run.members)
    assert run.code == code
    assert run.members == ("ab" if code else "a")


def test_other_failures_at_the_start_are_charged_and_tried_again_after_a_delay() -> None:
    run = running("1:1", "a", max_restarts=3)
    for number, delay in ((1, 0.0), (2, 1.0), (3, 2.0)):
        assert run.number == number
        run.join("a")
        run.fail("a", ran=1.0)
        run.stop("a")
        if delay:
            charged = run.told(RestartCharged)[-1]
            assert charged.delay_s == pytest.approx(delay, rel=JITTER)
            delay = charged.delay_s
            assert f"; a round forms in {delay:g} s, as workers failed soon" in sentence(charged)
            run.advance(delay - 0.1)
            assert run.number == number
            run.advance(0.2)
    assert (run.number, run.record.restarts, run.end) == (4, 3, None)
    run.join("a")
    run.fail("a", ran=1.0)
    run.stop("a")
    assert run.code == 91


def test_a_stop_does_not_wait_for_the_delay() -> None:
    run = running("1:1", "a", max_restarts=10)
    for _ in range(4):
        run.join("a")
        run.fail("a", ran=1.0)
        run.stop("a")
        run.advance(3)
    assert run.number == 4
    run.stop_run()
    assert run.code == 143


def test_the_failure_of_an_earlier_round_is_not_the_root_cause_of_another_end() -> None:
    run = running("2:2", "ab", min_wait=10)
    run.fail("a")
    run.stop("a", "b")
    assert run.number == 2
    run.close("b")
    run.stop("a")
    run.advance(11)
    assert run.code == 94
    assert run.orders("a", m.RunEnd)[0].failure is None


def test_a_lost_node_announces_no_round_that_may_not_come() -> None:
    run = running("1:1", "a", max_restarts=0)
    for _ in range(FREE + 1):
        run.report("a", m.Stopped(run.number, 7000))
    assert [event.next for event in run.told(RoundBroken)] == ["a round forms"] * FREE + [""]
    assert run.code == 92


# Nodes that fail again and again.


def fails_again_and_again(run: Run, node_id: str, others: str) -> None:
    for _ in range(FAULTS):
        run.join(node_id, *others)
        run.fail(node_id)
        run.stop(node_id, *others)


def test_a_node_that_fails_again_and_again_is_left_out_for_a_while() -> None:
    run = running("1:3", "abc", max_restarts=9)
    fails_again_and_again(run, "b", "ac")
    assert (run.number, run.members) == (1 + FAULTS, "ac")
    (excluded,) = run.told(NodeExcluded)
    assert sentence(excluded).startswith("node b is left out for 600 s")
    run.join("a", "c")
    run.advance(SECONDS - 5)
    assert run.members == "ac"
    run.advance(10)
    run.stop("a", "c")
    assert run.members == "acb"


def test_a_node_that_has_computed_wrong_is_left_out_at_once() -> None:
    run = running("1:3", "abc", max_restarts=9)
    run.fail("b", corrupt=True)
    run.stop(*"abc")
    assert run.members == "ac"
    (excluded,) = run.told(NodeExcluded)
    assert sentence(excluded).startswith("node b is left out for 7200 s")
    assert sentence(excluded).endswith("it has computed wrong")


def test_a_node_that_has_computed_wrong_stays_if_there_are_too_few() -> None:
    run = running("3:3", "abc", max_restarts=9)
    run.fail("b", corrupt=True)
    run.stop(*"abc")
    assert run.members == "abc"
    assert not run.told(NodeExcluded)


def test_workers_that_are_killed_from_outside_are_not_their_nodes_fault() -> None:
    run = running("1:3", "abc", max_restarts=9)
    for _ in range(2 * FAULTS):
        run.join(*"abc")
        run.fail("b", exit_code=-9)
        run.stop(*"abc")
    assert run.members == "abc"


def test_a_node_without_which_there_are_too_few_is_not_left_out() -> None:
    run = running("3:3", "abc", max_restarts=9)
    fails_again_and_again(run, "b", "ac")
    assert (run.number, run.members) == (1 + FAULTS, "abc")
    assert not run.told(NodeExcluded)


def test_a_node_that_is_left_out_comes_back_if_others_are_lost() -> None:
    run = running("2:3", "abc", max_restarts=9)
    fails_again_and_again(run, "b", "ac")
    assert run.members == "ac"
    run.close("c")
    run.stop("a")
    assert run.members == "ab"


def test_a_new_agent_of_the_same_node_is_left_out_too() -> None:
    run = running("1:3", "abc", max_restarts=9)
    fails_again_and_again(run, "b", "ac")
    run.close("b")
    run.hello("b", incarnation="b2")
    run.join("a", "c")
    run.advance(60)
    assert run.members == "ac"


def test_a_fault_of_a_drill_happens_once_and_all_nodes_know() -> None:
    run = Run("2")
    run.hello("a", "b", planned=2)
    run.report("b", m.StrikeDue(1, 1, 20))
    assert [run.orders(node, m.Strike) for node in "ab"] == [[m.Strike(1, 1, "b")]] * 2
    run.report("a", m.StrikeDue(1, 1, 20))
    run.report("a", m.StrikeDue(1, 2, 20))
    assert run.orders("a", m.Strike)[1:] == [m.Strike(1, 1, ""), m.Strike(1, 2, "")], "known; not in the plan"
    assert run.told(FaultLanded) == [FaultLanded(1, "b", 1, 20)]
    run.join("a", "b")
    run.done("a", "b")
    assert run.told(DrillEnded) == [DrillEnded(2, (0,))]


def test_a_new_leader_learns_which_faults_have_happened() -> None:
    run = Run("2")
    run.hello("a", planned=2)
    run.hello("b", planned=2, landed=(0,))
    run.report("a", m.StrikeDue(1, 0, 7))
    assert run.orders("a", m.Strike) == [m.Strike(1, 0, "")]
    assert not run.told(FaultLanded)
