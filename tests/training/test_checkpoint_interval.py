"""When the next checkpoint is due after a training resumed from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.ranks.world import World


def test_steps_count_from_the_last_save_and_not_from_the_fault(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, every=50)
    checkpoint.go_on(World(), {}, (20, 0.0))
    assert not checkpoint.due(69)
    assert checkpoint.due(70)
    assert checkpoint.needs(30), "what was resumed from is in memory only"


@pytest.mark.parametrize(("ago", "due"), [(3600.0, True), (0.0, False)])
def test_time_counts_from_the_last_save_and_not_from_the_fault(tmp_path: Path, ago: float, due: bool) -> None:
    checkpoint = Checkpoint(tmp_path, every="10min")
    checkpoint.go_on(World(), {}, (20, ago))
    assert checkpoint.due(21) is due


def test_the_step_and_age_of_the_last_checkpoint_survive_a_fault(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, every=50)
    checkpoint.go_on(World(), {}, (20, 100.0))
    step, ago = checkpoint.standing(33, now=False)
    assert step == 20
    assert ago >= 100.0
    assert checkpoint.standing(33, now=True) == (33, 0.0)
