"""Whose gradients are reduced: the model's parameters and the optimizer's, whatever needs a gradient at each step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Job

SCRIPT = str(SCRIPTS / "parameters.py")


def _results(directory: Path, rank: int = 0) -> dict[str, dict[str, Any]]:
    return dict(json.loads((directory / f"rank-{rank}.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("alone")
    done = subprocess.run([sys.executable, SCRIPT, str(directory)], capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()
    return _results(directory)


def _compare(alone: dict[str, dict[str, Any]], results: dict[str, dict[str, Any]]) -> None:
    for name, expected in alone["plain"].items():
        assert results["default"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
        if name in alone["exact"]:
            assert results["exact"][name] == alone["exact"][name], name
            assert alone["exact"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_one_process_trains_what_plain_pytorch_does(alone: dict[str, dict[str, Any]]) -> None:
    _compare(alone, alone)


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_each_world_trains_the_same_on_all_ranks(job: Job, alone: dict[str, dict[str, Any]], nproc: int) -> None:
    """At 5 ranks one has no micro-batch."""
    agent = job.launch("--standalone", "--nproc", str(nproc), command=[SCRIPT, str(job.directory)])
    assert agent.wait(100) == 0, agent.output
    ranks = [_results(job.directory, rank) for rank in range(nproc)]
    assert ranks == [ranks[0]] * nproc
    _compare(alone, ranks[0])


@pytest.mark.parametrize(
    ("case", "mode", "message"),
    [
        ("FrozenOnOne", "default", "on rank 1 these changed: 0.weight, 0.bias"),
        pytest.param("FrozenOnOne", "exact", "on rank 1 these changed: 0.weight, 0.bias", marks=pytest.mark.slow),
        pytest.param(
            "NewOnEach",
            "default",
            "optimizer.param_groups[1]['params'][0] is new in this training",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "OtherModel",
            "exact",
            "rank 1 has 0.weight (float32[5, 3], requires_grad=True) where",
            marks=pytest.mark.slow,
        ),
        pytest.param("LateBackward", "default", "The gradient of 2.", marks=pytest.mark.slow),
        pytest.param(
            "FrozenInAStep", "exact", "changed in the middle of a step: 0.weight, 0.b", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_that_differ_are_told_in_what(job: Job, case: str, mode: str, message: str) -> None:
    flags = ["--standalone", "--nproc", "2", "--max-restarts", "0"]
    agent = job.launch(*flags, command=[SCRIPT, str(job.directory), case, mode])
    assert agent.wait(60) != 0
    assert message in agent.output
