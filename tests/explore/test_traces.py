"""What real agents do is replayed into the machines and the explorer's invariants; drifts between both are found."""

from __future__ import annotations

import os
import signal

import pytest
from harness import SCRIPTS, Job, free_port, wait_for
from harness import read_lines as lines_of

from explore.recorder import TRACES
from explore.traces import replay

LIVE = str(SCRIPTS / "live.py")

TIMING = ["--rdzv-conf", "dead_after=3,beat=0.3"]


@pytest.mark.slow
def test_what_agents_do_as_a_worker_and_the_leader_are_killed_is_what_the_machines_do(job: Job) -> None:
    traces = job.directory / "traces"
    where = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3))
    for name in "abc":
        flags = [*TIMING, "--rdzv-id", "run", "--nnodes", "1:3"]
        env = {"NODE": name, TRACES: str(traces)}
        job.node(name, *flags, endpoint=where, command=[LIVE, str(job.work)], env=env)
    first = _begun(job, 1, 3)
    os.kill(first[0], signal.SIGKILL)
    _begun(job, 2, 3)
    leader = job.events("leader_elected")[-1]["node"]
    next(agent for agent in job.agents if agent.name == leader).kill()
    _begun(job, 3, 2)
    job.finish()
    assert [agent.wait() for agent in job.agents if agent.name != leader] == [0, 0]
    run = replay(traces)
    assert len(run.checks.rounds) == 3


def _begun(job: Job, number: int, workers: int) -> dict[int, int]:
    def probe() -> dict[int, int]:
        notes = lines_of(job.work / "live.jsonl")
        found = {x["rank"]: x["pid"] for x in notes if x["what"] == "begins" and x["round"] == number}
        return found if len(found) == workers else {}

    return wait_for(f"round {number}", probe, 60)
