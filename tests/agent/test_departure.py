"""The effect of a signal, an order or a notice on a node that stays, and on one that is already leaving."""

from __future__ import annotations

import logging
from dataclasses import replace
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

from elastic_agents import policy_types as v
from elastic_agents.departure import Departure
from elastic_agents.node_state import NodeState
from elastic_agents.notices import Notice
from elastic_agents.timers import StepTimer
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.config.notice_sources import NoticeSource
from elastic_launch.events.types import Event, NoticeReceived, OrderReceived
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.testing import FakeClock

SPOT = Notice("AWS", "preemption", "spot interruption (terminate)", 120.0)
RUNNING = v.View(v.Phase.RUNNING, 3, 2)
LEAVING = replace(RUNNING, leaving=143, phase=v.Phase.DRAINING)


class Node:
    def __init__(self, *sources: NoticeSource, steps: float = 0.1) -> None:
        self.clock = FakeClock(100.0)
        self.events: list[Event] = []
        self.later: list[tuple[float, object]] = []
        config = LaunchConfig(Command(("true",), ("true",)), notices=sources, shutdown_timeout=30.0)
        step_timer = StepTimer()
        step_timer.begin(1, 0, 0.0)
        step_timer.step(1, 1, steps)
        self.state = NodeState(config)
        self.departure = Departure(
            config, self.state, self.clock, step_timer, self, lambda s, item: self.later.append((s, item))
        )

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def by_notice(self, notice: Notice, view: v.View) -> v.Leave | None:
        self.state.view = view
        return self.departure.by_notice(notice)

    def by_signal(self, number: int, view: v.View, at: float | None = None) -> v.Leave | None:
        self.state.view = view
        return self.departure.by_signal(number, at)

    def by_order(self, order: m.Depart, view: v.View) -> v.Leave | None:
        self.state.view = view
        return self.departure.by_order(order)


def test_a_notice_leaves_its_seconds_to_the_drain_but_for_a_margin() -> None:
    node = Node()
    assert node.by_notice(SPOT, RUNNING) == v.Leave("AWS notice: spot interruption (terminate)", 143, 118.0)
    assert node.events == [NoticeReceived("AWS", "preemption", "spot interruption (terminate)", 120.0, True)]
    assert node.departure.notice == SPOT


def test_a_notice_without_seconds_leaves_the_shutdown_timeout() -> None:
    leave = Node().by_notice(replace(SPOT, seconds=None), RUNNING)
    assert leave is not None
    assert leave.seconds == 30.0


def test_without_time_for_two_steps_workers_get_the_remaining_time_and_no_drain() -> None:
    node = Node(steps=20.0)
    leave = node.by_notice(replace(SPOT, seconds=25.0), RUNNING)
    assert leave is not None
    assert leave.seconds == 0.0
    assert (node.departure.left, node.departure.grace) == (23.0, 23.0)
    node.clock.advance(20.0)
    assert node.departure.grace == 3.0
    node.clock.advance(20.0)
    assert (node.departure.left, node.departure.grace) == (0.0, 0.0)
    assert Node().departure.grace == 30.0


def test_a_hint_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    with caplog.at_level(logging.WARNING):
        assert node.by_notice(replace(SPOT, leaves=False, seconds=None), RUNNING) is None
    assert caplog.messages == ["AWS notice: spot interruption (terminate); this node stays"]
    assert node.departure.left == 30.0
    assert node.departure.notice is None
    assert len(node.events) == 1


def test_a_second_notice_shortens_the_remaining_time_and_never_ends_the_drain() -> None:
    node = Node()
    node.by_notice(SPOT, RUNNING)
    sooner = Notice("file", "request", "leave is there", 12.0)
    assert node.by_notice(sooner, LEAVING) is None
    assert node.later == [(10.0, v.DrainOver(3))]
    assert node.departure.left == 10.0
    assert node.by_notice(replace(sooner, seconds=60.0), LEAVING) is None
    assert node.departure.left == 10.0
    assert node.by_notice(replace(sooner, seconds=None), LEAVING) is None
    assert (node.departure.left, len(node.later)) == (10.0, 2), "who does not know takes nothing away"
    assert node.departure.notice == SPOT


def test_the_sigterm_of_a_machine_that_goes_down_does_not_end_the_drain_and_the_next_one_does() -> None:
    node = Node()
    node.by_notice(SPOT, RUNNING)
    assert node.by_signal(SIGTERM, LEAVING) is None
    node.clock.advance(2.0)
    assert node.by_signal(SIGTERM, LEAVING) == v.Leave("SIGTERM", 143, 30.0)


def test_signals_within_a_second_are_one_and_a_later_one_counts() -> None:
    node = Node()
    assert node.by_signal(SIGTERM, RUNNING) == v.Leave("SIGTERM", 143, 30.0)
    for _ in range(3):
        node.clock.advance(0.25)
        assert node.by_signal(SIGINT, LEAVING) is None
    node.clock.advance(0.25)
    assert node.by_signal(SIGINT, LEAVING) == v.Leave("SIGINT", 130, 29.0, SIGINT)


def test_signals_that_came_within_a_second_are_one_however_late_they_are_handled() -> None:
    node = Node()
    assert node.by_signal(SIGTERM, RUNNING, 99.0) == v.Leave("SIGTERM", 143, 29.0)
    node.clock.advance(5.0)
    assert node.by_signal(SIGTERM, LEAVING, 99.5) is None
    assert node.by_signal(SIGTERM, LEAVING, 100.5) == v.Leave("SIGTERM", 143, 24.0)


def test_what_follows_a_signal_has_the_rest_of_the_shutdown_timeout() -> None:
    node = Node(steps=20.0)
    assert node.departure.left == 30.0
    leave = node.by_signal(SIGTERM, RUNNING)
    assert leave == v.Leave("SIGTERM", 143, 0.0), "no time for two steps"
    node.clock.advance(12.0)
    assert (node.departure.left, node.departure.grace) == (18.0, 18.0)


def test_a_signal_that_is_a_notice_has_its_seconds_and_its_code_and_comes_once() -> None:
    node = Node(NoticeSource("signal", number=SIGUSR1, seconds=60.0))
    assert node.by_signal(SIGUSR1, RUNNING) == v.Leave("SIGUSR1", 143, 58.0)
    assert node.by_signal(SIGUSR1, LEAVING) is None
    assert node.events == [NoticeReceived("signal", "request", "SIGUSR1", 60.0, True)]
    assert node.later == []


def test_the_seconds_of_a_signal_that_is_a_notice_count_from_its_time() -> None:
    node = Node(NoticeSource("signal", number=SIGUSR1, seconds=60.0))
    at = node.clock.now()
    node.clock.advance(5.0)
    assert node.by_signal(SIGUSR1, RUNNING, at) == v.Leave("SIGUSR1", 143, 53.0)
    assert node.departure.left == 53.0


def test_of_two_sources_of_one_signal_the_one_with_seconds_counts() -> None:
    named = NoticeSource("signal", number=SIGUSR1, seconds=120.0)
    node = Node(named, NoticeSource("slurm", number=SIGUSR1))
    assert node.by_signal(SIGUSR1, RUNNING) == v.Leave("SIGUSR1", 143, 118.0)


def test_an_order_makes_a_node_leave_unless_it_does() -> None:
    node = Node()
    order = m.Depart(1, "drained by hand", 20.0)
    assert node.by_order(order, RUNNING) == v.Leave("drained by hand", 143, 20.0)
    assert node.by_order(order, LEAVING) is None
    assert node.events == [OrderReceived("depart", 3, 1, "drained by hand")] * 2
