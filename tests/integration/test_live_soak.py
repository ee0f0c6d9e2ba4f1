"""Hundreds of rounds in one training leave nothing behind in the processes that live through them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from changes import Changes
from harness import Job, tree, wait_for

ROUNDS, WARM = 200, 20


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
    first, last = found[0], found[-1]
    print(f"after {WARM} rounds {first}, after {ROUNDS} {last}")
    assert last["descriptors"] <= max(x["descriptors"] for x in found[:20]) + 1, (first, last)
    assert last["threads"] <= max(x["threads"] for x in found[:20]), (first, last)
    assert last["processes"] == first["processes"], (first, last)
    assert last["memory"] <= 1.05 * first["memory"], (first, last)
