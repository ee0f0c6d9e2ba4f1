"""A few short plans of faults against real runs; ``make chaos`` runs as many as one likes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import Job

from chaos.plan import DIVIDED, FOR_GOOD, FORMS, KINDS, MOMENTS, NEEDS, PAIRED, Plan, draw, draw_pairs
from chaos.report import figures, marks, report
from chaos.scene import Outcome, run, undisturbed

SEEDS = (318, 495, 1524, 3157, 3364)
"""Plans that need no root, and that together have all kinds of faults which need none, and all stores."""

FAULTS = 4
"""At most so many faults in one of them, besides one in the last steps."""


PAIRS = (42, 489, 565, 630, 1352, 1672, 1735, 1909, 2108, 2380, 2593, 2622)
"""Plans with one pair of faults each, which need no root, and together have all forms, moments and kinds of pairs that
need none, and all stores."""

JOBS = 3
"""Plans side by side: most of a plan is waiting."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_survive_what_is_done_to_them(job: Job) -> None:
    """Each run is a job of its own, in the directory of this one, with which the process that forks agents comes."""
    survive([draw(seed, FAULTS) for seed in SEEDS], job.directory)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_runs_survive_two_faults_at_almost_the_same_time(job: Job) -> None:
    survive([draw_pairs(seed, 1) for seed in PAIRS], job.directory)


def survive(plans: list[Plan], base: Path) -> None:
    expected = undisturbed(base, plans)
    with ThreadPoolExecutor(JOBS) as pool:
        outcomes = [*pool.map(lambda plan: run(plan, base / f"seed-{plan.seed}", expected[plan.form]), plans)]
    failed = [outcome.line() for outcome in outcomes if outcome.problems]
    assert not failed, "\n".join(failed)
    assert all(len(outcome.landed) == len(outcome.plan.all) for outcome in outcomes)


@pytest.mark.parametrize("pairs", [False, True])
def test_figures_are_written_between_the_marks_of_a_page(tmp_path: Path, pairs: bool) -> None:
    (begin, end), (of_others, _) = marks(pairs), marks(not pairs)
    plans = [draw_pairs(seed) if pairs else draw(seed, 3) for seed in (4, 5, 7)]
    outcomes = [Outcome(plan, landed=[(fault.kind, "training") for fault in plan.all], steps=410) for plan in plans]
    outcomes[1].problems.append("another hash")
    if pairs:
        outcomes[0].aimed = [("forming", True), ("commit", False), ("forming", False)]
    lines = [json.dumps({**outcome.record(), "date": "2026-11-23", "load": 3.2, "jobs": 4}) for outcome in outcomes]
    (tmp_path / "record").write_text("\n".join(lines) + "\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Chaos\n{of_others}\n{begin}\nold\n{end}\n\nMore.\n")
    report(tmp_path / "record", page, pairs)
    text = page.read_text()
    assert text.startswith(f"# Chaos\n{of_others}\n{begin}\n2026-11-23, ")
    assert text.endswith(f"{end}\n\nMore.\n")
    assert "old" not in text
    assert figures([json.loads(line) for line in lines]) in text
    landed = sum(len(plan.all) for plan in plans)
    assert f"| faults planned, landed | {landed}, {landed} |" in text
    assert "| plans | 3, seeds 4 to 5, 7 |" in text
    assert "| that failed | 1: seeds 5 |" in text
    assert ("| aimed at a moment, of these when it came | forming 2, 1; commit 1, 0 |\n" in text) == pairs


def test_a_seed_is_a_plan() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert not any(plan.hosts and plan.limited for plan in map(draw, range(300)))
    assert {fault.kind for seed in range(300) for fault in draw(seed).faults} == KINDS.keys()


def test_pairs_follow_each_other_and_have_all_forms_moments_and_kinds() -> None:
    plans = [draw_pairs(seed) for seed in range(300)]
    assert plans == [draw_pairs(seed) for seed in range(300)]
    faults = [fault for plan in plans for fault in plan.faults]
    assert all(
        first.gap is None and 0 <= second.gap <= 0.3 for first, second in zip(faults[::2], faults[1::2], strict=True)
    )
    assert {plan.form for plan in plans} == {*FORMS, *DIVIDED}
    assert {fault.moment for fault in faults} == {"", *MOMENTS}
    assert {fault.kind for fault in faults} == PAIRED.keys()
    short = [draw_pairs(seed, 1) for seed in PAIRS]
    assert not any(plan.faulty for plan in short)
    assert {plan.form for plan in short} == {*FORMS, *DIVIDED}
    assert {fault.moment for plan in short for fault in plan.all} == {"", *MOMENTS}
    assert {fault.kind for plan in short for fault in plan.all} == {
        kind for kind in PAIRED if NEEDS.get(kind) != "faulty"
    }
    assert {(plan.members, plan.voters) for plan in short} == {(0, False), (0, True), (1, False)}


def test_the_short_plans_have_all_that_needs_no_root() -> None:
    plans = [draw(seed, FAULTS) for seed in SEEDS]
    assert not any(plan.hosts or plan.disk or plan.faulty or plan.limited for plan in plans)
    without_root = {kind for kind in KINDS if NEEDS.get(kind, "members") == "members"}
    assert {fault.kind for plan in plans for fault in plan.all} == without_root | {FOR_GOOD}
    assert {(plan.members, plan.voters) for plan in plans} == {(0, False), (0, True), (1, False), (3, False)}
    assert {plan.executed for plan in plans} == {plan.live for plan in plans} == {True, False}


def test_a_node_that_is_lost_for_good_is_one_that_the_others_can_do_without() -> None:
    plans = [plan for plan in map(draw, range(300)) if plan.last is not None and plan.last.kind == FOR_GOOD]
    assert plans
    assert all(plan.nodes > 1 for plan in plans)
