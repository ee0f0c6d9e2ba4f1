"""What a script changes at the start of a step, before the round breaks in it, counts once in every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Job, run_script

SCRIPT = str(SCRIPTS / "heads.py")
LARGE = ["value", "data", "buffer", "large", "averaged", "momentum", "group"]
REMEDY = "right after step.update()"


def undisturbed(directory: Path, head: str) -> dict[str, Any]:
    run_script(SCRIPT, str(directory), head)
    return dict(json.loads((directory / "result.json").read_text()))


def killed(job: Job, head: str, workers: int, *options: str) -> tuple[dict[str, Any], str]:
    """Kill rank 0 in the fifth step, in which every rank is past its head."""
    command = [SCRIPT, str(job.directory), head, "--end", "1:5"]
    agent = job.launch("--standalone", "--nproc", str(workers), *options, command=command)
    assert agent.wait(150) == 0, agent.output
    assert len(job.events("round_formed")) > 1, "none was killed"
    return json.loads((job.directory / "result.json").read_text()), agent.output


@pytest.mark.parametrize("head", ["small", *(pytest.param(x, marks=pytest.mark.slow) for x in ("between", "freeze"))])
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_what_is_small_is_handed_on_as_before_the_head(job: Job, tmp_path: Path, head: str, workers: int) -> None:
    result, _ = killed(job, head, workers)
    assert result == undisturbed(tmp_path, head)
    assert len(job.events("worker_kept")) == workers - 1


@pytest.mark.parametrize("head", ["data", *(pytest.param(x, marks=pytest.mark.slow) for x in LARGE if x != "data")])
def test_a_process_that_cannot_hand_on_the_start_of_its_step_ends(job: Job, tmp_path: Path, head: str) -> None:
    result, output = killed(job, head, 2)
    assert result == undisturbed(tmp_path, head)
    assert not job.events("worker_kept")
    assert REMEDY in output


@pytest.mark.slow
@pytest.mark.parametrize("head", ["small", "between", pytest.param("data", marks=pytest.mark.soak)])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_without_live_rounds_the_head_counts_once_too(job: Job, tmp_path: Path, head: str, workers: int) -> None:
    result, _ = killed(job, head, workers, "--no-live")
    assert result == undisturbed(tmp_path, head)
