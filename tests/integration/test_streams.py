"""Data in shards, in real trainings in exact mode: through kills and resizes each sample once, and one hash."""

from __future__ import annotations

import os
import signal
from collections import defaultdict

import pytest
from changes import STEPS, Changes, Samples, samples, undisturbed_hash
from harness import Agent, Job, wait_for

SAMPLES, STEPS_PER_EPOCH = 96, 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Samples]:
    """The hash and the samples of one process; its shards seek, and those of the others can partly only be iterated."""
    directory = tmp_path_factory.mktemp("undisturbed")
    digest = undisturbed_hash(directory, STEPS, "--stream", "seek")
    found, of_epochs = samples(directory), defaultdict(list)
    for (step, _), numbers in found.items():
        of_epochs[(step - 1) // STEPS_PER_EPOCH] += numbers
    for epoch in range(STEPS // STEPS_PER_EPOCH):
        assert sorted(of_epochs[epoch]) == list(range(SAMPLES))
    return digest, found


def running(job: Job, number: int, rank: int) -> int:
    """The process of a rank of a round."""
    events = [e for e in job.events() if e["event"] in ("worker_started", "worker_kept") and e["round"] == number]
    (pid,) = [event["pid"] for event in events if event["rank"] == rank]
    return int(pid)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("live", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["live", "restarted"])
def test_three_kills_and_two_three_and_one_worker_use_the_undisturbed_samples(
    job: Job, undisturbed: tuple[str, Samples], workers: int, live: bool
) -> None:
    options = ["--loader-workers", str(workers), *(["--persistent"] if workers else [])]
    changes = Changes(job, "--stream", "skip", *options, live=live, step_time=0.2)  # enough is left for a resize to pay
    a = changes.node("a")
    a.says("hosts the run")
    b = changes.node("b")
    number = changes.trains(2, steps=3)
    os.kill(running(job, number, 1), signal.SIGKILL)
    number = changes.trains(2, after=number, steps=3)
    c = changes.node("c")
    number = changes.trains(3, after=number, steps=3)
    os.kill(running(job, number, 2), signal.SIGKILL)
    number = changes.trains(3, after=number, steps=3)
    for node in (b, c):
        node.signal(signal.SIGTERM)
    number = changes.trains(1, after=number, steps=3)
    os.kill(running(job, number, 0), signal.SIGKILL)
    changes.trains(1, after=number, steps=2)
    result = changes.finish(a)
    assert result["restarts"] == 3
    assert samples(job.work) == undisturbed[1]
    assert result["hash"] == undisturbed[0]


@pytest.mark.slow
def test_a_restart_from_a_checkpoint_at_other_worlds_continues_at_the_sample(
    job: Job, undisturbed: tuple[str, Samples]
) -> None:
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "100000"]
    changes = Changes(job, "--stream", "skip", *saving, live=True)
    for world in (2, 3):
        agent = changes.alone("--nproc", str(world), name=f"of-{world}")
        changes.trains(world, steps=4)
        agent.signal(signal.SIGTERM)
        assert agent.wait(100) == 143, agent.output
    result = changes.finish(changes.alone())
    assert changes.done_again() == 0
    assert samples(job.work) == undisturbed[1]
    assert result["hash"] == undisturbed[0]


@pytest.mark.slow
def test_a_killed_process_of_a_loader_costs_its_worker(job: Job, undisturbed: tuple[str, Samples]) -> None:
    changes = Changes(job, "--stream", "skip", "--loader-workers", "2", "--persistent", live=True)
    agent = changes.alone("--nproc", "2")
    number = changes.trains(2, steps=3)
    os.kill(changes.steps(number)[-1]["loaders"][0], signal.SIGKILL)
    changes.trains(2, after=number, steps=3)
    result = changes.finish(agent)
    assert "is killed by signal: Killed" in agent.output
    assert result["restarts"] == 1
    assert samples(job.work) == undisturbed[1]
    assert result["hash"] == undisturbed[0]


@pytest.mark.slow
def test_another_order_of_the_list_on_a_node_ends_the_run(job: Job) -> None:
    changes = Changes(job, "--stream", "seek", live=True)
    a = changes.node("a", nnodes="2")
    b = changes.node("reversed", nnodes="2")

    def said() -> Agent | None:
        return next((agent for agent in (a, b) if "has list of shards (as a hash)" in agent.output), None)

    wait_for("the difference", said, 60)
    assert a.wait(60) == 93, changes.outputs()
    assert b.wait(60) == 93, changes.outputs()
