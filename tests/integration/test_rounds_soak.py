"""Hundreds of rounds in one run leave nothing behind in the processes that live through them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import Changes, undisturbed_hash
from harness import Job, tree, wait_for

ROUNDS, WARM = 200, 20
JOINS, SETTLED, LONG = 50, 10, 6000


def held(pid: int) -> dict[str, float]:
    """What a process holds: descriptors, threads, processes, and MiB of memory."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return {
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
        "processes": len(tree(pid)),
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_200_rounds_of_one_training_leave_a_survivor_as_it_was(job: Job) -> None:
    changes = Changes(job, "--steps", "100000", step_time=0.02, live=True)
    agent = changes.alone("--nproc", "2", "--max-restarts", str(2 * ROUNDS))
    changes.trains(2, steps=3)
    (survivor,) = [event["pid"] for event in job.events("worker_started") if event["rank"] == 0]
    found: list[dict[str, float]] = []
    for number in range(1, ROUNDS + 1):
        killed = wait_for(
            "the other", lambda n=number: [e["pid"] for e in job.events("worker_started") if e["round"] == n]
        )
        os.kill(killed[-1], signal.SIGKILL)
        # From its events, as the notes of all steps become long.
        wait_for("the next round's steps", lambda n=number: [e for e in job.events("first_step") if e["round"] > n], 60)
        if number >= WARM:
            found.append(held(survivor))
    agent.signal(signal.SIGTERM)
    assert agent.wait(100) == 143, agent.output[-3000:]
    kept = [event["pid"] for event in job.events("worker_kept")]
    assert kept == [survivor] * ROUNDS
    _assert_as_before("survivor", found, lost=8)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_50_nodes_that_come_and_go_leave_the_one_that_stays_as_it_was(job: Job, tmp_path: Path) -> None:
    """The weights are those of an undisturbed run, and no step is done again."""
    changes = Changes(job, "--steps", str(LONG), live=True)
    flags = ("--nnodes", "1:2", "--rdzv-conf", "join_settle=0.2,resize_delay=0.2")
    first = changes.node("a", *flags)
    changes.trains(1, steps=3)
    (survivor,) = [event["pid"] for event in job.events("worker_started")]
    found: dict[str, list[dict[str, float]]] = {"worker": [], "agent": []}

    def trains(nodes: int, after: int) -> int:
        """Wait until so many nodes train in a later round; return its number. From events, as notes become long."""

        def probe() -> list[int]:
            formed = [e["round"] for e in job.events("round_formed") if len(e["nodes"]) == nodes and e["round"] > after]
            return [event["round"] for event in job.events("first_step") if event["round"] in formed]

        return int(wait_for(f"{nodes} nodes after round {after}", probe, 100)[-1])

    number = 1
    for done in range(1, JOINS + 1):
        guest = changes.node("b", *flags)
        number = trains(2, number)
        guest.signal(signal.SIGTERM)
        assert guest.wait(100) == 143, guest.output[-3000:]
        number = trains(1, number)
        if done >= SETTLED:
            found["worker"].append(held(survivor))
            found["agent"].append(held(first.process.pid))
    result = changes.finish(first)
    steps = [step["step"] for step in changes.steps()]
    assert steps == [*range(1, LONG + 1)]
    assert result["hash"] == undisturbed_hash(tmp_path, LONG)
    assert {event["pid"] for event in job.events("worker_kept") if event["rank"] == 0} == {survivor}
    for name, each in found.items():
        _assert_as_before(f"{name} that stays", each)


@pytest.mark.soak
@pytest.mark.parametrize(
    "warm",
    [
        pytest.param(True, id="forked workers", marks=pytest.mark.timeout(3600)),
        # Each restart imports torch in both workers: half a minute where other work has the processors, too.
        pytest.param(False, id="executed workers", marks=pytest.mark.timeout(3 * 3600)),
    ],
)
def test_200_restarts_leave_the_agents_as_they_were(job: Job, warm: bool) -> None:
    """Workers of either node are killed in turn; each restart moves snapshots, and some save them."""
    options = ["--steps", "100000", "--checkpoint", str(job.directory / "checkpoints"), "--every", "20"]
    changes = Changes(job, *options, step_time=0.02)
    flags = ["--max-restarts", str(2 * ROUNDS), *([] if warm else ["--no-warm"])]
    agents = [changes.node(name, *flags) for name in "ab"]
    found: dict[str, list[dict[str, float]]] = {agent.name: [] for agent in agents}

    def training(number: int) -> list[dict[str, Any]]:
        """The round's workers, once both nodes train in it; from events, as the notes of all steps become long."""
        begun = [event for event in job.events("first_step") if event["round"] == number]
        workers = [event for event in job.events("worker_started") if event["round"] == number]
        return workers if begun and len(workers) == len(agents) else []

    number = changes.trains(2)
    for done in range(1, ROUNDS + 1):
        workers = wait_for(f"round {number}", lambda n=number: training(n), 100)
        if done >= WARM:
            for agent in agents:
                found[agent.name].append(held(agent.process.pid))
        os.kill(workers[done % 2]["pid"], signal.SIGKILL)
        number += 1
    wait_for("the last round", lambda: training(number), 100)
    agents[0].signal(signal.SIGTERM)
    agents[1].signal(signal.SIGTERM)
    for agent in agents:
        assert agent.wait(100) == 143, agent.output[-3000:]
    assert [event["restarts"] for event in job.events("restart_charged")] == list(range(1, ROUNDS + 1))
    for name, each in found.items():
        _assert_as_before(f"agent {name}", each)


def _assert_as_before(what: str, found: list[dict[str, float]], *, lost: int = 0) -> None:
    """A process holds no more than at first, but for what stays of ``lost`` rounds, about one in a hundred kills.

    gloo does not end a thread that it does not wake: each of a round's two groups keeps three threads, with a listening
    socket, a pipe and an epoll descriptor, and both keep the connection to their store.
    """
    first, last = found[0], found[-1]
    print(f"{what}: at first {first}, {len(found) - 1} changes later {last}")
    assert last["descriptors"] <= max(x["descriptors"] for x in found[:20]) + 1 + 10 * lost, (first, last)
    assert last["threads"] <= max(x["threads"] for x in found[:20]) + 6 * lost, (first, last)
    assert last["processes"] <= max(x["processes"] for x in found[:20]), (first, last)
    assert last["memory"] <= 1.05 * first["memory"], (first, last)
