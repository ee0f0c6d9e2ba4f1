"""The strongest oracle: the hash of the final weights, for any world size and after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, run_script, wait_for

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")
SHORT = ["--epochs", "1", "--exact"]


def _result(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _train(job: Job, nproc: int, *options: str, name: str = "run", halted: bool = False) -> tuple[Agent, Path]:
    """Start a training.

    Args:
        halted: whether it stops after the 15th of its 23 steps until :func:`_go_on`.
    """
    result = job.directory / f"{name}.json"
    by = [str(SCRIPTS / "halted.py"), "15", str(job.directory / "go-on")] if halted else []
    command = [*by, DIGITS, *SHORT, "--result", str(result), *options]
    return job.launch("--standalone", "--nproc", str(nproc), command=command, name=name), result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of one undisturbed process without any launcher."""
    path = tmp_path_factory.mktemp("alone") / "result.json"
    run_script(DIGITS, *SHORT, "--result", str(path), timeout=250)
    return _result(path)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_every_world_size_has_the_hash_of_one_process(job: Job, alone: dict[str, Any], nproc: int) -> None:
    agent, path = _train(job, nproc)
    assert agent.wait(100) == 0, agent.output
    result = _result(path)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["loss"] == alone["loss"]
    assert result["worlds"] == [nproc]


@pytest.mark.soak
def test_the_default_mode_agrees_within_the_last_digits(job: Job, alone: dict[str, Any]) -> None:
    result = job.directory / "default.json"
    command = [DIGITS, "--epochs", "1", "--result", str(result)]
    agent = job.launch("--standalone", "--nproc", "3", command=command)
    assert agent.wait(100) == 0, agent.output
    assert _result(result)["loss"] == pytest.approx(alone["loss"], rel=1e-4)


@pytest.mark.soak
def test_another_seed_has_another_hash(job: Job, alone: dict[str, Any]) -> None:
    agent, path = _train(job, 1, "--seed", "1")
    assert agent.wait(100) == 0, agent.output
    assert _result(path)["weights_sha256"] != alone["weights_sha256"]


def _go_on(job: Job) -> None:
    (job.directory / "go-on").touch()


def _pids(job: Job) -> list[int]:
    return [event["pid"] for event in job.events("worker_started")]


def _saved(checkpoints: Path) -> int:
    """The newest checkpoint's step; where cores are scarce, training has priority and copies skip some."""
    return max((int(path.name.split("-")[1].split(".")[0]) for path in checkpoints.glob("step-*")), default=0)


@pytest.mark.slow
@pytest.mark.executed
def test_a_kill_in_the_middle_changes_nothing(job: Job, alone: dict[str, Any]) -> None:
    checkpoints = job.directory / "checkpoints"
    agent, path = _train(job, 2, "--checkpoint", str(checkpoints), "--every", "5", halted=True)
    wait_for("a checkpoint", lambda: _saved(checkpoints) >= 10, 60)
    os.kill(_pids(job)[1], signal.SIGKILL)
    _go_on(job)
    assert agent.wait(100) == 0, agent.output
    result = _result(path)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["restarts"] == 1
    assert result["resumed_step"] >= 10
    assert result["worlds"] == [2, 2]


@pytest.mark.slow
def test_a_run_stopped_at_three_and_resumed_at_two_changes_nothing(job: Job, alone: dict[str, Any]) -> None:
    checkpoints = job.directory / "checkpoints"
    options = ["--checkpoint", str(checkpoints), "--every", "5"]
    first, _ = _train(job, 3, *options, name="first", halted=True)
    wait_for("a checkpoint", lambda: _saved(checkpoints) >= 10, 60)
    first.signal(signal.SIGTERM)
    first.says("round 1 drains")
    _go_on(job)
    assert first.wait() == 143
    second, path = _train(job, 2, *options, name="second")
    assert second.wait(100) == 0, second.output
    result = _result(path)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["worlds"] == [3, 2]
    assert result["resumed_step"] >= 10


@pytest.mark.slow
def test_torchrun_launches_the_same_script_to_the_same_hash(job: Job, alone: dict[str, Any]) -> None:
    path = job.directory / "result.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, DIGITS, *SHORT, "--result", str(path)], capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()
    assert _result(path)["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.slow
def test_a_changed_batch_is_refused_on_resuming(job: Job) -> None:
    options = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "5", "--epochs", "1"]
    first, _ = _train(job, 1, *options, name="first")
    assert first.wait(100) == 0, first.output
    second, _ = _train(job, 1, *options, "--global-batch", "32", name="second")
    assert second.wait(100) != 0
    assert "was made with global batch 64, this training has 32" in second.output
