"""The benchmark of other launchers: its figures and its tables, from given lines. No launcher runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"
COMPARISON = ROOT / "docs" / "explanation" / "comparison.md"
STEP = 0.02


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path[:0] = [str(PEERS), str(PEERS.parent)]
    try:
        yield {name: importlib.import_module(name) for name in ("figures", "results")}
    finally:
        del sys.path[:2]


def steps(pid: int, world: int, number: int, first: int, count: int, began: float) -> list[dict[str, Any]]:
    """The lines of rank 0 in one round."""
    line = {"rank": 0, "pid": pid, "world": world, "round": number}
    return [{**line, "step": first + at, "clock": began + STEP * at} for at in range(count)]


def test_a_restart_pauses_and_repeats_steps(modules: dict[str, ModuleType]) -> None:
    before, again = steps(1, 2, 0, 1, 36, 0.0), steps(2, 2, 0, 31, 20, 5.0)
    at = before[-1]["clock"] + 0.01
    found = modules["figures"].figures([*before, *again], at, 2)
    assert found == {
        "again": 6.0,
        "pause": pytest.approx(5.0 + 6 * STEP - before[-1]["clock"] - STEP),
        "whole": pytest.approx(5.0 + 6 * STEP - at),
    }


def test_survivors_that_train_on_pause_briefly_and_are_whole_later(modules: dict[str, ModuleType]) -> None:
    before, alone = steps(1, 2, 1, 1, 36, 0.0), steps(1, 1, 2, 37, 100, 1.0)
    whole = steps(1, 2, 3, 137, 5, 3.5)
    at = before[-1]["clock"] + 0.01
    found = modules["figures"].figures([*before, *alone, *whole], at, 2)
    assert found == {
        "again": 0.0,
        "pause": pytest.approx(3.5 - alone[-1]["clock"] - STEP),
        "whole": pytest.approx(3.5 - at),
    }


def test_a_training_that_stops_for_good_has_no_pause(modules: dict[str, ModuleType]) -> None:
    before = steps(1, 2, 0, 1, 36, 0.0)
    late = steps(1, 2, 0, 37, 1, 36 * STEP)
    assert modules["figures"].figures([*before, *late], before[-1]["clock"] + 0.001, 1) == {"again": 0.0}


def test_a_table_has_medians_ranges_and_what_is_missing(modules: dict[str, ModuleType]) -> None:
    def one(who: str, figures: dict[str, float] | None) -> dict[str, Any]:
        return {"event": "node-lost", "who": who, "figures": figures}

    full = [one("a", {"pause": x, "whole": 2 * x, "again": 5.0}) for x in (1.0, 3.0, 2.0)]
    found = {"limit": 60, "versions": {"a": {}, "b": {}}, "measured": [*full, one("b", {"again": 0.0}), one("b", None)]}
    assert modules["results"].table(found).splitlines()[2:] == [
        "| a node is lost: pause | 2.00 s (1.00..3.00) | none within 60 s |",
        "| a node is lost: until the world is whole | 4.00 s (2.00..6.00) | none within 60 s |",
        "| a node is lost: steps done again | 5 | none within 60 s |",
    ]


def test_the_comparison_shows_the_raw_data(modules: dict[str, ModuleType]) -> None:
    kept = [json.loads(path.read_text()) for path in sorted((PEERS / "results").glob("*.json"))]
    assert len({json.dumps(found["versions"]) for found in kept}) == 1
    assert modules["results"].table(modules["results"].joined(kept)) in COMPARISON.read_text()
