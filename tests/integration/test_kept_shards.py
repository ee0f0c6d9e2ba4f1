"""Real trainings of a model that ``fully_shard`` has sharded, whose processes stay when the world changes: one hash."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from changes import Changes, pids, undisturbed_hash
from harness import Job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"))


def training(job: Job, *options: str, **how: Any) -> Changes:
    return Changes(job, "--shard", *options, live=True, **how)


def repeated(changes: Changes) -> int:
    """How many steps were done again, each of which must have known it."""
    again = changes.done_again()
    assert sum(step["again"] for step in changes.steps()) == again
    return again


@pytest.mark.executed
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_keep_their_processes_and_repeat_what_followed_the_last_snapshot(
    job: Job, undisturbed: str, killed: int
) -> None:
    changes = training(job)
    agent = changes.alone("--nproc", "3")
    changes.trains(3, steps=10)
    first = pids(job, 1)
    os.kill(first[killed], signal.SIGKILL)
    changes.trains(3, after=1)
    result = changes.finish(agent)
    last = len(job.events("round_formed"))
    assert {*pids(job, last).values()} >= {*first.values()} - {first[killed]}
    lost = changes.assert_no_more_lost_than_an_interval(1)
    assert repeated(changes) == lost
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_planned_changes_cost_no_step_and_a_lost_node_those_since_the_last_snapshot(job: Job, undisturbed: str) -> None:
    changes = training(job, step_time=0.2)  # it lasts until all have come
    a = changes.node("a")
    changes.trains(1, steps=3)
    b = changes.node("b")
    joined = changes.trains(2, steps=3)
    b.signal(signal.SIGTERM)
    left = changes.trains(1, after=joined, steps=3)
    assert b.wait() == 143
    done = [step["step"] for step in changes.steps()]
    assert len(done) == len(set(done))
    c = changes.node("c", nproc=2)
    again = changes.trains(3, after=left, steps=3)
    c.kill()
    changes.trains(1, after=again, steps=3)
    result = changes.finish(a)
    assert changes.kinds()[:2] == [("drained", 1, "membership"), ("drained", joined, "preemption")]
    assert changes.kinds()[3] == ("broken", again, "node loss")
    repeated(changes)
    events = [e for e in job.events() if e["event"] == "worker_kept"]
    assert {e["pid"] for e in events if e["round"] > again} == {pids(job, 1)[0]}
    assert result["hash"] == undisturbed
