"""When snapshots in memory are taken: often, and so that they cost a hundredth of the time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.training.checkpoints.snapshot_interval import SHARE, Cost, Rhythm

seconds = st.floats(1e-4, 100)


def rhythm_of(found: Rhythm, step_seconds: float = 1.0, steps: int = 50) -> Rhythm:
    for step in range(steps):
        found.step_done(step, step * step_seconds)
    return found


def rhythm(step_seconds: float, cost: Cost | None) -> Rhythm:
    found = rhythm_of(Rhythm(), step_seconds)
    if cost is not None:
        found.cost(cost)
    return found


class Training:
    """Steps of a given duration, and snapshots that slow down the step after them.

    Args:
        step: seconds.
        part: of what is written beside the training, by which this is slowed down.
        noise: standard deviation of a step's duration, as a share of it.
        pause: after every tenth step, as an evaluation takes.
    """

    def __init__(self, step: float, cost: Cost, part: float, noise: float = 0.0, pause: float = 0.0) -> None:
        self.rhythm = Rhythm()
        self.rhythm.begin(0)
        self.taken: list[int] = []
        self.cost = cost
        self.part = part
        self._step, self._noise, self._pause = step, noise, pause
        self._chance = random.Random(1)
        self._now = 0.0
        self._number = 0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self._number += 1
            if self.taken and self.taken[-1] == self._number - 1:
                self._now += self.cost.stall + self.part * self.cost.beside
                self.rhythm.cost(self.cost)
            self._now += self._step * max(0.5, self._chance.gauss(1.0, self._noise))
            self._now += self._pause if self._number % 10 == 0 else 0.0
            self.rhythm.step_done(self._number, self._now)
            if self.rhythm.due(self._number):
                self.rhythm.taken(self._number)
                self.taken.append(self._number)

    def interval(self) -> float:
        """Steps between the last snapshots, on average."""
        recent = self.taken[-11:]
        return (recent[-1] - recent[0]) / (len(recent) - 1)


def due(step: float, cost: float) -> int:
    return math.ceil(cost / (SHARE * step))


def test_the_first_snapshot_is_due_at_once() -> None:
    assert Rhythm().due(1)


def test_one_that_costs_nothing_is_due_after_every_step() -> None:
    found = rhythm(1.0, Cost(0.001, 0.001))
    found.taken(50)
    assert not found.due(50)
    assert found.due(51)


@given(st.floats(1e-3, 10), seconds, seconds)
def test_the_interval_keeps_the_cost_at_its_share_and_no_lower_than_need_be(
    step: float, stall: float, beside: float
) -> None:
    """All of what is written beside the training counts, as long as nothing better is known."""
    interval, cost = rhythm(step, Cost(stall, beside)).interval, stall + beside
    assert cost <= SHARE * step * interval * 1.0001
    assert interval == 1 or cost > SHARE * step * (interval - 1) * 0.9999


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_concurrent_writing_counts_by_how_much_it_slows_training(part: float) -> None:
    training = Training(1.0, Cost(0.005, 0.2), part)
    training.go(3000)
    assert training.interval() == pytest.approx(max(2, due(1.0, 0.005 + part * 0.2)), abs=1)


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_steps_that_differ_for_other_reasons_do_not_mislead(part: float) -> None:
    training = Training(1.0, Cost(0.005, 0.1), part, noise=0.05, pause=20.0)
    training.go(5000)
    cost = 0.005 + part * 0.1
    assert max(2, due(1.0, cost) - 4) <= training.interval() <= due(1.0, cost) + 4


def test_costs_that_change_are_learnt_and_accidents_are_not() -> None:
    found = rhythm(1.0, Cost(1.0, 0.0))
    assert found.interval == 100
    for _ in range(3):
        found.cost(Cost(0.1, 0.0))
    assert found.interval == 10
    found.cost(Cost(7.0, 0.0))
    assert found.interval == 10


def test_what_a_slot_costs_once_does_not_count_unless_it_is_much() -> None:
    found = Rhythm()
    found.cost(Cost(0.1, 0.8), fresh=True)  # before any step's duration is known
    assert rhythm_of(found).interval == 1
    found = rhythm(1.0, None)
    found.cost(Cost(0.1, 0.8), fresh=True)
    assert found.interval == 1
    found.cost(Cost(0.1, 1.9), fresh=True)
    assert found.interval == 200


def test_a_training_that_gets_slower_by_its_snapshots_takes_fewer() -> None:
    """As when another program begins to use the cores that only copying had used."""
    training = Training(1.0, Cost(0.001, 0.2), 0.0)
    training.go(200)
    assert training.interval() == 2
    training.part = 1.0
    training.go(2000)
    assert training.interval() == pytest.approx(21, abs=1)
    training.part = 0.0
    training.go(2000)
    assert training.interval() == 2


def test_a_second_training_of_a_session_has_snapshots_from_its_first_step_on() -> None:
    rhythm = Rhythm()
    rhythm.begin(0)
    for step in range(1, 100):
        rhythm.step_done(step, float(step))
        if rhythm.due(step):
            rhythm.taken(step)
    rhythm.begin(0)
    assert rhythm.due(1)
    rhythm.begin(50)
    assert not rhythm.due(50)
    assert rhythm.due(51)


@pytest.mark.parametrize(("last", "due"), [(100, False), (None, False), (95, False), (85, True), (-1, True)])
def test_a_state_that_is_no_snapshot_does_not_put_off_the_next_one(last: int | None, due: bool) -> None:
    found = rhythm(1.0, Cost(0.1, 0.0))
    assert found.interval == 10
    found.begin(100, last)
    assert found.due(100) is due
