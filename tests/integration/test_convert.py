"""The scripts of the pages that convert a script line by line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import Job, run_script

import elastic_launch as el
from elastic_launch.faults import FaultPlan

CONVERT = Path(__file__).parents[2] / "examples" / "convert"
NEEDED = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None, reason="pip install '.[frameworks]'"
)
ALL = pytest.mark.parametrize("name", ["ddp", "nanogpt", "torchtitan", pytest.param("transformers", marks=NEEDED)])


def arguments(name: str, directory: Path) -> list[str]:
    return {
        "ddp": ["2", "1", "--snapshot_path", str(directory / "snapshots")],
        "nanogpt": [str(directory / "out")],
        "torchtitan": ["--folder", str(directory / "saved"), "--steps", "24"],
        "transformers": ["--output_dir", str(directory)],
    }[name]


def weights(name: str, directory: Path) -> tuple[int, str]:
    """The last step that a converted script has saved, and a hash of its weights."""
    saved = {"ddp": "snapshots", "nanogpt": "out", "torchtitan": "saved", "transformers": "checkpoints"}
    checkpoints = directory / saved[name]
    steps = [int(path.name.split(".")[0].removeprefix("step-")) for path in checkpoints.glob("step-*")]
    digest = hashlib.sha256()
    for key, value in sorted(el.load_checkpoint(checkpoints, weights_only=True)["model"].items()):
        digest.update(key.encode() + value.numpy().tobytes())
    return max(steps), digest.hexdigest()


@pytest.mark.soak
@pytest.mark.timeout(600)
@ALL
def test_the_script_before_runs_under_torchrun_and_resumes(tmp_path: Path, name: str) -> None:
    """None of this project's code runs here."""
    flags = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = arguments(name, tmp_path)
    command = [sys.executable, *flags, str(CONVERT / name / "before.py"), *options]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    first = {"ddp": "Epoch 0 ", "nanogpt": "step 20:", "torchtitan": "step 10:", "transformers": "epoch 0:"}[name]
    assert first not in done.stdout, "it has resumed"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.soak)])
@ALL
def test_the_script_after_has_the_undisturbed_weights_through_kills(job: Job, name: str, kills: int) -> None:
    script = str(CONVERT / name / "after.py")
    alone, killed = job.directory / "alone", job.directory / "killed"
    # A sharded model needs a process group, also in one process.
    launcher = ["-m", "torch.distributed.run", "--standalone"] if name == "torchtitan" else []
    undisturbed = run_script(*launcher, script, *arguments(name, alone))
    plan = FaultPlan.fail_at(1, 7)
    if kills == 3:
        plan += FaultPlan.fail_at(0, 14, round=2) + FaultPlan.fail_at(1, 21, round=3)
    agent = job.launch(
        "--standalone", "--nproc", "2", command=[script, *arguments(name, killed)], env=plan.environment()
    )
    assert agent.wait(200) == 0, agent.output
    assert agent.output.count("ended with signal 9 (SIGKILL)") == kills, agent.output
    assert weights(name, killed) == weights(name, alone)
    last = [line for line in undisturbed.splitlines() if "epoch" in line.lower() or "step" in line][-1]
    assert last in agent.output
