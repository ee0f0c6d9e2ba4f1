"""No resize when the job ends before it pays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leader_run import Run, running

from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import NodeJoined, ResizeSkipped, RoundDrained
from elastic_launch.rendezvous.leader.resizing import DEFAULT_COST, DEFAULT_LIVE_COST, ResizePayoff, saved
from elastic_launch.rendezvous.wire import messages as m

SECONDS = st.floats(0, 1e7)
WORKERS = st.integers(1, 10_000)


@settings(max_examples=100)
@given(remaining=SECONDS, workers=WORKERS, more=WORKERS)
def test_the_gain_is_the_difference_between_two_times_for_the_same_work(
    remaining: float, workers: int, more: int
) -> None:
    larger = workers + more
    work = remaining * workers
    assert saved(remaining, workers, larger) == pytest.approx(remaining - work / larger, abs=1e-6)
    assert 0 <= saved(remaining, workers, larger) <= remaining


def test_no_larger_world_saves_nothing() -> None:
    assert saved(100.0, 4, 4) == saved(100.0, 4, 2) == saved(100.0, 0, 0) == 0.0


@pytest.mark.parametrize("remaining", [-1.0, math.nan, math.inf])
def test_a_run_of_unknown_length_resizes(remaining: float) -> None:
    prices = ResizePayoff()
    prices.told(remaining, 10.0)
    assert prices.remaining(10.0) is None
    assert prices.pays(1, 2, 10.0)


def test_an_estimate_grows_old_with_the_clock_and_ends_with_its_round() -> None:
    prices = ResizePayoff()
    prices.told(12.0, 100.0)
    assert prices.pays(1, 2, 100.0), "6 s saved for 5"
    assert not prices.pays(1, 2, 103.0)
    assert prices.remaining(200.0) == 0.0
    prices.formed(None)
    assert prices.pays(1, 2, 200.0)


def test_the_cost_of_a_resize_is_learned_apart_for_live_workers() -> None:
    prices = ResizePayoff()
    assert prices.cost == DEFAULT_COST
    prices.formed(100.0)
    prices.trains(108.0, live=True)
    prices.formed(None)
    prices.trains(120.0, live=False)
    assert prices.cost == DEFAULT_COST
    prices.formed(130.0)
    prices.trains(130.2, live=True)
    assert prices.cost == pytest.approx(0.2)
    prices = ResizePayoff()
    prices.trains(0.0, live=True)
    assert prices.cost == DEFAULT_LIVE_COST


def ready(nodes: str, node_ids: str, remaining: float = -1.0) -> Run:
    run = running(nodes, node_ids)
    for node_id in node_ids:
        run.report(node_id, m.NodeReady(run.number))
    run.report(node_ids[0], m.NodeReady(run.number, remaining))
    return run


def stop(run: Run, *node_ids: str) -> None:
    for node_id in node_ids:
        run.report(node_id, m.Stopped(run.number, 7000, 7))


def test_a_node_that_comes_when_the_job_is_almost_done_waits_and_gets_one_notice() -> None:
    run = ready("1:4", "ab", remaining=9.0)
    run.hello("c")
    run.advance(20)
    assert run.number == 1
    assert run.orders("a", m.DrainRound) == []
    (event,) = run.told(ResizeSkipped)
    assert (event.nodes, event.cost_s) == (("c",), DEFAULT_COST)
    assert event.remaining_s == pytest.approx(8.0), "a second has passed since the estimate"
    assert event.saved_s == pytest.approx(8.0 / 3, abs=0.01)
    assert [order.text for order in run.orders("c", m.UserMessage)] == [sentence(event)]
    assert run.told(NodeJoined)[-1].next == "the run ends before a resize pays"
    run.done("a", "b")
    assert run.code == 0
    assert len(run.orders("c", m.RunEnd)) == 1


@pytest.mark.parametrize(
    ("remaining", "text"), [(9.0, "the run ends before a resize pays"), (900.0, "training is resized")]
)
def test_what_is_said_of_a_node_does_not_depend_on_its_imports(remaining: float, text: str) -> None:
    run = ready("1:4", "ab", remaining=remaining)
    run.hello("c", importing=True)
    assert run.told(NodeJoined)[-1].next == text


def test_a_further_node_may_make_the_resize_worth_its_cost() -> None:
    run = ready("1:8", "a", remaining=8.0)
    run.hello("b")
    run.advance(1.1)
    assert len(run.told(ResizeSkipped)) == 1, "half of 6.9 s"
    run.report("a", m.NodeReady(1, 8.0))
    run.hello("c", "d", "e")
    run.advance(1.1)
    assert len(run.orders("a", m.DrainRound)) == 1, "four fifths of 7 s"


def test_what_a_person_orders_is_done_whether_it_pays_or_not() -> None:
    run = ready("1:1", "a", remaining=4.0)
    run.hello("b", "c")
    run.resize(1, 2)
    run.advance(1.1)
    assert len(run.orders("a", m.DrainRound)) == 1
    assert run.told(ResizeSkipped) == []
    stop(run, "a")
    assert run.members == "ab"
    for node_id in "ab":
        run.report(node_id, m.NodeReady(2, 4.0))
    run.resize(1, 2)
    run.hello("d")
    run.advance(5)
    assert run.number == 2, "it is full"


def test_an_order_of_the_limits_that_there_are_is_an_order_as_well() -> None:
    run = ready("1:4", "a", remaining=4.0)
    run.hello("b")
    run.advance(1.1)
    assert len(run.told(ResizeSkipped)) == 1
    run.resize(1, 4)
    assert len(run.orders("a", m.DrainRound)) == 1


def test_an_order_holds_for_one_round() -> None:
    run = ready("1:2", "a", remaining=4.0)
    run.resize(1, 3)
    run.hello("b")
    run.advance(10)
    stop(run, "a")
    assert run.members == "ab"
    for node_id in "ab":
        run.report(node_id, m.NodeReady(2, 4.0))
    run.hello("c")
    run.advance(5)
    assert run.number == 2
    assert len(run.told(ResizeSkipped)) == 1


def test_an_estimate_that_proves_too_short_lets_the_resize_happen() -> None:
    run = ready("1:4", "a", remaining=4.0)
    run.hello("b")
    run.advance(5)
    assert run.orders("a", m.DrainRound) == []
    run.report("a", m.NodeReady(1, 60.0))
    assert len(run.orders("a", m.DrainRound)) == 1


def test_a_resize_costs_what_the_last_one_did() -> None:
    run = ready("1:4", "a", remaining=1000.0)
    run.hello("b")
    run.advance(1)
    run.advance(2.5)
    stop(run, "a")
    assert run.members == "ab"
    run.advance(30)
    for node_id in "ab":
        run.report(node_id, m.NodeReady(2))
    run.report("a", m.NodeReady(2, 60.0))
    run.hello("c")
    run.advance(1.1)
    (event,) = run.told(ResizeSkipped)
    assert event.cost_s == pytest.approx(32.5)
    assert event.saved_s < event.cost_s


def test_other_rounds_do_not_count_for_the_cost_of_a_resize() -> None:
    run = ready("1:4", "ab")
    run.close("b")
    stop(run, "a")
    run.advance(100)
    run.report("a", m.NodeReady(2))
    run.report("a", m.NodeReady(2, 12.0))
    run.hello("c")
    run.advance(1.1)
    assert len(run.orders("a", m.DrainRound)) == 1, "5.5 s saved for 5"


def test_a_node_that_leaves_is_replaced_by_a_waiting_one_at_any_cost() -> None:
    run = ready("1:4", "ab", remaining=3.0)
    run.hello("c")
    run.advance(2)
    run.report("b", m.Leaving("SIGTERM", 30.0))
    stop(run, "b")
    run.close("b")
    stop(run, "a")
    assert run.members == "ac"
    assert len(run.told(RoundDrained)) == 1


def test_below_the_minimum_the_cost_does_not_count() -> None:
    run = ready("2:4", "ab", remaining=1.0)
    run.close("b")
    stop(run, "a")
    run.hello("c")
    assert run.members == "ac"
