"""Nodes that are lost, nodes that leave, and too few nodes."""

from __future__ import annotations

import math

import pytest
from leader_run import Run, running

from elastic_launch.events.types import (
    NodeLeft,
    NodeLost,
    Parked,
    RoundBroken,
)
from elastic_launch.rendezvous.leader.machine import TURN_CAP
from elastic_launch.rendezvous.wire import messages as m

# Loss of nodes.


def test_a_closed_connection_breaks_the_round_at_once() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.close("b")
    (order,) = run.orders("a", m.Break)
    assert (order.kind, order.cause) == ("node loss", "node b lost: its connection closed")
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)
    assert run.told(NodeLost)[0].detect_s == 0


def test_a_silent_node_is_dead_after_dead_after() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.silent.add("b")
    run.advance(4.5)
    assert not run.forming
    run.advance(1.5)
    (lost,) = run.told(NodeLost)
    assert (lost.node, lost.detect_s) == ("b", pytest.approx(5.0, abs=1.0))
    assert run.orders("a", m.Break)[0].kind == "node loss"
    assert "b" not in run.links, "its link is to be closed"
    run.stop("a")
    assert (run.members, run.record.restarts) == ("a", 0)


def test_any_report_is_a_sign_of_life() -> None:
    run = running("1:2", "ab")
    run.silent.add("b")
    for _ in range(10):
        run.advance(3)
        run.join("b")
    assert not run.forming


def test_no_node_is_lost_before_it_was_silent_for_dead_after() -> None:
    """Whenever the leader's turns come: time before a report does not count as silence after it."""
    run = running("1:2", "ab", dead_after=2.0)
    run.silent.add("b")
    run.sleep(1.0)
    run.clock.advance(0.9)
    run.report("b", m.Beat())
    run.clock.advance(0.1)
    run.beat_and_turn()
    run.sleep(1.0)
    assert run.told(NodeLost) == [], "1.1 s of silence"
    run.sleep(1.1)
    assert len(run.told(NodeLost)) == 1, "2.2 s of silence"


@pytest.mark.parametrize("dead_after", [5.0, 2.0])
def test_a_leader_that_slept_evicts_no_node(dead_after: float) -> None:
    run = running("1:2", "ab", dead_after=dead_after)
    run.sleep(3600)
    assert run.told(NodeLost) == []
    assert not run.forming


def test_a_gap_counts_as_little_silence_of_a_silent_node() -> None:
    run = running("1:2", "ab")
    run.silent.add("b")
    for _ in range(2):
        run.sleep(3600)
    assert run.told(NodeLost) == []
    for _ in range(2):
        run.sleep(3600)
    assert run.told(NodeLost)[0].node == "b"
    assert run.told(NodeLost)[0].detect_s <= 4 * TURN_CAP


def test_collateral_crashes_of_a_lost_node_are_free() -> None:
    run = running("1:3", "abc", max_restarts=0)
    run.fail("a")
    run.fail("b")
    run.stop("a", "b")
    run.close("c")
    assert run.end is None
    assert (run.number, run.members, run.record.restarts) == (2, "ab", 0)


def test_a_crash_after_the_loss_of_a_node_is_free() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.close("b")
    run.fail("a")
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_the_loss_of_a_node_that_had_stopped_already_does_not_excuse_the_crash() -> None:
    run = running("1:2", "ab")
    run.fail("b")
    run.stop("b")
    run.close("b")
    run.stop("a")
    assert (run.members, run.record.restarts) == ("a", 1)


def test_a_lost_spare_breaks_nothing() -> None:
    run = running("1:1", "a")
    run.hello("b")
    run.close("b")
    assert not run.forming
    assert run.told(NodeLost)[0].next == "training goes on"


def test_a_live_member_that_does_not_stop_is_left_out_after_return_after() -> None:
    run = running("1:2", "ab", return_after=10)
    run.fail("a")
    run.stop("a")
    run.advance(9.5)
    assert run.number == 1
    run.advance(1)
    assert (run.number, run.members) == (2, "a")
    (order,) = run.orders("b", m.Evicted)
    assert not order.final
    assert "not stopped within 10 s" in order.reason
    assert "b" not in run.links


def test_a_member_may_give_its_workers_all_of_its_shutdown_timeout() -> None:
    """Before, two nodes whose workers ignore SIGTERM were left out in turn, without end."""
    run = Run("1:2", return_after=10)
    run.hello("a", shutdown_timeout=30.0)
    run.hello("b", shutdown_timeout=110.0)
    run.join("a", "b")
    run.fail("a")
    run.advance(39.5)
    run.stop("a")
    run.advance(119.5 - 39.5)
    assert not run.orders("b", m.Evicted)
    run.stop("b")
    assert (run.number, run.members) == (2, "ab")


@pytest.mark.parametrize("said", [-1.0, math.inf, math.nan, 1e300])
def test_a_shutdown_timeout_that_cannot_be_is_none(said: float) -> None:
    run = Run("1:2", return_after=10)
    run.hello("a")
    run.hello("b", shutdown_timeout=said)
    run.join("a", "b")
    run.fail("a")
    run.stop("a")
    run.advance(10.5)
    assert run.orders("b", m.Evicted)
    assert (run.number, run.members) == (2, "a")


def test_a_node_that_was_left_out_comes_back_by_a_resize() -> None:
    run = running("1:2", "ab", return_after=10)
    run.fail("a")
    run.stop("a")
    run.advance(11)
    run.join("a")
    run.hello("b", seen_term=1, seen_round=1)
    run.advance(1.1)
    assert run.orders("a", m.Break)[-1].kind == "membership"
    run.stop("a")
    assert run.members == "ab"


def test_members_that_do_not_start_their_workers_break_the_round() -> None:
    run = Run("1:2", join_timeout=20)
    run.hello("a", "b")
    run.join("a")
    run.advance(21)
    assert run.told(RoundBroken)[0].cause == "node b did not start its workers within join_timeout"
    assert run.told(RoundBroken)[0].kind == "node loss"
    run.stop("a")
    if "b" in run.links:
        run.stop("b")
    assert (run.number, run.record.restarts) == (2, 0)
    assert run.members == "ab", "it has stopped, so it can take part again"


def test_a_member_that_was_late_takes_part_again_once_it_is_ready() -> None:
    run = Run("2:2", join_timeout=20)
    run.hello("a", "b")
    run.join("a")
    run.advance(21)
    run.stop("a")
    if "b" in run.links:
        run.stop("b")
    else:
        run.hello("b", seen_term=1, seen_round=1)
    assert (run.number, run.members) == (2, "ab")


# Nodes that leave.


def test_leaving_is_free_and_the_others_continue_as_soon_as_the_leaver_is_gone() -> None:
    run = running("1:3", "abc", max_restarts=0)
    run.leave("b")
    for node_id in "abc":
        assert [order.kind for order in run.orders(node_id, m.Break)] == ["preemption"]
    run.stop("a", "c")
    assert run.number == 1, "the leaver's workers may still run"
    run.close("b")
    assert (run.number, run.members, run.record.restarts) == (2, "ac", 0)
    assert [event.cause for event in run.told(NodeLeft)] == ["SIGTERM"]
    assert run.told(NodeLost) == [], "it has said so"


def test_a_leaver_that_stopped_but_stays_connected_is_not_waited_for() -> None:
    run = running("1:2", "ab")
    run.leave("b")
    run.stop("a", "b")
    assert (run.number, run.members) == (2, "a")
    run.leave("b")
    assert len(run.told(NodeLeft)) == 1


def test_collateral_crashes_of_a_leaver_are_free() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a")
    run.stop("a")
    run.leave("b")
    run.close("b")
    assert run.end is None
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_a_crash_after_leaving_was_announced_is_free() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.leave("b")
    run.fail("a")
    run.stop("a", "b")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_no_round_is_formed_under_a_leader_whose_own_node_leaves() -> None:
    """Its process is about to end: starting workers would be useless."""
    run = running("1:4", "abc")
    assert run.record.leader.incarnation == "a1"
    run.leave("a")
    run.stop("b", "c", "a")
    run.hello("d")
    run.advance(5)
    assert run.forming
    assert (run.number, run.end) == (1, None)


def test_a_spare_that_leaves_breaks_nothing() -> None:
    run = running("1:1", "a")
    run.hello("b")
    run.leave("b")
    run.close("b")
    assert not run.forming
    assert run.told(NodeLost) == []


# Too few nodes.


def test_below_min_the_run_parks_and_continues_when_a_node_arrives() -> None:
    run = running("2:2", "ab")
    run.close("b")
    run.stop("a")
    parked = run.told(Parked)[-1]
    assert (parked.nodes, parked.min_nodes, parked.min_wait_s) == (1, 2, 600.0)
    assert "parked with 1 node" in run.orders("a", m.UserMessage)[-1].text
    run.advance(500)
    run.hello("c")
    assert (run.number, run.members) == (2, "ac")


def test_below_min_for_min_wait_ends_the_run_with_94() -> None:
    run = running("2:2", "ab", min_wait=60)
    run.close("b")
    run.stop("a")
    run.advance(59)
    assert run.end is None
    run.advance(2)
    assert run.end == (94, "1 of at least 2 nodes (--nnodes) after --min-wait 60 s")
    assert [order.code for order in run.orders("a", m.RunEnd)] == [94]


def test_each_park_has_its_own_min_wait() -> None:
    run = running("2:2", "ab", min_wait=60)
    run.close("b")
    run.stop("a")
    run.advance(50)
    run.hello("c")
    run.join("a", "c")
    run.close("c")
    run.stop("a")
    run.advance(50)
    assert run.end is None
    run.advance(11)
    assert run.code == 94


def test_a_run_without_any_node_left_ends_after_min_wait() -> None:
    run = running("1:2", "a", min_wait=60)
    run.close("a")
    run.advance(61)
    assert run.code == 94
