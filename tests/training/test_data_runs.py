"""Data too large for a list, or drawn without a dataset, in runs with real workers and real kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, Job

OFFSETS = str(Path(__file__).parents[2] / "examples" / "random_offsets" / "train.py")


@pytest.mark.slow  # test_loader has the same without workers
def test_a_thousand_million_samples_start_within_a_second(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=[str(SCRIPTS / "virtual.py"), str(job.directory)])
    assert agent.wait(100) == 0, agent.output
    ranks = [json.loads((job.directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        # CPU time: other tests run beside this one.
        assert rank["cpu"] < 1, rank
        assert rank["MiB"] < 100, rank
        assert len(rank["indices"]) == 4 * 32
    assert len({index for rank in ranks for index in rank["indices"]}) == 4 * 64


@pytest.mark.slow  # test_function_loader has the same without workers
@pytest.mark.executed
def test_random_offsets_have_the_undisturbed_hash_through_three_kills(job: Job) -> None:
    options = ["--exact", "--steps", "60", "--result"]
    alone, killed = job.directory / "alone.json", job.directory / "killed.json"
    done = subprocess.run([sys.executable, OFFSETS, *options, str(alone)], capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()
    plan = [
        {"rank": 1, "step": 15, "round": 1},
        {"rank": 0, "step": 30, "round": 2},
        {"rank": 1, "step": 45, "round": 3},
    ]
    env = {"ELASTIC_LAUNCH_FAULTS": json.dumps(plan)}
    agent = job.launch("--standalone", "--nproc", "2", command=[OFFSETS, *options, str(killed)], env=env)
    assert agent.wait(100) == 0, agent.output
    undisturbed, result = json.loads(alone.read_text()), json.loads(killed.read_text())
    assert agent.output.count("ended with signal 9 (SIGKILL)") == 3
    assert (result["restarts"], result["worlds"]) == (3, [2, 2, 2, 2])
    assert result["resumed_step"] > 0
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["loss"] == undisturbed["loss"]
