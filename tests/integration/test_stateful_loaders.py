"""Loaders with a state, in real trainings in exact mode: through kills and resizes each sample once, and one hash."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from changes import STEPS, Changes, Samples, pids, samples, undisturbed_hash
from harness import Job, run_script

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "stateful" / "train.py")

SAMPLES, STEPS_PER_PASS = 96, 6


def each_once_in_a_pass(found: Samples) -> bool:
    passes = [Counter[int]() for _ in range(STEPS // STEPS_PER_PASS)]
    for (step, _), numbers in found.items():
        if step <= len(passes) * STEPS_PER_PASS:
            passes[(step - 1) // STEPS_PER_PASS].update(numbers)
    return all(counts == Counter(range(SAMPLES)) for counts in passes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Samples]:
    """The hash and the samples of one process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    digest = undisturbed_hash(directory, STEPS, "--stateful", "shards")
    found = samples(directory)
    assert each_once_in_a_pass(found)
    return digest, found


def test_a_killed_worker_costs_no_step_and_no_sample(job: Job, undisturbed: tuple[str, Samples]) -> None:
    changes = Changes(job, "--stateful", "shards", live=True)
    agent = changes.alone("--nproc", "2")
    changes.trains(2, steps=10)
    os.kill(pids(job, 1)[1], signal.SIGKILL)  # rank 0 notes the steps
    changes.trains(2, after=1, steps=2)
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert pids(job, 1)[0] in pids(job, 2).values()
    assert (result["hash"], samples(job.work)) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False], ids=["live", "restarted"])
def test_kills_a_join_and_a_leave_keep_the_place_of_each_shard(
    job: Job, undisturbed: tuple[str, Samples], live: bool
) -> None:
    # Without snapshots for a while, a place is found by giving up micro-batches.
    due = ["--due-until", "4"] if live else []
    changes = Changes(job, "--stateful", "shards", *due, live=live, step_time=0.2)
    a = changes.node("a")
    a.says("hosts the run")
    b = changes.node("b")
    number = changes.trains(2, steps=6)
    os.kill(pids(job, number)[1], signal.SIGKILL)
    number = changes.trains(2, after=number, steps=3)
    changes.node("c")
    number = changes.trains(3, after=number, steps=3)
    os.kill(pids(job, number)[2], signal.SIGKILL)
    number = changes.trains(3, after=number, steps=3)
    b.signal(signal.SIGTERM)
    number = changes.trains(2, after=number, steps=3)
    result = changes.finish(a)
    assert not live or changes.done_again() == 0
    assert (result["hash"], samples(job.work)) == undisturbed


@pytest.mark.slow
def test_with_a_sharded_model_a_kill_takes_the_places_back_with_the_state(
    job: Job, undisturbed: tuple[str, Samples]
) -> None:
    changes = Changes(job, "--stateful", "shards", "--shard", live=True)
    agent = changes.alone("--nproc", "3")
    changes.trains(3, steps=10)
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    changes.trains(3, after=1, steps=2)
    result = changes.finish(agent)
    assert (result["hash"], samples(job.work)) == undisturbed


@pytest.mark.slow
def test_a_restart_from_a_checkpoint_at_other_worlds_continues_at_the_sample(
    job: Job, undisturbed: tuple[str, Samples]
) -> None:
    changes = Changes(job, "--stateful", "shards", "--checkpoint", str(job.directory / "checkpoints"), live=True)
    for world in (2, 5, 3):  # of five, one has no micro-batch
        agent = changes.alone("--nproc", str(world), name=f"of-{world}")
        changes.trains(world, steps=4)
        agent.signal(signal.SIGTERM)
        assert agent.wait(100) == 143, agent.output
    result = changes.finish(changes.alone())
    assert changes.done_again() == 0
    assert (result["hash"], samples(job.work)) == undisturbed


@pytest.mark.slow
def test_the_loader_of_a_rank_keeps_its_place_through_kills(job: Job, tmp_path: Path) -> None:
    changes = Changes(job, "--stateful", "hold", live=True)
    agent = changes.alone("--nproc", "2")
    number = 0
    for rank in (1, 0):
        number = changes.trains(2, after=number, steps=10)
        os.kill(pids(job, number)[rank], signal.SIGKILL)
    changes.trains(2, after=number, steps=2)
    changes.finish(agent)
    assert "hold at world size 2 only: at another one the run ends" in agent.output
    assert each_once_in_a_pass(samples(job.work))


@pytest.mark.slow
@pytest.mark.parametrize("on_resize", ["hold", "repeat"])
def test_at_another_world_size_the_loader_of_a_rank_holds_or_repeats(job: Job, on_resize: str) -> None:
    saving = ["--checkpoint", str(job.directory / "checkpoints")]
    changes = Changes(job, "--stateful", on_resize, *saving, live=True)
    agent = changes.alone("--nproc", "2", name="of-2")
    changes.trains(2, steps=8)
    agent.signal(signal.SIGTERM)
    assert agent.wait(100) == 143, agent.output
    done = changes.last(1)
    agent = changes.alone(name="of-1")
    if repeated := done % STEPS_PER_PASS * 16:
        changes.hurry()
    if repeated and on_resize == "hold":
        assert agent.wait(100) == 93, agent.output
        assert "the loader's places are those of 2 ranks, and here are 1" in agent.output
        agent = changes.alone("--nproc", "2", name="again-2")
    changes.finish(agent)
    read = Counter(number for numbers in samples(job.work).values() for number in numbers)
    if not repeated or on_resize == "hold":
        assert each_once_in_a_pass(samples(job.work))
        return
    assert f"each begins its pass {done // STEPS_PER_PASS} anew, and {repeated} samples are repeated" in agent.output
    assert sum(read.values()) == STEPS * 16
    first = Counter(
        number
        for (step, _), numbers in samples(job.work).items()
        if done < step <= done + STEPS_PER_PASS
        for number in numbers
    )
    assert first == Counter(range(SAMPLES)), "the pass that began anew has each sample"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed: pip install '.[frameworks]'")
def test_the_example_sees_each_window_as_often_through_a_kill_a_join_and_another_world(job: Job) -> None:
    options = ["--exact", "--steps", "120", "--loader-workers", "1", "--result"]
    alone, disturbed = job.directory / "alone.json", job.directory / "disturbed.json"
    run_script(EXAMPLE, *options, str(alone))
    command = [EXAMPLE, *options, str(disturbed), "--checkpoint", str(job.directory / "saved"), "--step-time", "0.3"]
    kill = {"ELASTIC_LAUNCH_FAULTS": json.dumps([{"rank": 1, "step": 10, "round": 1}])}
    a = job.node("a", nproc=2, command=command, env=kill)
    a.says("ended with signal 9 (SIGKILL)", 100)
    a.says("world size 2\n", 100)
    b = job.node("b", command=command)
    a.says("world size 3\n", 150)  # of a step
    b.signal(signal.SIGTERM)
    a.signal(signal.SIGTERM)
    assert (a.wait(100), b.wait(100)) == (143, 143), a.output
    agent = job.launch("--standalone", "--nproc", "4", command=command)
    assert agent.wait(150) == 0, agent.output
    undisturbed, result = json.loads(alone.read_text()), json.loads(disturbed.read_text())
    assert {2, 3, 4} <= {*result["worlds"]}
    for same in ("windows_by_times_seen", "weights_sha256"):
        assert result[same] == undisturbed[same]
