"""Bits that flip without an error: verified steps find them, and the result is that of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest
from changes import Changes, pids, undisturbed_hash
from harness import Job

from elastic_launch.faults import FaultPlan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"))


def flip(rank: int, step: int, of: str = "gradient", **how: Any) -> FaultPlan:
    return FaultPlan.fail_at(rank, step, do="flip", of=of, **how)


def trained(job: Job, world: int, plan: FaultPlan, verify: str) -> tuple[Changes, dict[str, Any]]:
    changes = Changes(job, "--verify", verify, live=True, step_time=0.05)
    agent = changes.alone("--nproc", str(world), plan=plan)
    return changes, changes.finish(agent)


def test_a_flip_in_a_verified_step_costs_no_step(job: Job, undisturbed: str) -> None:
    """With four ranks each has one micro-batch, so all are verified."""
    changes, result = trained(job, 4, flip(2, 20), "100%")
    (found,) = job.events("corruption_found")
    assert (found["step"], found["ranks"], found["suspect"]) == (21, [2], 0)
    assert changes.done_again() == 0
    before, after = pids(job, 1), pids(job, 2)
    assert {before[rank] for rank in (0, 1, 3)} <= {*after.values()}
    assert before[2] not in after.values()
    assert result["hash"] == undisturbed


def test_what_a_rank_has_spoiled_since_the_last_agreement_is_undone(job: Job, undisturbed: str) -> None:
    changes, result = trained(job, 3, flip(1, 18, every=True), "20%")
    (found,) = job.events("corruption_found")
    # Of the steps with the seed 1 these are verified: 10, 16, 27, 46, ...
    assert (found["step"], found["ranks"], found["suspect"]) == (27, [1], 10)
    assert changes.resumed(2) <= 16
    assert changes.done_again() >= 10
    assert result["hash"] == undisturbed


def test_of_two_ranks_the_one_is_named_that_does_not_repeat_its_result(job: Job, undisturbed: str) -> None:
    """In step 21 with the seed 1, the first of a rank's two micro-batches is verified."""
    changes, result = trained(job, 2, flip(0, 20), "100%")
    (found,) = job.events("corruption_found")
    assert (found["step"], found["ranks"], found["suspect"]) == (21, [0], 0)
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed
