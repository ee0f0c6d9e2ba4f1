"""A few short plans of faults against real runs; ``make chaos`` runs as many as one likes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from changes import undisturbed_hash

from chaos.plan import KINDS, STEPS, draw
from chaos.report import BEGIN, END, figures, report
from chaos.scene import Outcome, run

SEEDS = (4, 21, 49, 51)
"""Plans that need no root, and that together have most kinds of faults."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.mark.slow
@pytest.mark.executed
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_survives_what_is_done_to_it(seed: int, tmp_path: Path, undisturbed: str) -> None:
    outcome = run(draw(seed, 4), tmp_path / "run", undisturbed)
    assert not outcome.problems, outcome.line()
    assert len(outcome.landed) == len(outcome.plan.all)


def test_figures_are_written_between_the_marks_of_a_page(tmp_path: Path) -> None:
    plans = [draw(seed, 3) for seed in (4, 5, 7)]
    outcomes = [Outcome(plan, landed=[(fault.kind, "training") for fault in plan.all], steps=410) for plan in plans]
    outcomes[1].problems.append("another hash")
    lines = [json.dumps({**outcome.record(), "date": "2026-11-23", "load": 3.2}) for outcome in outcomes]
    (tmp_path / "record").write_text("\n".join(lines) + "\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Chaos\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    report(tmp_path / "record", page)
    text = page.read_text()
    assert text.startswith(f"# Chaos\n\n{BEGIN}\n2026-11-23, ")
    assert text.endswith(f"{END}\n\nMore.\n")
    assert "old" not in text
    assert figures([json.loads(line) for line in lines]) in text
    landed = sum(len(plan.all) for plan in plans)
    assert f"| faults planned, landed | {landed}, {landed} |" in text
    assert "| plans | 3, seeds 4 to 5, 7 |" in text
    assert "| that failed | 1: seeds 5 |" in text


def test_a_seed_is_a_plan() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert not any(plan.hosts and plan.limited for plan in map(draw, range(300)))
    assert {fault.kind for seed in range(300) for fault in draw(seed).faults} == KINDS.keys()
