"""The static backend: fixed ranks, and the workers' store exactly at the user's address."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, free_port, wait_for

MEETING = str(SCRIPTS / "meeting.py")


def start(job: Job, rank: int, *flags: str, nnodes: str = "2", nproc: int = 1) -> Agent:
    several = ["--nnodes", nnodes, "--nproc", str(nproc), "--node-rank", str(rank)]
    return job.launch(*several, *flags, name=f"node{rank}", command=[MEETING, str(job.work)])


def met(job: Job, number: int, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of a round reported, once all have joined."""
    paths = [Path(job.work / f"met-{number}-{rank}") for rank in range(ranks)]
    wait_for(f"{ranks} ranks to meet in round {number}", lambda: all(path.exists() for path in paths), 60)
    return [json.loads(path.read_text()) for path in paths]


def test_ranks_and_master_are_those_that_were_given_and_a_restart_meets_there_again(job: Job) -> None:
    master = ["--master-addr", "localhost", "--master-port", str(job.port)]
    nodes = [start(job, rank, *master) for rank in (1, 0)]
    for number in (1, 2):
        for rank, said in enumerate(met(job, number, 2)):
            assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("localhost", str(job.port))
            assert said["GROUP_RANK"] == said["NODE_RANK"] == str(rank)
            assert (said["WORLD_SIZE"], said["sum"]) == ("2", 2.0)
        if number == 1:
            job.tell("die-1")
    job.finish()
    assert [node.wait() for node in nodes] == [0, 0]
    assert {path.name for path in job.logs.glob("*/events-*")} == {"events-node-0.jsonl", "events-node-1.jsonl"}
    assert len(job.events("restart_charged")) == 1


def test_one_node_at_an_ipv6_address(job: Job) -> None:
    node = start(job, 0, "--rdzv-backend", "static", "--rdzv-endpoint", f"[::1]:{job.port}", nnodes="1", nproc=2)
    (said, _) = met(job, 1, 2)
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("::1", str(job.port))
    job.finish()
    assert node.wait() == 0


@pytest.mark.slow
def test_if_two_nodes_have_one_rank_the_later_takes_over(job: Job) -> None:
    master = ["--master-port", str(job.port)]
    host, first = start(job, 0, *master), start(job, 1, *master)
    met(job, 1, 2)
    second = start(job, 1, *master)
    assert first.wait() == 95
    assert "node-1" in first.output.splitlines()[-1]
    met(job, 2, 2)
    job.finish()
    assert (host.wait(), second.wait()) == (0, 0)


def test_node_0_reports_a_port_in_use(job: Job) -> None:
    with socket.create_server(("127.0.0.1", job.port)):
        node = start(job, 0, "--master-port", str(job.port))
        assert node.wait() == 95
    assert f"127.0.0.1:{job.port} (--node-rank 0), but its port is in use" in node.output


def test_a_port_of_ones_own_choice_is_free_for_the_next_run(job: Job) -> None:
    port = free_port()
    for number in (1, 2):
        node = start(job, 0, "--master-port", str(port), nnodes="1")
        met(job, 1, 1)
        job.finish()
        assert node.wait() == 0, number
        for path in job.work.iterdir():
            path.unlink()
