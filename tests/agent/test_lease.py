"""Until when workers may run without a sign of life from their agent: both sides, on one clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_agents.workers.lease import FOREVER, LOOK, Lease, Renewal

TERM = 4.0


def never(moment: float) -> bool:
    return False


def heard_at(*times: float) -> Callable[[float], bool]:
    return lambda moment: any(time > moment for time in times)


def turned(until: float) -> Renewal:
    """The agent's side, whose main loop has turned until a time."""
    renewal, now = Renewal(TERM), 0.0
    while now <= until:
        renewal.turn(now, replaceable=True, heard=never)
        now += renewal.wait
    return renewal


def test_without_a_lease_workers_run_for_ever() -> None:
    lease = Lease()
    assert lease.wait(100.0) is None
    assert not lease.over(1e9)


def test_a_lease_is_over_once_at_its_end() -> None:
    lease = Lease()
    lease.renew(104.0)
    assert not lease.over(103.9)
    assert lease.over(104.0)
    assert not lease.over(104.1), "only the agent knows when they may go on"
    assert lease.wait(104.1) is None
    lease.renew(108.0)
    assert not lease.over(107.9)
    assert lease.over(108.0)


def test_the_clock_is_read_often_since_waits_do_not_count_suspended_time() -> None:
    lease = Lease()
    lease.renew(104.0)
    assert lease.wait(100.0) == LOOK
    assert lease.wait(103.95) == pytest.approx(0.05)
    assert lease.wait(200.0) == 0.0


def test_a_guard_that_was_frozen_with_its_agent_stops_the_workers() -> None:
    """It reads what the agent had written before."""
    lease = Lease()
    lease.renew(104.0)
    lease.renew(104.5)
    assert lease.over(130.0)


def test_a_guard_that_was_frozen_alone_stops_nothing() -> None:
    lease = Lease()
    lease.renew(104.0)
    for now in range(101, 130):
        lease.renew(now + TERM)
    assert not lease.over(130.0)


def test_the_lease_is_renewed_with_each_turn_that_is_due() -> None:
    renewal = Renewal(TERM)
    assert renewal.turn(0.0, replaceable=True, heard=never) == 4.0
    assert renewal.turn(renewal.wait / 2, replaceable=True, heard=never) is None
    assert renewal.turn(renewal.wait, replaceable=True, heard=never) == renewal.wait + 4.0


@pytest.mark.parametrize("term", [0.1, 4.0, 1000.0])
def test_a_lease_has_many_turns(term: float) -> None:
    assert 0 < Renewal(term).wait <= min(term / 8, 0.5)


def test_a_gap_below_the_term_needs_no_answer() -> None:
    renewal = turned(10.0)
    assert renewal.turn(13.9, replaceable=True, heard=never) == 17.9


def test_after_a_gap_the_lease_is_renewed_once_the_leader_has_been_heard() -> None:
    renewal = turned(10.0)
    assert renewal.turn(14.0, replaceable=True, heard=heard_at(13.0)) is None, "that was before"
    assert renewal.turn(14.4, replaceable=True, heard=heard_at(14.0)) is None
    assert renewal.turn(14.5, replaceable=True, heard=heard_at(14.2)) == 18.5
    assert renewal.turn(15.0, replaceable=True, heard=never) == 19.0


def test_after_a_stop_by_the_guard_likewise() -> None:
    """It may have stopped them although the agent has seen no gap as long: its last sign of life was earlier."""
    renewal = turned(10.0)
    renewal.turn(13.8, replaceable=True, heard=never)
    renewal.doubt(13.8)
    assert renewal.turn(14.3, replaceable=True, heard=heard_at(13.7)) is None
    assert renewal.turn(14.4, replaceable=True, heard=heard_at(14.35)) == 18.4


def test_where_no_other_node_can_train_without_this_one_nothing_is_stopped() -> None:
    renewal = Renewal(TERM)
    assert renewal.turn(0.0, replaceable=False, heard=never) is None
    assert renewal.turn(100.0, replaceable=False, heard=never) == FOREVER
    assert renewal.turn(100.5, replaceable=False, heard=never) is None


def test_a_run_that_is_resized_begins_and_ends_to_have_leases() -> None:
    renewal = Renewal(TERM)
    assert renewal.turn(0.0, replaceable=False, heard=never) is None
    assert renewal.turn(1.0, replaceable=True, heard=never) == 5.0
    assert renewal.turn(2.0, replaceable=False, heard=never) == FOREVER
    renewal.doubt(2.1)
    assert renewal.turn(2.2, replaceable=False, heard=never) == FOREVER, "what the guard has stopped goes on"
