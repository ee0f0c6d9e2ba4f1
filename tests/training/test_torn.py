"""A script that changes its parameters while they are being copied."""

from __future__ import annotations

import re

import pytest
from harness import SCRIPTS, Job, run_script

from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "guards" / "decay.py")


@pytest.mark.slow
def test_a_decay_by_hand_tears_no_snapshot(job: Job) -> None:
    alone = re.search(r"weights (\w+)", run_script(SCRIPT))
    assert alone is not None
    plan = FaultPlan.fail_at(1, 9)
    agent = job.launch("--standalone", "--nproc", "2", command=[SCRIPT], env=plan.environment())
    assert agent.wait(100) == 0, agent.output
    found = re.search(r"weights (\w+) resumed (\d+)", agent.output)
    assert found is not None, agent.output
    assert found[1] == alone[1]
    assert int(found[2]) > 0
    assert "The script changed model/weight while it was being copied. That snapshot is given up." in agent.output
