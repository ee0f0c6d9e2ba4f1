"""Kills in the middle of a snapshot, a drain, a restoring and a copy: the weights are those of the undisturbed run."""

from __future__ import annotations

import pytest
from changes import Changes
from harness import Job

from elastic_launch.faults import FaultPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_worker_may_be_killed_in_a_step_then_in_a_snapshot_then_while_it_restores(job: Job, undisturbed: str) -> None:
    """The snapshot that the first one leaves is whole, but the agent was not told: the second one must not hit it."""
    plan = FaultPlan.fail_at(0, at="snapshot", round=2) + FaultPlan.fail_at(0, at="restore", round=3)
    changes = Changes(job, "--die-within", "1:20:0")
    agent = changes.alone(plan=plan)
    changes.trains(1, after=3)
    result = changes.finish(agent)
    assert agent.output.count("planned fault: rank 0 kills itself in the snapshot of step ") == 1
    assert agent.output.count("planned fault: rank 0 kills itself as step ") == 1
    assert changes.kinds() == [("broken", number, "crash") for number in (1, 2, 3)]
    lost = changes.assert_no_more_lost_than_an_interval(1)
    assert changes.last(1) == 19
    assert changes.resumed(4) >= changes.resumed(2)
    lost += changes.last(2) - changes.resumed(4)
    print(changes.job.noted("resumed.jsonl"), changes.kinds(), changes.done_again(), lost, changes.ledger())
    assert changes.done_again() == lost
    assert result["restarts"] == 3
    assert result["hash"] == undisturbed
