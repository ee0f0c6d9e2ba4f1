"""A script with a loop of its own reports its steps, and stops when it is asked to."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Agent, Job, read_lines, run_script, wait_for

SCRIPT = str(SCRIPTS / "plain.py")
OWN_LOOP = str(Path(__file__).parents[2] / "examples" / "convert" / "ddp" / "own_loop.py")
STEPS = 200


class Plain:
    def __init__(self, job: Job, steps: int = STEPS) -> None:
        self.job = job
        self.command = [SCRIPT, str(job.work), str(steps), "0.2"]

    def node(self, name: str, *flags: str) -> Agent:
        here = "is_host=true" if name == "a" else "is_host=false"
        return self.job.node(name, "--rdzv-conf", here, *flags, command=self.command)

    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.job.work / "steps.jsonl")

    def trains(self, world: int, *, after: int = 0) -> int:
        """Wait for five steps in a world of this size after a step; return the last step."""

        def probe() -> int:
            found = [x["step"] for x in self.steps() if x["world"] == world and x["step"] > after]
            return max(found) if len(found) >= 5 else 0

        return wait_for(f"steps in a world of {world}", probe, 100)

    def result(self) -> list[float]:
        return list(json.loads((self.job.work / "result.json").read_text())["weights"])


def undisturbed(directory: Path) -> list[float]:
    directory.mkdir()
    (directory / "hurry").touch()
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run_script(SCRIPT, str(directory), str(STEPS), "0", env=env)
    return list(json.loads((directory / "result.json").read_text())["weights"])


@pytest.mark.slow
def test_its_global_batch_and_its_steps_outlive_nodes_that_join_and_leave(job: Job, tmp_path: Path) -> None:
    plain = Plain(job)
    a = plain.node("a")
    step = plain.trains(1)
    b = plain.node("b")
    step = plain.trains(2, after=step)
    b.signal(signal.SIGTERM)
    assert b.wait(60) == 143, b.output
    plain.trains(1, after=step)
    job.tell("hurry")
    assert a.wait(100) == 0, a.output
    done = [x["step"] for x in plain.steps()]
    assert done == list(range(1, STEPS + 1)), "no step is lost or repeated"
    assert plain.result() == pytest.approx(undisturbed(tmp_path / "undisturbed"), rel=1e-4)
    assert [event["kind"] for event in job.events("round_drained")] == ["membership", "preemption"]
    assert job.events("restart_charged") == []
    begun = [(event["round"], event["step"]) for event in job.events("training_begun")]
    assert {number for number, _ in begun} == {1, 2, 3}
    assert not re.search(r"\d steps? lost", a.output + b.output)


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_after_the_script_has_saved(job: Job) -> None:
    plain = Plain(job)
    agent = job.launch("--standalone", "--nproc", "2", command=plain.command)
    plain.trains(2)
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143, agent.output
    assert (job.work / "saved.pt").exists()
    assert "lost" not in agent.output.splitlines()[-1], "the launcher does not know what the script has saved"
    (drained,) = job.events("round_drained")
    assert drained["step"] == max(x["step"] for x in plain.steps())


@pytest.mark.slow
def test_a_script_that_fails_as_it_saves_is_charged(job: Job) -> None:
    plain = Plain(job)
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=plain.command)
    plain.trains(2)
    job.tell("fail")
    os.kill(job.event("worker_started")["pid"], signal.SIGTERM)
    assert agent.wait(60) not in (0, 143), agent.output
    assert "exit code 3" in agent.output


def trained(job: Job, directory: Path, launches: list[tuple[int, int]]) -> list[frozenset[float]]:
    """Train in several launches, each with a world size, up to an epoch; return the samples of each step."""
    directory.mkdir()
    (directory / "hold").write_text("0")
    for world, epoch in launches:
        options = [str(epoch), "1", "--batch_size", "64", "--snapshot_path", str(directory / "snapshot.pt")]
        command = [str(SCRIPTS / "shares.py"), str(directory), OWN_LOOP, *options]
        agent = job.launch("--standalone", "--nproc", str(world), name=f"{directory.name}-{epoch}", command=command)
        assert agent.wait(100) == 0, agent.output
    lines = read_lines(directory / "shares.jsonl")
    steps: list[frozenset[float]] = []
    before = 0
    for world, epoch in launches:
        count = 2048 // 64 * (epoch - before) * world
        ranks = [[x["samples"] for x in lines[:count] if x["rank"] == rank] for rank in range(world)]
        del lines[:count]
        for parts in zip(*ranks, strict=True):
            samples = [sample for part in parts for sample in part]
            assert len(set(samples)) == len(samples) == 64, "the global batch is kept, and has no sample twice"
            steps.append(frozenset(samples))
        before = epoch
    assert not lines
    return steps


@pytest.mark.slow
def test_a_ddp_script_with_ten_changed_lines_keeps_its_global_batch_from_4_to_3_to_4_workers(
    job: Job, tmp_path: Path
) -> None:
    alone, changed = tmp_path / "alone", tmp_path / "changed"
    expected = trained(job, alone, [(1, 3)])
    assert len(frozenset().union(*expected[:32])) == 2048, "an epoch has each sample once"
    assert trained(job, changed, [(4, 1), (3, 2), (4, 3)]) == expected
    states = [torch.load(x / "snapshot.pt", weights_only=True)["MODEL_STATE"] for x in (changed, alone)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
