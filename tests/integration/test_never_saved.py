"""A run whose last state could not be saved fails at the end, even if it has saved others before.

If it could not save at all, it does not begin.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from changes import Changes
from harness import Job, make_unwritable, wait_for


@pytest.mark.slow
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_run_does_not_begin_with_a_directory_that_cannot_be_written_to(job: Job, nproc: str) -> None:
    directory = job.directory / "file" / "checkpoints"
    directory.parent.touch()
    changes = Changes(job, "--checkpoint", str(directory))
    agent = changes.alone("--nproc", nproc)
    assert agent.wait(100) == 93, agent.output
    cause = agent.output.partition("root cause: ")[2]
    assert f"UsageError: Checkpoints cannot be saved to {directory} on host " in cause
    assert "Give Checkpoint() a directory that exists, or can be made," in agent.output
    assert not changes.steps()
    assert not job.events("restart_charged")


@pytest.mark.slow
def test_a_restart_and_a_drain_do_not_hide_that_nothing_was_saved(job: Job, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    changes = Changes(job, "--checkpoint", str(directory), "--every", "1000")
    agent = changes.alone("--nproc", "2")
    number = changes.trains(2, steps=15)
    make_unwritable(directory)
    os.kill(job.events("worker_started")[-1]["pid"], signal.SIGKILL)
    number = changes.trains(2, after=number, steps=2)
    os.kill(job.events("worker_started")[-1]["pid"], signal.SIGTERM)
    changes.trains(2, after=number)
    changes.hurry()
    assert agent.wait(100) == 93, agent.output
    failed = f"No checkpoint of this run could be saved in {directory}: Could not write a checkpoint in {directory}"
    end = agent.output.partition("exit code 93: ")[2]
    assert failed in end
    assert "Traceback" not in end
    assert [event["restarts"] for event in job.events("restart_charged")] == [1], "the kill, not the end"
    assert [kind for kind, _, _ in changes.kinds()] == ["broken", "drained", "broken"]
    assert job.events("round_broken")[-1]["kind"] == "fatal"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_an_earlier_checkpoint_does_not_hide_that_the_last_one_could_not_be_saved(
    job: Job, tmp_path: Path, kills: int
) -> None:
    directory = tmp_path / "checkpoints"
    changes = Changes(job, "--checkpoint", str(directory), "--every", "10", step_time=0.4)  # until it is to hurry
    agent = changes.alone()
    number = changes.trains(1)
    wait_for("a checkpoint", lambda: list(directory.glob("step-*/manifest.json")), 60)
    directory.rename(tmp_path / "moved")
    directory.touch()  # no checkpoint can be written below a file
    agent.says("Training goes on.", 60)
    for _ in range(kills):
        os.kill(job.events("worker_started")[-1]["pid"], signal.SIGKILL)
        number = changes.trains(1, after=number)
    changes.hurry()
    assert agent.wait(100) == 93, agent.output
    what = f"The last checkpoint, of step 200, could not be saved in {directory}: "
    assert what in agent.output.partition("exit code 93: ")[2]
