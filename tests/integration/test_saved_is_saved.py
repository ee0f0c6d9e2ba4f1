"""What an agent reports about the final state of a run: saved means that it is in durable storage."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from changes import Changes, ctl
from harness import SCRIPTS, Job, make_unwritable


def test_a_drained_run_that_reports_its_state_as_saved_has_saved_it(job: Job, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    changes = Changes(job, "--checkpoint", str(checkpoints))
    agent = changes.alone()
    changes.trains(1, steps=5)
    done = ctl("drain", "--log-dir", str(job.logs))
    found = re.search(r"stopped by elasticctl drain after step (\d+), its state saved", done.stdout)
    assert done.returncode == 0, done
    assert found, done
    assert agent.wait() == 143
    (saved,) = checkpoints.glob(f"step-{found[1]}.*")
    assert (saved / "manifest.json").exists()
    assert f"step {found[1]} is saved in {saved}" in agent.output
    assert "no steps lost" in agent.output


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True], ids=["none", "impossible"])
def test_a_drained_run_that_cannot_be_saved_reports_it(job: Job, tmp_path: Path, checkpoint: bool) -> None:
    directory = tmp_path / "checkpoints"
    changes = Changes(job, *(["--checkpoint", str(directory), "--every", "1000"] if checkpoint else []))
    agent = changes.alone()
    changes.trains(1, steps=5)
    if checkpoint:
        make_unwritable(directory)
    done = ctl("drain", "--log-dir", str(job.logs))
    why = f"Could not write a checkpoint in {directory}" if checkpoint else "the script saves no checkpoints"
    assert done.returncode == 1, done
    assert f"its state not saved: {why}" in done.stdout
    assert agent.wait() == 143
    last = changes.last(1)
    assert f"nothing is saved, {last} steps lost: {why}" in agent.output
    assert f"{last} steps lost; restarts 0" in agent.output
    assert (changes.ledger()["unsaved_steps"], changes.ledger()["steps"]) == (last, 0)


def test_a_signal_sent_twice_at_once_counts_once_and_the_state_is_saved(job: Job, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    changes = Changes(job, "--checkpoint", str(checkpoints))
    agent = changes.alone()
    changes.trains(1, steps=5)
    agent.signal(signal.SIGTERM)
    time.sleep(0.05)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert [kind for kind, _, _ in changes.kinds()] == ["drained"]
    assert list(checkpoints.glob(f"step-{changes.last(1)}.*/manifest.json"))


@pytest.mark.slow
def test_without_time_for_a_drain_the_snapshot_in_memory_is_saved(job: Job, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    changes = Changes(job, "--checkpoint", str(checkpoints), step_time=7.5)
    agent = changes.alone("--shutdown-timeout", "14")
    changes.trains(1)
    time.sleep(3)  # of the seven that the next step takes; the snapshot takes milliseconds
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143
    assert "no time to stop after a step: 14.0 s are left" in agent.output
    (saved,) = checkpoints.glob(f"step-{changes.last(1)}.*")
    assert f"step {changes.last(1)} is saved in {saved}" in agent.output
    assert "no steps lost" in agent.output


@pytest.mark.slow
def test_a_relative_checkpoint_directory_is_that_of_its_construction(job: Job, tmp_path: Path) -> None:
    """The script changes its working directory before it resumes, and in its loop."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for steps in (200, 220):
        command = [str(SCRIPTS / "changing_directory.py"), str(elsewhere), str(steps)]
        agent = job.launch("--standalone", "--max-restarts", "1", command=command, cwd=here, name=f"to {steps}")
        assert agent.wait(90) == 0, agent.output
        assert list(here.glob(f"checkpoints/step-{steps}.*/manifest.json")), agent.output
    first, after_the_error, second_run = map(int, (tmp_path / "resumed.txt").read_text().split())
    assert (first, second_run) == (0, 200)
    assert 4 <= after_the_error < 200
    assert list(elsewhere.iterdir()) == []
    assert [path.name for path in here.iterdir()] == ["checkpoints"]


BROKEN_OFF = """
import sys
import torch
from torch import nn
import elastic_launch as el

with el.session() as run:
    model, data = nn.Linear(4, 1), torch.ones(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = el.Checkpoint(sys.argv[2], every=1000)
    if sys.argv[1] == "loop":
        loader = el.ElasticLoader(data, el.GlobalBatch(16, micro=4))
        for step in run.steps(loader, model, optimizer, until="20ba", checkpoint=checkpoint):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()
            if step.number == 6:
                break
    else:
        run.register("model", model)
        run.register("optimizer", optimizer)
        for step in range(run.resume(checkpoint) + 1, 21):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            if run.restarts or run.boundary(step):
                break
"""


@pytest.mark.parametrize("mode", ["loop", "own loop"])
def test_a_step_that_a_break_leaves_is_not_saved_as_the_state_before_it(job: Job, tmp_path: Path, mode: str) -> None:
    """The state before it was restored from memory after a fault, and not saved durably."""
    script, directory = tmp_path / "broken_off.py", tmp_path / "checkpoints"
    script.write_text(BROKEN_OFF)
    faults = {"ELASTIC_LAUNCH_FAULTS": json.dumps([{"rank": 1, "step": 5}])}
    agent = job.launch("--standalone", "--nproc", "2", command=[str(script), mode, str(directory)], env=faults)
    assert agent.wait(100) == 0, agent.output
    assert len(job.events("restart_charged")) == 1
    assert not list(directory.glob("step-*"))
