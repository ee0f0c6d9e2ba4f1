"""A script that changes its parameters while they are being copied."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from harness import SCRIPTS, Job

from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "guards" / "decay.py")


@pytest.mark.slow
def test_a_decay_by_hand_tears_no_snapshot(job: Job) -> None:
    alone = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=250)
    assert alone.returncode == 0, alone.stderr
    plan = FaultPlan.fail_at(1, 9)
    agent = job.launch("--standalone", "--nproc", "2", command=[SCRIPT], env=plan.environment())
    assert agent.wait(100) == 0, agent.output
    found = re.search(r"weights (\w+) resumed (\d+)", agent.output)
    assert found is not None, agent.output
    assert found[1] == alone.stdout.split()[1]
    assert int(found[2]) > 0
    assert "The script changed model/weight while it was being copied. That snapshot is given up." in agent.output
