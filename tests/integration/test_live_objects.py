"""What a process holds lives through rounds: compiled graphs, the loader's processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from changes import Changes
from harness import Job


def survived(job: Job, *options: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Kill rank 1 of two; return the steps that rank 0 noted in its first round and in the next, and the hash."""
    changes = Changes(job, *options, live=True)
    agent = changes.alone("--nproc", "2")
    changes.trains(2, steps=4)
    (killed,) = [e["pid"] for e in job.events("worker_started") if e["rank"] == 1]
    os.kill(killed, signal.SIGKILL)
    changes.trains(2, after=1, steps=4)
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert [event["rank"] for event in job.events("worker_kept")] == [0]
    return changes.steps(1), changes.steps(2), result["hash"]


@pytest.mark.slow  # tests/training/live/test_rehearsal.py has a compiled model that enters a round with its graphs
def test_a_compiled_model_keeps_its_graphs(job: Job, undisturbed: str) -> None:
    before, after, digest = survived(job, "--compile")
    assert before[-1]["graphs"]["unique_graphs"] >= 1
    assert {str(step["graphs"]) for step in after} == {str(before[-1]["graphs"])}
    assert digest == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["started for each epoch", "persistent"])
def test_the_loaders_processes_are_kept_if_they_are_persistent_and_none_is_left(
    job: Job, undisturbed: str, persistent: bool
) -> None:
    options = ["--loader-workers", "2", *(["--persistent"] if persistent else [])]
    before, after, digest = survived(job, *options)
    counts = {len(step["loaders"]) for step in [*before, *after]}
    assert max(counts) == 2
    if persistent:
        assert {str(step["loaders"]) for step in after} == {str(before[0]["loaders"])}
    else:
        assert not {*before[-1]["loaders"]} & {*after[0]["loaders"]}
    assert digest == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["scheduler", pytest.param("average", marks=pytest.mark.soak)])
def test_what_is_not_saved_ends_processes_with_their_round(job: Job, forgotten: str) -> None:
    """A process that joins would begin with another one than those that are kept."""
    changes = Changes(job, "--forget", forgotten, live=True)
    a = changes.node("a")
    changes.trains(1, steps=3)
    b = changes.node("b")
    number = changes.trains(2, steps=10)
    b.signal(signal.SIGTERM)
    changes.trains(1, after=number, steps=3)
    assert b.wait() == 143
    result = changes.finish(a)
    assert changes.kinds()[:2] == [("drained", 1, "membership"), ("drained", number, "preemption")]
    assert not job.events("worker_kept")
    assert result["restarts"] == 0
    assert changes.done_again() == 0
