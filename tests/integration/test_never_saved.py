"""A run that should have saved and never could fails at the end, whatever happened in between."""

from __future__ import annotations

import os
import signal

import pytest
from changes import Changes
from harness import Job

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
