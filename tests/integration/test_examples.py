"""The examples, run as the README says."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from harness import Job, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = str(EXAMPLES / "digits" / "train.py")


@pytest.mark.slow
def test_the_torchrun_script_trains_unmodified(job: Job, tmp_path: Path) -> None:
    script = EXAMPLES / "torchrun_style" / "train.py"
    assert not re.search(r"^\s*(import|from)\s+elastic", script.read_text(), re.MULTILINE)
    agent = job.launch("--standalone", "--nproc", "2", command=[str(script), "--dir", str(tmp_path / "snapshots")])
    assert agent.wait(90) == 0
    done = re.search(r"^done: steps (\d+) accuracy ([\d.]+) world 2 restarts 0$", agent.output, re.MULTILINE)
    assert done, agent.output
    assert float(done[2]) >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_kills_a_worker_and_reaches_the_weights_of_an_undisturbed_run() -> None:
    demo = subprocess.run([sys.executable, str(EXAMPLES / "demo.py")], capture_output=True, text=True, timeout=340)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert re.search(r"killing rank 1, pid \d+, from outside with SIGKILL", demo.stdout)
    assert re.search(r"restarts 1, training went on after step [1-9]\d*$", demo.stdout, re.MULTILINE)
    assert "demo: rank 0 kept its process\n" in demo.stdout
    killed, undisturbed, other = re.findall(r"weights ([0-9a-f]{16}),", demo.stdout)
    assert killed == undisturbed != other


def test_the_demo_is_done_again_where_the_training_ends_before_the_kill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first of two stand-ins for a run ends without a checkpoint, the second is killed in time."""
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec
    assert spec.loader
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    processes = demo.Processes(tmp_path, SimpleQueue())
    slow = tmp_path / f"disturbed-{demo.STEP_TIMES[-1]}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:

        def start(command: list[str]) -> object:
            if str(slow) in " ".join(command):
                (slow / "checkpoints" / "step-10").mkdir(parents=True)
                told = [
                    {"event": "worker_started", "rank": 1, "pid": victim.pid},
                    {"event": "worker_kept", "rank": 0},
                    {"event": "training_begun", "step": 12},
                ]
                (slow / "events-a.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
                (slow / "result.json").write_text('{"steps": 69}')
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(processes, "start", start)
        monkeypatch.setattr(processes, "wait", lambda look: look())
        told = demo.disturbed_in_time(processes)
    assert told == {"steps": 69, "kept": {0}, "again": 12}
    assert victim.returncode == -signal.SIGKILL
    assert "too late: the run ended without a checkpoint" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_demo_fails_where_the_weights_differ(tmp_path: Path) -> None:
    """Three workers without exact mode: their sums are rounded in another order than in one process."""
    demo = (EXAMPLES / "demo.py").read_text()
    for exact, loose in (('"--exact", ', ""), ("WORKERS = 2", "WORKERS = 3"), ("__file__", repr(str(EXAMPLES / "x")))):
        assert demo.count(exact) == 1
        demo = demo.replace(exact, loose)
    (tmp_path / "demo.py").write_text(demo)
    done = subprocess.run([sys.executable, tmp_path / "demo.py"], capture_output=True, text=True, timeout=340)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "demo: FAILED: the weights are not those of the undisturbed run" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_digits_are_learned_at_the_default_options(job: Job, tmp_path: Path) -> None:
    result = tmp_path / "made" / "result.json"
    agent = job.launch("--standalone", "--nproc", "2", command=[DIGITS, "--result", str(result)])
    assert agent.wait(170) == 0, agent.output
    told = json.loads(result.read_text())
    assert told["accuracy"] >= 0.95
    assert 0 < told.pop("loss") < 0.3
    assert told.pop("weights_sha256")
    expected = {"steps": 138, "samples": 8622, "epochs": 6, "worlds": [2], "restarts": 0, "resumed_step": 0}
    assert told == {**expected, "accuracy": told["accuracy"]}


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--epochs", "0"], "argument --epochs: 0 is less than 1", marks=pytest.mark.soak),
        pytest.param(["--epochs", "some"], "argument --epochs: invalid positive value: 'some'", marks=pytest.mark.soak),
        pytest.param(
            ["--checkpoint", "x", "--every", "nonsense"],
            "every='nonsense' is not an interval.",
            marks=pytest.mark.soak,
        ),
        (["--micro-batch", "65"], "--micro-batch 65 is more than --global-batch 64"),
    ],
)
def test_a_bad_option_of_the_digits_costs_one_line(options: list[str], message: str) -> None:
    printed = run_script(DIGITS, *options, code=2)
    assert f"train.py: error: {message}" in printed.splitlines()
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_program_launches_its_own_function(tmp_path: Path) -> None:
    script = str(EXAMPLES / "from_python" / "train.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=270, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^rank [01]: loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 2
    assert all(float(loss) < 0.05 for loss in losses)
