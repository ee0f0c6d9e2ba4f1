"""The examples, run as the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Job

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_torchrun_script_trains_unmodified(job: Job, tmp_path: Path) -> None:
    script = EXAMPLES / "torchrun_style" / "train.py"
    assert not re.search(r"^\s*(import|from)\s+elastic", script.read_text(), re.MULTILINE)
    agent = job.launch("--standalone", "--nproc", "2", command=[str(script), "--dir", str(tmp_path / "snapshots")])
    assert agent.wait(90) == 0
    done = re.search(r"^done: steps (\d+) accuracy ([\d.]+) world 2 restarts 0$", agent.output, re.MULTILINE)
    assert done, agent.output
    assert float(done[2]) >= 0.95


@pytest.mark.timeout(180)
def test_the_demo_kills_a_worker_and_shows_that_it_resumed() -> None:
    demo = subprocess.run([sys.executable, str(EXAMPLES / "demo.py")], capture_output=True, text=True, timeout=170)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert re.search(r"resumed at step [1-9]\d* \(restart 1\)", demo.stdout)
