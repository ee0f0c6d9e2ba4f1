"""A run whose last state could not be saved fails at the end, even if it has saved others before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from changes import Changes
from harness import Job, wait_for

NOWHERE = "/sys/elastic-launch-test"
"""In /sys no directory can be made, not even by the superuser, to whom file modes do not apply."""


@pytest.mark.slow
def test_a_restart_and_a_drain_do_not_hide_that_nothing_was_saved(job: Job) -> None:
    changes = Changes(job, "--checkpoint", NOWHERE, "--every", "10")
    agent = changes.alone("--nproc", "2")
    number = changes.trains(2, steps=15)
    os.kill(job.events("worker_started")[-1]["pid"], signal.SIGKILL)
    number = changes.trains(2, after=number, steps=2)
    os.kill(job.events("worker_started")[-1]["pid"], signal.SIGTERM)
    changes.trains(2, after=number)
    changes.hurry()
    assert agent.wait(100) == 93, agent.output
    failed = f"No checkpoint of this run could be saved in {NOWHERE}: Could not write a checkpoint in {NOWHERE}"
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
    changes = Changes(job, "--checkpoint", str(directory), "--every", "10")
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
