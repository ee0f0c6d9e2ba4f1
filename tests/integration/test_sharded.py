"""Sharded models and optimizers under the launcher: a kill, other worlds, and one hash in exact mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, SLOWNESS, Job

from elastic_launch.faults import FaultPlan

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "fsdp" / "train.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", ["fsdp", "zero"])
def test_a_kill_and_other_worlds_end_with_the_weights_of_an_undisturbed_unsharded_run(job: Job, shard: str) -> None:
    """The example on 2 processes, one of which is killed, then on 3, then on 1."""
    result = job.directory / "result.json"
    command = [EXAMPLE, "--checkpoint", str(job.directory / "saved"), "--exact", "--shard", shard]
    resumed = 0
    for world, steps in ((2, 6), (3, 9), (1, 12)):
        plan = FaultPlan.fail_at(1, 4) if world == 2 else FaultPlan()
        told = [*command, "--steps", str(steps), "--result", str(result)]
        agent = job.launch(
            "--standalone", "--nproc", str(world), name=f"w{world}", command=told, env=plan.environment()
        )
        assert agent.wait(120 * SLOWNESS) == 0, agent.output
        found: dict[str, Any] = json.loads(result.read_text())
        if world == 2:
            # The killed one's steps are in memory, so that at most the last one is done again.
            assert (found["worlds"], found["restarts"]) == ([2, 2], 1)
            assert found["resumed"] > 0
        else:
            assert (found["worlds"][-1], found["resumed"]) == (world, resumed)
        resumed = steps
    alone = [sys.executable, EXAMPLE, "--checkpoint", str(job.directory / "alone"), "--exact", "--shard", "none"]
    subprocess.run(
        [*alone, "--steps", "12", "--result", str(result)], check=True, capture_output=True, timeout=100 * SLOWNESS
    )
    assert json.loads(result.read_text())["hash"] == found["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exact_mode_gives_the_same_weights_and_evaluations_at_each_world(job: Job) -> None:
    found = {}
    for world in (1, 2, 3):
        result = job.directory / f"result-{world}.json"
        command = [str(SCRIPTS / "sharded.py"), str(result)]
        agent = job.launch("--standalone", "--nproc", str(world), name=f"world-{world}", command=command)
        assert agent.wait(120 * SLOWNESS) == 0, agent.output
        found[world] = json.loads(result.read_text())
    whole = {kind: found[1].pop(f"{kind} whole") for kind in list(found[1]) if f"{kind} whole" in found[1]}
    assert found[2] == found[3] == found[1]
    assert found[1] | whole == found[1]
    assert len(whole) == 5
