"""What faults lead to: causes, the restart budget, and the end by them."""

from __future__ import annotations

from typing import Any

import pytest
from leader_run import failure, running

from elastic_launch.events import (
    RestartCharged,
    RoundBroken,
    RunEnded,
)
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.rounds import COLLECT

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
    run.report("a", m.Failed(1, failure("a")))
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
    run.fail("b")
    run.stop("a", "b")
    assert (run.number, run.record.restarts) == (2, 0)


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
    assert run.told(RestartCharged)[0].line() == "restart 1 of 2 (--max-restarts 2), charged for a crash"


# The budget and the end by faults.


def test_a_spent_budget_ends_the_run_with_91() -> None:
    run = running("1:2", "ab", max_restarts=1)
    run.fail("a", signature="one")
    run.stop("a", "b")
    run.join("a", "b")
    run.fail("b", signature="two", message="exit code 1: KeyError: 'x'")
    run.stop("a", "b")
    assert run.code == 91
    assert run.number == 2
    assert run.record.restarts == 1
    for node_id in "ab":
        (order,) = run.orders(node_id, m.RunEnd)
        assert order.code == 91
        assert order.cause == "all 1 restarts spent: rank 0 on node b: exit code 1: KeyError: 'x'"
        assert order.failure == failure("b", signature="two", message="exit code 1: KeyError: 'x'")
        assert order.restarts == 1
    assert run.told(RunEnded)[0].rounds == 2


def test_without_budget_the_end_comes_after_collect_even_if_workers_still_stop() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", exit_code=3)
    run.advance(COLLECT + 0.01)
    assert run.end == (3, "no restart allowed (--max-restarts 0): rank 0 on node a: exit code 1: ValueError: boom")


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [(1, 1), (3, 3), (89, 89), (100, 100), (255, 255), (-9, 137), (-11, 139), (2, 1), (90, 1), (95, 1), (99, 1)],
)
def test_without_budget_the_code_is_the_workers_own_unless_it_is_ours(exit_code: int, expected: int) -> None:
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


def test_twice_the_same_failure_at_the_start_ends_the_run_with_90() -> None:
    run = running("1:1", "a")
    run.fail("a", ran=1.0, signature="same")
    run.stop("a")
    assert run.number == 2
    run.join("a")
    run.fail("a", ran=2.0, signature="same")
    run.stop("a")
    assert run.code == 90
    assert run.record.end is not None
    assert run.record.end.cause.startswith("the script fails at its start, twice the same way: rank 0 on node a")
    assert run.orders("a", m.RunEnd)[0].failure == failure("a", ran=2.0, signature="same")


@pytest.mark.parametrize(
    "second",
    [
        {"ran": 2.0, "signature": "other"},
        {"ran": 11.0, "signature": "same"},
        {"ran": 2.0, "signature": "", "exit_code": -9},
    ],
    ids=["looks different", "ran longer", "was killed"],
)
def test_other_failures_at_the_start_are_only_charged(second: dict[str, Any]) -> None:
    run = running("1:1", "a")
    run.fail("a", ran=1.0, signature="same")
    run.stop("a")
    run.fail("a", **second)
    run.stop("a")
    assert run.end is None
    assert (run.number, run.record.restarts) == (3, 2)


def test_failures_at_the_start_count_only_in_a_row() -> None:
    run = running("1:1", "a", max_restarts=5)
    for ran in (1.0, 60.0, 1.0):
        run.fail("a", ran=ran, signature="same")
        run.stop("a")
    assert run.end is None


def test_the_failure_of_an_earlier_round_is_no_root_cause_of_another_end() -> None:
    run = running("2:2", "ab", min_wait=10)
    run.fail("a")
    run.stop("a", "b")
    assert run.number == 2
    run.close("b")
    run.stop("a")
    run.advance(11)
    assert run.code == 94
    assert run.orders("a", m.RunEnd)[0].failure is None
