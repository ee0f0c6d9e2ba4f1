"""Replicas of several workers (``--replica-size``): rounds have whole ones only. Real agents, real kills, one hash."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from changes import Changes, ctl, pids
from harness import Agent, Job, alive, round_of, wait_for

IDLE = "1 of 3 workers stays idle: a replica has 2 (--replica-size)"
SLOW = ("--rdzv-conf", "start_wait=0.5,resize_delay=0.2,dead_after=4,beat=0.5")


def node(job: Job, name: str, nproc: int = 3, size: int = 2, nnodes: str = "1:2", *flags: str) -> Agent:
    agent = job.node(name, "--replica-size", str(size), *flags, nnodes=nnodes, nproc=nproc)
    agent.says(f"node {name} joined" if name == "a" else "joins at")
    return agent


def replicas(world: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The replica of each worker of a plain script, its rank there, and its local rank, in rank order."""
    names = ("ELASTIC_LAUNCH_REPLICA", "ELASTIC_LAUNCH_REPLICA_RANK", "LOCAL_RANK")
    for env in (worker["env"] for worker in world):
        assert (env["ELASTIC_LAUNCH_REPLICA_SIZE"], int(env["ELASTIC_LAUNCH_REPLICAS"])) == ("2", len(world) // 2)
    return [tuple(int(worker["env"][name]) for name in names) for worker in world]


def test_a_plain_script_trains_in_whole_replicas(job: Job) -> None:
    a, b = node(job, "a"), node(job, "b")
    first = job.world(4)
    assert replicas(first) == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    assert IDLE in a.output
    assert IDLE in b.output
    shown = ctl("status", "--log-dir", str(job.logs)).stdout
    assert "world size 4 (2 replicas of 2) on 2 nodes" in shown, shown
    os.kill(first[3]["pid"], signal.SIGKILL)
    second = job.world(4, after=1)
    assert replicas(second) == replicas(first)
    host, other = (a, b) if "hosts the run" in a.output else (b, a)
    other.kill()
    third = job.world(2, after=round_of(second[0]))
    assert replicas(third) == [(0, 0, 0), (0, 1, 1)]
    again = node(job, other.name)
    assert replicas(job.world(4, after=round_of(third[0]))) == replicas(first)
    job.finish()
    assert (host.wait(), again.wait()) == (0, 0)
    assert {event["world_size"] for event in job.events("round_formed")} == {2, 4}


def test_a_spare_takes_the_place_of_a_lost_node(job: Job) -> None:
    nodes = {name: node(job, name, 2, 2, "3") for name in "abcd"}
    first = job.world(6)
    assert replicas(first) == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 1)]
    before = job.events("round_formed")[-1]["nodes"]
    assert before[0] == "a"
    nodes[before[1]].kill()
    second = job.world(6, after=round_of(first[0]))
    (spare,) = set("abcd") - set(before)
    assert job.events("round_formed")[-1]["nodes"] == [before[0], spare, before[2]]
    assert replicas(second) == replicas(first)
    job.finish()
    assert all(agent.wait() == 0 for name, agent in nodes.items() if name != before[1])


def test_a_node_without_room_for_a_replica_does_not_start(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "3", "--replica-size", "4")
    assert agent.wait() == 2
    assert (
        "--nproc 3 is less than the 4 workers of a replica (--replica-size), which must be on one node." in agent.output
    )
    assert "Give --nproc 4 or more on each node, or a lower --replica-size." in agent.output


def test_a_node_with_another_size_of_replicas_is_refused(job: Job) -> None:
    host = node(job, "a", 2, 2)
    job.world(2)
    other = job.node("b", "--replica-size", "1", nnodes="1:2", nproc=2)
    assert other.wait() == 95
    assert "run 'none' executes `--replica-size 2 " in other.output
    assert "Give the same script, module or program, --replica-size and --rdzv-backend on all nodes" in other.output
    job.finish()
    assert host.wait() == 0


# Live workers that take long to start, in exact mode.


def places(changes: Changes, number: int, workers: int) -> dict[int, dict[str, Any]]:
    """Wait until all workers of a round have noted their places; return these by rank. They are in whole replicas."""
    found = wait_for(
        f"{workers} places in round {number}",
        lambda: len(now := changes.job.noted("places.jsonl", number=number)) == workers and now,
    )
    assert found
    by_rank = {place["rank"]: place for place in found}
    for rank, place in by_rank.items():
        assert (place["replica"], place["replica_rank"], place["replicas"]) == (rank // 2, rank % 2, workers // 2)
    return by_rank


@pytest.mark.slow
def test_the_other_replicas_of_a_node_go_on_while_a_broken_one_starts_anew(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--start-time", "2.5", live=True)
    agent = changes.alone("--nproc", "5", "--replica-size", "2", *SLOW)
    changes.trains(4, steps=5)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGKILL)
    changes.trains(2, after=1, steps=3)
    kept = places(changes, 2, 2)
    assert {rank: place["pid"] for rank, place in kept.items()} == {0: first[2], 1: first[3]}
    wait_for("the other worker of the broken replica to end", lambda: not alive(first[0]))
    number = changes.trains(4, after=2, steps=3)
    whole = places(changes, number, 4)
    assert {whole[rank]["pid"] for rank in (2, 3)} == {first[2], first[3]}
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert (result["worlds"], result["restarts"]) == ([4, 2, 4], 1)
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_worker_whose_replica_is_broken_waits_if_it_is_the_only_one_of_its_node(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--start-time", "2.5", live=True)
    size = ("--replica-size", "2", *SLOW)
    a, b = (changes.node(name, *size, rank=rank, nnodes="1:2", nproc=3) for rank, name in enumerate("ab"))
    changes.trains(4, steps=5)
    number = job.noted("places.jsonl")[-1]["round"]
    first = places(changes, number, 4)
    os.kill(first[3]["pid"], signal.SIGKILL)
    number = changes.trains(2, after=number, steps=3)
    alone = places(changes, number, 2)
    assert [alone[rank]["pid"] for rank in (0, 1)] == [first[rank]["pid"] for rank in (0, 1)]
    assert alive(first[2]["pid"])
    number = changes.trains(4, after=number, steps=3)
    whole = places(changes, number, 4)
    assert [whole[rank]["pid"] for rank in range(3)] == [first[rank]["pid"] for rank in range(3)]
    b.kill()
    number = changes.trains(2, after=number, steps=3)
    left = places(changes, number, 2)
    assert [left[rank]["pid"] for rank in (0, 1)] == [first[rank]["pid"] for rank in (0, 1)]
    result = changes.finish(a)
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_the_only_replica_of_a_run_keeps_its_state_when_it_loses_a_worker(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--start-time", "2.5", live=True)
    agent = changes.alone("--nproc", "3", "--replica-size", "2", *SLOW)
    changes.trains(2, steps=5)
    first = pids(job, 1)
    os.kill(first[0], signal.SIGKILL)
    number = changes.trains(2, after=1, steps=3)
    assert places(changes, number, 2)[1]["pid"] == first[1]
    result = changes.finish(agent)
    assert {len(places(changes, each, 2)) for each in (1, number)} == {2}
    assert result["hash"] == undisturbed
