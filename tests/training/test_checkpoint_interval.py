"""When the next checkpoint is due after a training resumed from memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job

from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.ranks.world import World


def test_steps_count_from_the_last_save_and_not_from_the_fault(tmp_path: Path) -> None:
    checkpoint = CheckpointManager(Checkpoint(tmp_path, every=50))
    checkpoint.go_on(World(), {}, (20, 0.0), (1, 20))
    assert not checkpoint.due(69)
    assert checkpoint.due(70)
    assert checkpoint.needs(30), "what was resumed from is in memory only"


@pytest.mark.parametrize(("ago", "due"), [(3600.0, True), (0.0, False)])
def test_time_counts_from_the_last_save_and_not_from_the_fault(tmp_path: Path, ago: float, due: bool) -> None:
    checkpoint = CheckpointManager(Checkpoint(tmp_path, every="10min"))
    checkpoint.go_on(World(), {}, (20, ago), (1, 20))
    assert checkpoint.due(21) is due


def test_the_step_and_age_of_the_last_checkpoint_survive_a_fault(tmp_path: Path) -> None:
    checkpoint = CheckpointManager(Checkpoint(tmp_path, every=50))
    checkpoint.go_on(World(), {}, (20, 100.0), (1, 20))
    step, ago = checkpoint.standing(33, now=False)
    assert step == 20
    assert ago >= 100.0
    assert checkpoint.standing(33, now=True) == (33, 0.0)


RANKS = """
import sys
import torch  # so that a forked agent has loaded what the script needs
import elastic_launch as el
from elastic_launch.training.checkpoints.manager import CheckpointManager

with el.session() as run:
    checkpoint = CheckpointManager(el.Checkpoint(sys.argv[1], every=5))
    checkpoint.go_on(run.world, {}, (25 if run.rank == 0 else 20, 0.0), (1, 20))
    print(f"rank {run.rank}: due {checkpoint.due(26)}, last {checkpoint.standing(26, now=False)[0]}")
"""


def test_ranks_that_differ_in_what_they_have_saved_agree_on_when_the_next_save_is_due(job: Job, tmp_path: Path) -> None:
    """A round may break when only some ranks have begun a save; they would wait for each other at the next one."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    agent = job.launch("--standalone", "--nproc", "2", command=[str(script), str(tmp_path / "checkpoints")])
    assert agent.wait() == 0, agent.output
    for rank in range(2):
        assert f"rank {rank}: due True, last 20" in agent.output
