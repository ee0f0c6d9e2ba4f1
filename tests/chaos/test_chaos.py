"""A few short plans of faults against real runs; ``make chaos`` runs as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
from changes import undisturbed_hash

from chaos.plan import KINDS, STEPS, draw
from chaos.scene import run

SEEDS = (17, 19, 24, 31)
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
    assert outcome.landed == len(outcome.plan.faults)


def test_a_seed_is_a_plan() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert {fault.kind for seed in range(200) for fault in draw(seed).faults} == KINDS.keys()
