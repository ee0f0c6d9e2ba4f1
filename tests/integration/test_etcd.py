"""A run whose record is in etcd: real servers, real agents, and the loss of any of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import DEBIAN, SERVERS, Member, Proxy, cluster, endpoints
from harness import Agent, Job, alive, free_port, round_of, wait_for

from elastic_launch.rendezvous.leader.exclusion import FAULTS


@pytest.fixture(params=[SERVERS[0], pytest.param(DEBIAN, id="debian", marks=pytest.mark.soak)])
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory, server=request.param) as members:
        yield members


class Run:
    """Nodes of one run on etcd."""

    def __init__(self, job: Job, servers: list[Member], run_id: str = "run", where: str = "") -> None:
        self.job = job
        self.where = where or endpoints(servers)
        self.run_id = run_id

    def node(self, name: str, *flags: str, **options: Any) -> Agent:
        several = ["--nnodes", "1:4", "--nproc", "1", "--node-id", name, "--rdzv-id", self.run_id]
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", self.where]
        return self.job.launch(*several, *where, *flags, name=name, **options)

    def leader(self) -> str:
        """The id of the node that was elected most recently."""
        return str(wait_for("a leader", lambda: self.job.events("leader_elected"))[-1]["node"])

    def members(self, number: int) -> list[str]:
        """The ids of a round's nodes, which have one worker each, in rank order."""

        def formed() -> list[Any]:
            return [event["nodes"] for event in self.job.events("round_formed") if event["round"] == number]

        return list(wait_for(f"round {number}", formed)[0])

    def fail(self, name: str, number: int) -> None:
        """Have a node's worker of a round exit with 1."""
        self.job.tell(f"exit-{self.members(number).index(name)}", "1")


def test_the_run_continues_when_the_leader_is_killed(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    agents = {name: run.node(name) for name in "abc"}
    number = round_of(job.world(3)[0])
    leader = run.leader()
    failing = next(name for name in "abc" if name != leader)
    for _ in range(FAULTS - 1):
        run.fail(failing, number)
        number = round_of(job.world(3, after=number)[0])
    os.kill(agents[leader].process.pid, signal.SIGKILL)
    agents[leader].process.wait()
    before = number
    number = round_of(job.world(2, after=before)[0])
    assert number == before + 1
    elected = job.events("leader_elected")
    assert len(elected) == 2
    assert elected[1]["cause"] == f"leader {leader} lost: its process is gone"
    survivor, term = agents[elected[1]["node"]], elected[1]["term"]
    assert term > 1  # not always 2: a write that gets no answer in time is tried again
    survivor.says(f"node {survivor.name} leads the run (term {term}): leader {leader} lost")
    # The new leader has the failures of before, and counts them on.
    run.fail(failing, number)
    number = round_of(job.world(1, after=number)[0])
    assert [event["node"] for event in job.events("node_excluded")] == [failing]
    assert [event["restarts"] for event in job.events("restart_charged")] == [1, 2, 3]
    # A node that comes back is taken in by the new leader.
    run.node(leader)
    back = round_of(job.world(2, after=number)[0])
    assert failing not in run.members(back)


@pytest.mark.slow
def test_node_rank_orders_ranks(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    agents = [run.node(name, "--nnodes", "2", "--node-rank", rank) for name, rank in (("a", "1"), ("b", "0"))]
    workers = job.world(2)
    (formed,) = job.events("round_formed")
    assert formed["nodes"] == ["b", "a"]
    assert [worker["env"]["GROUP_RANK"] for worker in workers] == ["0", "1"]
    job.finish()
    assert [agent.wait() for agent in agents] == [0, 0]


@pytest.mark.slow
def test_a_frozen_leader_is_succeeded_and_comes_back_as_a_new_node(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    agents = {name: run.node(name, "--rdzv-conf", "dead_after=2,beat=0.2") for name in "ab"}
    before = int(job.world(2)[0]["env"]["ELASTIC_LAUNCH_ROUND"])
    leader = run.leader()
    other = "b" if leader == "a" else "a"
    frozen = agents[leader]
    frozen.signal(signal.SIGSTOP)
    wait_for("a successor", lambda: run.leader() == other, 60)
    alone = round_of(job.world(1, after=before)[0])
    frozen.signal(signal.SIGCONT)
    job.world(2, after=alone)
    frozen.says("this node no longer leads")
    formed = [(event["term"], event["round"]) for event in job.events("round_formed")]
    assert len({number for _, number in formed}) == len(formed)


@pytest.mark.slow
def test_training_continues_while_etcd_is_gone(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    agents = {name: run.node(name) for name in "ab"}
    job.world(2)
    servers[0].freeze()
    agents[run.leader()].says("the control record cannot be read, training goes on", 60)
    servers[0].thaw()
    run.node("c")
    job.world(3, after=1)
    assert [event["term"] for event in job.events("leader_elected")] == [1]


@pytest.mark.slow
def test_a_slow_and_lossy_way_to_etcd_is_enough(job: Job, servers: list[Member]) -> None:
    with contextlib.closing(Proxy(servers[0].address, delay=0.05)) as proxy:
        run = Run(job, servers, where=proxy.address)
        agents = {name: run.node(name) for name in "ab"}
        job.world(2)
        proxy.lose()
        agents["c"] = run.node("c")
        before = round_of(job.world(3)[0])
        leader = run.leader()
        proxy.lose()
        agents.pop(leader).kill()
        proxy.lose()
        job.world(2, after=before)
        assert run.leader() in agents
        job.finish()
        assert [agent.wait(60) for agent in agents.values()] == [0, 0]
    assert job.events("restart_charged") == []


@pytest.mark.slow
def test_below_min_a_new_leader_parks_until_a_node_is_back(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    agents = {name: run.node(name, "--nnodes", "2") for name in "ab"}
    first = job.world(2)
    leader = run.leader()
    agents.pop(leader).kill()
    survivor = next(iter(agents.values()))
    survivor.says("parked with 1 node, 2 needed")
    wait_for("the workers to be stopped", lambda: not any(alive(worker["pid"]) for worker in first))
    agents[leader] = run.node(leader, "--nnodes", "2")
    job.world(2, after=round_of(first[0]))
    job.finish()
    assert [agent.wait() for agent in agents.values()] == [0, 0]


@pytest.mark.slow
def test_a_node_that_comes_to_an_ended_run_exits_with_its_code(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    first = run.node("a", "--max-restarts", "0", command=["--no-python", "sh", "-c", "exit 3"])
    assert first.wait(60) == 3
    second = run.node("b", "--max-restarts", "0", command=["--no-python", "sh", "-c", "exit 3"])
    assert second.wait(60) == 3
    assert "run 'run' had ended before this node came" in second.output
    assert "reuse=true" in second.output
    # On request it begins a new run, whatever the old one's command was.
    third = run.node("c", "--rdzv-conf", "reuse=true")
    formed = job.world(1, after=1)
    first_term, term = (event["term"] for event in job.events("leader_elected"))
    assert term > first_term
    assert formed[0]["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"
    job.finish()
    assert third.wait(30) == 0


@pytest.mark.slow
def test_a_run_all_of_whose_nodes_were_killed_is_taken_over(job: Job, servers: list[Member]) -> None:
    run = Run(job, servers)
    agents = [run.node(name) for name in "ab"]
    job.world(2)
    for agent in agents:
        agent.kill()
    again = run.node("c")
    job.world(1, after=1)
    job.finish()
    assert again.wait(30) == 0
    assert job.events("leader_elected")[-1]["term"] > 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rdzv-endpoint", "127.0.0.1:2379"], "needs a name for the run"),
        (["--rdzv-id", "x"], "needs the addresses of the cluster"),
    ],
)
def test_missing_settings_are_reported(job: Job, flags: list[str], message: str) -> None:
    agent = job.launch("--rdzv-backend", "etcd", *flags)
    assert agent.wait(30) == 2
    assert message in agent.output


def test_an_unreachable_etcd_is_reported(job: Job) -> None:
    where = f"127.0.0.1:{free_port()}"
    agent = job.launch(
        "--rdzv-backend", "etcd", "--rdzv-endpoint", where, "--rdzv-id", "x", "--rdzv-conf", "join_timeout=2"
    )
    assert agent.wait(60) == 95
    assert where in agent.output
