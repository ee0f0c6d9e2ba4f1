"""Checkpoints that cannot be written or trusted, in real runs: training goes on, or says why not."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, run_script, wait_for

from elastic_launch import snapshot
from elastic_launch.snapshot.format.files import FileSum
from elastic_launch.snapshot.format.manifest import MANIFEST, STATE, TENSORS, Manifest

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")
SHORT = ["--epochs", "1", "--exact"]  # 23 steps


def _result(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _launch(job: Job, nproc: int, checkpoints: Path | str, *options: str) -> tuple[Agent, Path]:
    """A launch without restarts: what fails is seen once."""
    result = job.directory / "result.json"
    command = [DIGITS, *SHORT, "--checkpoint", str(checkpoints), "--result", str(result), *options]
    return job.launch("--standalone", "--nproc", str(nproc), "--max-restarts", "0", command=command), result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkpoints of the steps 10, 20 and 23 of an undisturbed process, and the hash of its weights."""
    directory = tmp_path_factory.mktemp("trained")
    options = ["--checkpoint", str(directory / "checkpoints"), "--every", "10", "--result", str(directory / "result")]
    # Slow enough for each to be written: of two that wait, the newer one is.
    run_script(DIGITS, *SHORT, *options, "--step-time", "0.3")
    assert [info.step for info in snapshot.find(directory / "checkpoints")] == [23, 20, 10]
    return directory / "checkpoints", str(_result(directory / "result")["weights_sha256"])


@pytest.fixture
def checkpoints(trained: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of them, to be spoilt."""
    return shutil.copytree(trained[0], tmp_path / "checkpoints")


@pytest.mark.slow
def test_checkpoints_that_fail_at_first_and_work_later_are_a_success(job: Job) -> None:
    """The worker may write only 100 or 200 KiB per file (shells differ), until it has reported an error."""
    directory, result = job.directory / "checkpoints", job.directory / "result.json"
    options = ["--checkpoint", str(directory), "--every", "5", "--step-time", "0.2", "--result", str(result)]
    limited = ["sh", "-c", 'ulimit -S -f 200 && exec "$@"', "sh", sys.executable, DIGITS, *SHORT, *options]
    agent = job.launch("--standalone", "--max-restarts", "0", command=["--no-python", *limited])
    agent.says(f"checkpoint of step 5: Could not write a checkpoint in {directory}: File too large", 60)
    assert not snapshot.find(directory)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.prlimit(job.event("worker_started")["pid"], resource.RLIMIT_FSIZE, (hard, hard))
    assert agent.wait(100) == 0, agent.output
    assert _result(result)["restarts"] == 0
    assert snapshot.find(directory)[0].step == 23
    assert not list(directory.glob(".*")), "what could not be written was removed"


@pytest.mark.slow
def test_a_truncated_newest_checkpoint_is_skipped_for_the_one_before(
    job: Job, checkpoints: Path, trained: tuple[Path, str]
) -> None:
    newest = snapshot.find(checkpoints)[0].path
    os.truncate(newest / TENSORS, 1000)
    agent, path = _launch(job, 2, checkpoints)
    assert agent.wait(100) == 0, agent.output
    assert f"a checkpoint is skipped: The checkpoint {newest} is" in agent.output
    result = _result(path)
    assert result["resumed_step"] == 20
    assert result["weights_sha256"] == trained[1]


class Trap:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def _forge(checkpoint: Path, name: str, data: bytes) -> None:
    """Put something else in a file's place, with the right checksums, as an attacker would."""
    (checkpoint / name).write_bytes(data)
    manifest, _ = Manifest.parse((checkpoint / MANIFEST).read_bytes())
    forged = FileSum(len(data), hashlib.sha256(data).hexdigest())
    changed = replace(manifest, tensors={TENSORS: forged}) if name == TENSORS else replace(manifest, state=forged)
    (checkpoint / MANIFEST).write_bytes(changed.dumps()[0])


@pytest.mark.slow
def test_a_pickle_in_a_checkpoints_place_is_skipped_and_never_unpickled(
    job: Job, checkpoints: Path, trained: tuple[Path, str]
) -> None:
    trace = job.directory / "trace"
    infos = snapshot.find(checkpoints)
    for info, name in zip(infos, (TENSORS, STATE), strict=False):
        _forge(info.path, name, pickle.dumps(Trap(trace)))
    agent, path = _launch(job, 1, checkpoints)
    assert agent.wait(100) == 0, agent.output
    for info in infos[:2]:
        assert f"a checkpoint is skipped: The checkpoint {info.path} is" in agent.output
    result = _result(path)
    assert result["resumed_step"] == 10
    assert result["weights_sha256"] == trained[1]
    assert not trace.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", "1", "with seed 0, this training has 1"),
        ("--micro-batch", "4", "with micro-batch 8, this training has 4"),
    ],
)
def test_another_training_is_refused_by_the_name_of_what_differs(
    job: Job, checkpoints: Path, option: str, value: str, message: str
) -> None:
    before = {info.digest for info in snapshot.find(checkpoints)}
    agent, _ = _launch(job, 1, checkpoints, option, value)
    assert agent.wait(100) != 0
    assert re.search(rf"The checkpoint of step 23 in \S+ was made {message}", agent.output), agent.output
    assert "Traceback" not in agent.output
    assert {info.digest for info in snapshot.find(checkpoints)} == before


@pytest.mark.slow
def test_each_node_may_have_a_directory_of_its_own(job: Job, trained: tuple[Path, str]) -> None:
    """The same relative path means a different place on each node; nodes with a checkpoint give it to those without."""
    result = job.directory / "result.json"
    options = ["--checkpoint", "ckpt", "--every", "5", "--step-time", "1", "--result", str(result)]
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry")]
    agents = []
    for name in ("a", "b"):
        (job.directory / name).mkdir()
        command = [*paced, DIGITS, *SHORT, *options]
        agents.append(job.node(name, nnodes="2:2", command=command, cwd=job.directory / name))
    wait_for("a checkpoint", lambda: list(job.directory.glob("[ab]/ckpt/step-*")), 60)
    pids = {event["rank"]: event["pid"] for event in job.events("worker_started")}
    os.kill(pids[1], signal.SIGKILL)
    (job.directory / "hurry").touch()
    for agent in agents:
        assert agent.wait(100) == 0, agent.output
    told = _result(result)
    assert told["weights_sha256"] == trained[1]
    assert told["worlds"] == [2, 2]
    assert told["restarts"] == 1
    assert 5 <= told["resumed_step"] < 23
