"""What an agent learns of its workers' pace."""

from __future__ import annotations

import pytest

from elastic_agents.pace import Pace


def trained(steps: int, *, total: int, first: int = 0, first_takes: float = 9.0) -> Pace:
    """A pace after steps of 2 s each, but for the first."""
    pace = Pace()
    pace.begin(1, first, 100.0, total)
    for number in range(1, steps + 1):
        pace.step(1, first + number, 100.0 + first_takes + 2.0 * (number - 1))
    return pace


def test_the_rest_is_estimated_from_the_rounds_own_steps() -> None:
    assert trained(4, total=50, first=10).remaining() == pytest.approx(2.0 * (50 - 14))
    assert trained(100, total=150).remaining() == pytest.approx(2.0 * 50)


def test_another_rounds_steps_say_nothing_of_the_rest() -> None:
    pace = trained(30, total=50)
    pace.begin(2, 20, 500.0, 50)
    for step in (21, 22):
        pace.step(2, step, 500.0 + step)
        assert pace.remaining() == -1.0
    pace.step(2, 23, 523.0)
    assert pace.remaining() == pytest.approx(27.0)


def test_the_rest_is_unknown_without_a_total_and_beyond_it() -> None:
    assert trained(10, total=0).remaining() == -1.0
    assert trained(10, total=9).remaining() == -1.0, "it trains a second time"
    assert trained(10, total=10).remaining() == 0.0
