"""Rounds that end after the same step on all ranks."""

from __future__ import annotations

import math

import pytest
from leader_run import Run, running

from elastic_launch.events.types import NodeLeft, RestartCharged, RoundBroken, RoundDrained, RoundDraining
from elastic_launch.rendezvous.leader.verdict import Kind
from elastic_launch.rendezvous.wire import messages as m


def ready(nodes: str, node_ids: str) -> Run:
    run = running(nodes, node_ids)
    for node_id in node_ids:
        run.report(node_id, m.NodeReady(run.number))
    return run


def drained(run: Run, *node_ids: str, step: int = 7) -> None:
    for node_id in node_ids:
        run.report(node_id, m.Stopped(run.number, 7000, step))


def test_a_resize_drains_a_round_whose_workers_can_be() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    for node_id in "ab":
        (order,) = run.orders(node_id, m.DrainRound)
        assert (order.round, order.kind, order.seconds) == (1, "membership", None)
        assert order.cause == "resize: node c waits to join"
    assert run.number == 1, "nobody has stopped yet"
    drained(run, "a")
    assert run.number == 1
    drained(run, "b")
    assert (run.number, run.members) == (2, "abc")
    assert run.told(RoundBroken) == []
    assert run.told(RestartCharged) == []
    (event,) = run.told(RoundDrained)
    assert (event.round, event.step, event.kind) == (1, 7, "membership")
    assert run.orders("c", m.Form)[-1].cause == "resize: node c waits to join"


def test_one_plain_worker_group_has_the_round_broken_instead() -> None:
    run = running("1:4", "ab")
    run.report("a", m.NodeReady(1))
    run.hello("c")
    run.advance(10)
    assert run.orders("a", m.DrainRound) == []
    assert len(run.orders("b", m.Break)) == 1


def test_ready_of_another_round_is_ignored() -> None:
    run = running("1:4", "a")
    run.report("a", m.NodeReady(2))
    run.hello("c")
    run.advance(10)
    assert len(run.orders("a", m.Break)) == 1


def test_a_leaving_node_has_the_round_drained_and_is_not_in_the_next() -> None:
    run = ready("1:4", "abc")
    run.report("b", m.Leaving("SIGTERM", 30.0))
    for node_id in "abc":
        (order,) = run.orders(node_id, m.DrainRound)
        assert (order.kind, order.cause, order.seconds) == ("preemption", "node b leaves (SIGTERM)", 30.0)
    assert [(event.node, event.broke, event.next) for event in run.told(NodeLeft)] == [("b", 1, "a new round forms")]
    drained(run, "b")
    run.close("b")
    drained(run, "a", "c")
    assert (run.number, run.members) == (2, "ac")
    assert run.told(RoundBroken) == []
    assert run.machine.restarts == 0
    (left,) = run.told(NodeLeft)
    assert left.broke == 1, "the round's own line tells it"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_node_that_leaves_without_time_breaks_the_round(seconds: float) -> None:
    run = ready("1:4", "ab")
    run.report("b", m.Leaving("SIGTERM", seconds))
    assert run.orders("a", m.DrainRound) == []
    assert len(run.orders("a", m.Break)) == 1


def test_a_drain_that_is_late_ends_as_a_break() -> None:
    run = ready("1:4", "abc")
    run.report("b", m.Leaving("SIGTERM", 5.0))
    drained(run, "a")
    run.advance(4.9)
    assert run.told(RoundBroken) == []
    run.advance(0.2)
    (broken,) = run.told(RoundBroken)
    assert broken.cause == "node b leaves (SIGTERM); node b, c did not stop in time"
    assert run.orders("a", m.Break) == [], "it has stopped already"
    run.stop("b", "c")
    assert (run.number, run.members) == (2, "ac")
    assert run.machine.restarts == 0


def test_the_turn_for_a_late_drain_is_due_at_its_limit() -> None:
    run = ready("1:4", "ab")
    run.report("b", m.Leaving("SIGTERM", 0.3))
    assert run.machine.wait(run.clock.now()) == pytest.approx(0.3)


def test_a_second_node_that_leaves_shortens_the_limit() -> None:
    run = ready("1:4", "abc")
    run.report("b", m.Leaving("SIGTERM", 50.0))
    run.report("c", m.Leaving("SIGTERM", 5.0))
    assert len(run.told(RoundDraining)) == 1
    run.advance(5.1)
    assert len(run.told(RoundBroken)) == 1


def test_a_node_that_leaves_without_time_breaks_a_drain() -> None:
    run = ready("1:4", "abc")
    run.report("b", m.Leaving("SIGTERM", 50.0))
    run.report("c", m.Leaving("SIGTERM"))
    assert len(run.orders("a", m.Break)) == 1


def test_a_crash_breaks_a_drain_and_is_charged() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    run.fail("a")
    run.stop("a", "b")
    assert (run.number, run.members) == (2, "abc")
    assert run.machine.restarts == 1
    assert run.told(RoundDrained) == []


def test_the_loss_of_a_node_that_has_not_stopped_breaks_a_drain() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    drained(run, "a")
    run.close("b")
    assert [event.kind for event in run.told(RoundBroken)] == [Kind.NODE_LOSS.text]
    assert (run.number, run.members) == (2, "ac")


def test_the_loss_of_a_node_that_has_stopped_does_not() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    drained(run, "a")
    run.close("a")
    drained(run, "b")
    assert run.told(RoundBroken) == []
    assert (run.number, run.members) == (2, "bc")


def test_workers_stopped_from_outside_drain_the_round() -> None:
    run = ready("1:4", "ab")
    drained(run, "a", step=9)
    assert run.orders("a", m.DrainRound) == []
    assert len(run.orders("b", m.DrainRound)) == 1
    drained(run, "b", step=9)
    (event,) = run.told(RoundDrained)
    assert (event.step, event.cause) == (9, "a worker on node a was told to stop")
    assert (run.number, run.members) == (2, "ab")


def test_a_node_that_leaves_without_an_agreed_step_is_not_lost() -> None:
    run = ready("1:4", "ab")
    run.report("b", m.Leaving("SIGTERM", 30.0))
    run.stop("b")
    assert [(event.kind, event.cause) for event in run.told(RoundBroken)] == [
        ("preemption", "node b leaves (SIGTERM); node b stopped its workers without an agreed step")
    ]


def test_all_that_finish_during_a_drain_end_the_run() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    run.done("a", "b")
    assert run.code == 0


def test_some_that_finish_during_a_drain_come_back() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    run.done("a")
    assert run.told(RoundBroken) == []
    drained(run, "b")
    assert len(run.orders("a", m.Break)) == 1
    run.stop("a")
    assert (run.number, run.members) == (2, "abc")


def test_a_node_that_comes_back_over_a_new_link_gets_its_order_again() -> None:
    run = ready("1:4", "ab")
    run.hello("c")
    run.advance(10)
    run.hello("a", holding=1, ready=True)
    assert len(run.orders("a", m.DrainRound)) == 2


def test_a_new_leader_drains_a_round_that_it_took_over() -> None:
    first = ready("1:4", "ab")
    run = Run("1:4", record=first.record)
    run.hello("a", "b", holding=1, ready=True, seen_round=1, seen_term=1)
    run.hello("c")
    run.advance(10)
    assert len(run.orders("a", m.DrainRound)) == 1


def test_a_drain_below_the_minimum_parks() -> None:
    run = ready("2", "ab")
    run.report("b", m.Leaving("SIGTERM", 30.0))
    drained(run, "a", "b")
    run.close("b")
    assert run.number == 1
    run.hello("c")
    assert (run.number, run.members) == (2, "ac")


def test_no_round_is_drained_for_a_node_that_still_imports() -> None:
    run = ready("1:4", "ab")
    run.hello("c", importing=True)
    run.advance(10)
    assert run.told(RoundDraining) == []
    run.report("c", m.Imported())
    assert run.orders("a", m.DrainRound), "it has waited for longer than resize_delay already"
    drained(run, "a", "b")
    assert run.members == "abc"


def test_a_resize_includes_nodes_that_can_begin_at_once_and_the_others_later() -> None:
    run = ready("1:4", "ab")
    run.hello("c", importing=True)
    run.hello("d")
    run.advance(2)
    drained(run, "a", "b")
    assert run.members == "abd"
    for node_id in "abd":
        run.report(node_id, m.NodeReady(run.number))
    run.report("c", m.Imported())
    assert run.told(RoundDraining)[-1].cause == "resize: node c waits to join"


def test_the_first_round_and_one_that_would_be_too_small_wait_for_imports_as_they_run() -> None:
    run = Run("2:4", join_settle=2)
    run.hello("a", "b", importing=True)
    run.advance(2)
    assert (run.number, run.members) == (1, "ab")
    run.report("a", m.Imported())
    run.report("b", m.Joined(1))
    run.report("b", m.Imported())
    run.hello("c", importing=True)
    run.close("b")
    run.report("a", m.Stopped(1, 7000))
    run.advance(1)
    assert (run.number, run.members) == (2, "ac")


def test_a_node_that_comes_back_on_another_link_states_again_whether_it_imports() -> None:
    run = ready("1:4", "ab")
    run.hello("c", importing=True)
    run.hello("c", importing=False)
    run.advance(2)
    assert run.orders("a", m.DrainRound)
