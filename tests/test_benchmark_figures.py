"""The figures of benchmarks/live.py, from lines that scripts would have written."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STEP = 0.02


@pytest.fixture
def live() -> Iterator[Any]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        yield importlib.import_module("live")
    finally:
        del sys.path[0]


def steps(
    pid: int, world: int, number: int, first: int, count: int, began: float, took: float = STEP
) -> list[dict[str, Any]]:
    """Return the lines of one process in one round."""
    line = {"pid": pid, "world": world, "round": number}
    return [{**line, "step": first + at, "clock": began + took * at} for at in range(count)]


def test_survivors_that_train_on_in_a_smaller_world_until_a_newcomer_is_ready(live: Any) -> None:
    """Two of three go on after 0.1 s, twice as slowly; the newcomer joins 2 s after the fault, in 0.2 s."""
    before = [line for pid in (1, 2, 3) for line in steps(pid, 3, 1, 1, 50, 0.0)]
    at = before[49]["clock"]
    alone = [line for pid in (1, 2) for line in steps(pid, 2, 2, 51, 48, at + 0.1, 2 * STEP)]
    joined = [line for pid in (1, 2, 4) for line in steps(pid, 3, 3, 99, 30, at + 2.18)]
    began = {"pid": 4, "world": 3, "round": 2, "step": 0, "mark": "begin", "clock": at + 0.05}
    lives = {(pid, 1) for pid in (1, 2, 3)}
    found = live.figures([*before, *alone, began, *joined], lives, {1, 2}, at, joined[0])
    assert found == {
        "next": pytest.approx(0.1),
        "standstill": pytest.approx(0.2 - STEP),
        "paused": pytest.approx(0.3 - 2 * STEP),
        "whole": pytest.approx(2.18),
        "lost": 0.0,
        "kept": 100.0,
        "starts": 1.0,
        "usual": pytest.approx(1000 * STEP),
        "slower": pytest.approx(2.0),
    }


def test_a_round_that_starts_all_workers_anew(live: Any) -> None:
    """All start again after 3 s, and repeat four steps."""
    before = [line for pid in (1, 2) for line in steps(pid, 2, 0, 1, 50, 0.0)]
    at = before[49]["clock"]
    again = [line for pid in (3, 4) for line in steps(pid, 2, 0, 47, 40, at + 3.0)]
    begun = [{"pid": pid, "world": 2, "round": 0, "step": 0, "mark": "begin", "clock": at + 1.0} for pid in (3, 4)]
    found = live.figures([*before, *begun, *again], {(1, 0), (2, 0)}, {1}, at, again[0])
    assert found["next"] == found["whole"] == pytest.approx(3.0)
    assert found["standstill"] == found["paused"] == pytest.approx(3.0 - STEP)
    assert (found["lost"], found["kept"], found["starts"]) == (4.0, 0.0, 2.0)
    assert "slower" not in found
