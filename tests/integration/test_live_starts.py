"""Real trainings whose script takes long to start, in exact mode: the others train on meanwhile, and one hash."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from changes import STEPS, Changes, pids, undisturbed_hash
from harness import SCRIPTS, Agent, Job, alive, freeze, read_lines, wait_for

from elastic_launch.faults import FaultPlan

pytestmark = pytest.mark.slow

START = 2.5
LONG = 5.0
"""A start that lasts until the test has done something else."""

WAIT = ("--rdzv-conf", "start_wait=1,resize_delay=0.2")


def training(job: Job, start: float = START, step_time: float = 0.1) -> Changes:
    return Changes(job, "--start-time", str(start), live=True, step_time=step_time)


def started_ahead(job: Job, *former: int) -> int:
    """Wait for a worker that starts ahead, other than those given."""

    def probe() -> list[int]:
        return [e["pid"] for e in job.events("worker_started") if not e["round"] and e["pid"] not in former]

    return int(wait_for("a worker that starts ahead", probe, 60)[-1])


def test_the_others_train_on_while_a_killed_worker_is_replaced(job: Job, undisturbed: str) -> None:
    changes = training(job)
    agent = changes.alone("--nproc", "2", *WAIT)
    changes.trains(2, steps=10)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGKILL)
    changes.trains(1, after=1, steps=5)
    assert pids(job, 2) == {0: first[0]}
    changes.trains(2, after=2, steps=3)
    result = changes.finish(agent)
    assert changes.kinds() == [("broken", 1, "crash"), ("drained", 2, "membership")]
    assert changes.done_again() == 0
    assert pids(job, 3)[0] == first[0]
    assert pids(job, 3)[1] == job.event("worker_ahead")["pid"]
    assert (result["worlds"], result["restarts"]) == ([2, 1, 2], 1)
    assert result["hash"] == undisturbed


def test_the_first_rank_is_replaced_likewise(job: Job, undisturbed: str) -> None:
    """The node's snapshots are written by its other worker meanwhile, which does not wait for their copies at the end.

    Every second step is copied to durable storage, so that a copy is under way when the first rank is back.
    """
    saving = ("--checkpoint", str(job.directory / "checkpoints"), "--every", "2")
    changes = Changes(job, "--start-time", str(START), *saving, live=True)
    agent = changes.alone("--nproc", "2", *WAIT)
    changes.trains(2, steps=5)
    first = pids(job, 1)
    os.kill(first[0], signal.SIGKILL)
    changes.trains(1, after=1, steps=5)
    assert pids(job, 2) == {0: first[1]}
    changes.trains(2, after=2, steps=3)
    result = changes.finish(agent)
    assert pids(job, 3)[1] == first[1]
    done = [step["step"] for step in changes.steps()]
    assert len(done) == len(set(done)) >= STEPS - 1, "the killed one may not have noted its last step"
    assert result["hash"] == undisturbed


def test_a_node_joins_and_leaves_while_another_one_trains(job: Job, undisturbed: str) -> None:
    changes = training(job, step_time=0.3)  # it lasts until the worker ahead has come
    a = changes.node("a", *WAIT)
    changes.trains(1, steps=5)
    b = changes.node("b", *WAIT)
    started_ahead(job)
    done = changes.last(1)
    joined = changes.trains(2, steps=5)
    assert changes.last(1) > done + 5, "it has trained on"
    b.signal(signal.SIGTERM)
    changes.trains(1, after=joined, steps=3)
    assert b.wait() == 143
    result = changes.finish(a)
    assert changes.kinds()[:2] == [("drained", 1, "membership"), ("drained", 2, "preemption")]
    assert changes.done_again() == 0
    assert (result["worlds"], result["restarts"]) == ([1, 2, 1], 0)
    assert result["hash"] == undisturbed


@pytest.mark.parametrize(
    "when",
    ["as it gets the state", *(pytest.param(when, marks=pytest.mark.soak) for when in ("as it starts", "as it joins"))],
)
def test_a_worker_ahead_is_killed(job: Job, undisturbed: str, when: str) -> None:
    """The other process, which may be giving it the state, goes on."""
    changes = training(job, step_time=0.3)  # it lasts until the second worker ahead has come
    plan = FaultPlan.fail_at(1, at="restore", round=3) if when == "as it gets the state" else None
    agent = changes.alone("--nproc", "2", *WAIT, "--max-restarts", "9", plan=plan)
    changes.trains(2, steps=5)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGKILL)
    new = started_ahead(job)
    if when == "as it joins":
        wait_for("its place", lambda: job.events("worker_placed"), 60)
    if plan is None:
        os.kill(new, signal.SIGKILL)
    last = started_ahead(job, new)
    changes.trains(2, after=2, steps=3)
    number = max(event["round"] for event in job.events("round_formed"))
    assert pids(job, number) == {0: first[0], 1: last}
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


def test_a_node_that_leaves_ends_its_worker_ahead(job: Job, undisturbed: str) -> None:
    changes = training(job, LONG)
    a = changes.node("a", *WAIT)
    a.says("hosts the run")
    b = changes.node("b", *WAIT, nproc=2)
    number = changes.trains(3, steps=3)
    os.kill(pids(job, number)[2], signal.SIGKILL)
    changes.trains(2, after=number, steps=2)
    new = started_ahead(job)
    b.signal(signal.SIGTERM)
    changes.trains(1, after=number + 1, steps=2)
    assert b.wait() == 143
    assert not alive(new)
    result = changes.finish(a)
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


def test_a_run_that_ends_ends_its_worker_ahead(job: Job, undisturbed: str) -> None:
    """It is frozen, so that the run ends before it is ready, however busy the machine is."""
    changes = training(job)
    agent = changes.alone("--nproc", "2", *WAIT)
    changes.trains(2, steps=5)
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    new = started_ahead(job)
    freeze(new)
    result = changes.finish(agent)
    assert not alive(new)
    assert result["hash"] == undisturbed
    assert len(job.events("round_formed")) == 2


@pytest.mark.parametrize(
    ("wait", "form"),
    [*(pytest.param(x, [], marks=pytest.mark.soak) for x in (1, 600)), (1, ["--loop"])],
    ids=["ahead", "waiting", "loop"],
)
def test_a_model_is_compiled_while_the_others_train(job: Job, tmp_path: Path, wait: int, form: list[str]) -> None:
    """Its start is short, and its first step long; if a start may take so long, the others wait for both."""
    script = str(SCRIPTS / "rehearsing.py")
    changes = Changes(job, *form, live=True, script=script)
    agent = changes.alone("--nproc", "2", "--rdzv-conf", f"start_wait={wait},resize_delay=0.2")
    changes.trains(2, steps=10)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGKILL)
    if wait == 1:
        changes.trains(1, after=1, steps=3)
    last = changes.trains(2, after=1, steps=3)
    result = changes.finish(agent)
    assert last == (3 if wait == 1 else 2)
    new = pids(job, last)[1]
    compiled = read_lines(job.work / "compiled.jsonl")
    assert {x["pid"] for x in compiled} == {*first.values(), new}
    assert {x["ahead"] for x in compiled if x["pid"] == new} == {wait == 1}
    assert not any(x["ahead"] for x in compiled if x["pid"] != new)
    if form:
        assert [(x["pid"], x["ahead"], x["changed"]) for x in read_lines(job.work / "rehearsed.jsonl")] == [
            (new, True, [False, False])
        ]
    assert changes.done_again() == 0
    alone = tmp_path / "alone"
    alone.mkdir()
    assert result["hash"] == undisturbed_hash(alone, script=script)


def test_plain_scripts_start_with_their_rounds(job: Job) -> None:
    conf = ["--rdzv-conf", "start_wait=0"]
    agent: Agent = job.launch("--standalone", "--nproc", "2", *conf)
    first = wait_for("two workers", lambda: len(job.started()) == 2 and job.started(), 60)
    os.kill(first[0]["pid"], signal.SIGKILL)
    wait_for("two other workers", lambda: len(job.started()) == 4, 60)
    job.finish()
    assert agent.wait() == 0
    assert not [event for event in job.events("worker_started") if not event["round"]]
