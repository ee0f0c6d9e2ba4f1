"""Nodes on separate hosts whose cables are pulled and put back: real network namespaces, agents and etcd."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
from etcd_servers import cluster
from harness import STEPS, Agent, Job, alive, now, round_of, wait_for
from netns import Host

MISSING = netns.missing()
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),  # three rounds each, of workers that import torch
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
]

DEAD_AFTER = 4
TIMING = ["--rdzv-conf", f"dead_after={DEAD_AFTER},beat=0.5"]


class Run:
    """A run whose nodes a, b, ... are on separate hosts; the record is on a, on all, or in etcd on one more host."""

    def __init__(self, job: Job, hosts: list[Host], where: list[str]) -> None:
        self.job = job
        self.hosts = dict(zip("abc", hosts, strict=False))
        self._where = where
        self.agents: dict[str, Agent] = {}

    def start(self, name: str, *flags: str, nnodes: str = "1:3") -> Agent:
        host = self.hosts[name]
        several = ["--nnodes", nnodes, "--nproc", "1", "--node-id", name, "--rdzv-id", "run", *self._where]
        env = {"NODE": name}
        command = [STEPS, str(self.job.work)]
        agent = self.job.launch(*several, *TIMING, *flags, name=name, command=command, env=env, prefix=host.prefix)
        self.agents[name] = agent
        return agent

    def finish(self) -> None:
        self.job.finish()
        assert {name: agent.wait() for name, agent in self.agents.items()} == dict.fromkeys(self.agents, 0)
        assert not [name for name, agent in self.agents.items() if "never retrieved" in agent.output]
        assert not self.job.events("restart_charged")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with netns.net(4) as hosts:
        yield hosts


@pytest.fixture
def c10d(job: Job, hosts: list[Host]) -> Run:
    return Run(job, hosts, ["--rdzv-endpoint", f"{hosts[0].address}:29400"])


@pytest.fixture
def voters(job: Job, hosts: list[Host]) -> Run:
    return Run(job, hosts, ["--rdzv-endpoint", ",".join(f"{host.address}:29400" for host in hosts[:3])])


@pytest.fixture
def etcd(job: Job, hosts: list[Host], tmp_path: Path) -> Iterator[Run]:
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory, host=hosts[3]) as members:
        yield Run(job, hosts, ["--rdzv-backend", "etcd", "--rdzv-endpoint", members[0].address])


@contextlib.contextmanager
def cut(host: Host, end: str = "switch") -> Iterator[None]:
    host.cut(end)
    try:
        yield
    finally:
        host.mend(end)


@pytest.mark.executed
def test_nodes_on_hosts_of_one_name_meet_by_their_addresses(c10d: Run) -> None:
    for name in "abc":
        c10d.start(name, nnodes="3")
    c10d.job.trained(3)
    workers = c10d.job.started()
    assert {worker["env"]["MASTER_ADDR"] for worker in workers} < {host.address for host in c10d.hosts.values()}
    assert [event["address"] for event in c10d.job.events("node_joined") if event["node"] == "c"] == [
        c10d.hosts["c"].address
    ]
    c10d.finish()


def test_a_node_that_cannot_connect_to_the_others_takes_no_part_until_it_can(c10d: Run) -> None:
    """It reaches the endpoint, as behind a firewall that lets only this through, and not where the workers meet."""
    job, first = c10d.job, c10d.hosts["b"].address
    c10d.start("a", "--node-rank", "1")
    c10d.start("b", "--node-rank", "0")
    number = job.trained(2)
    route = ("-n", c10d.hosts["c"].name, "route")
    netns.ip(*route, "add", "blackhole", first)
    c10d.start("c")
    wait_for("the leader to tell", lambda: job.events("join_blocked"), 60)
    event = job.event("join_blocked")
    assert (event["node"], event["member"], event["address"]) == ("c", "b", first)
    c10d.agents["c"].says("node c waits: it cannot connect to node b")
    done = len(job.noted("steps.jsonl", "a", number))
    wait_for("further steps", lambda: len(job.noted("steps.jsonl", "a", number)) > done + 20)
    assert max(event["round"] for event in job.events("round_formed")) == number
    netns.ip(*route, "del", "blackhole", first)
    job.trained(3, after=number)
    c10d.finish()


def test_a_node_that_cannot_connect_to_the_others_in_the_first_round_is_named(c10d: Run) -> None:
    job, first = c10d.job, c10d.hosts["a"].address
    rule = ("-p", "tcp", "-d", first, "!", "--dport", "29400", "-j", "DROP")
    subprocess.run([*c10d.hosts["c"].prefix, "iptables", "-A", "OUTPUT", *rule], check=True)
    c10d.start("a", nnodes="2:3").says("hosts the run")
    c10d.start("c", nnodes="2:3").says("joins")
    c10d.start("b", nnodes="2:3")
    wait_for("the leader to tell", lambda: job.events("join_blocked"), 60)
    event = job.event("join_blocked")
    assert (event["node"], event["member"], event["address"], event["cause"]) == ("c", "a", first, "timed out")
    c10d.agents["c"].says("node c waits: it cannot connect to node a")
    subprocess.run([*c10d.hosts["c"].prefix, "iptables", "-D", "OUTPUT", *rule], check=True)
    job.trained(3)
    assert len(job.events("join_blocked")) == 1
    c10d.finish()


def test_a_member_that_is_cut_off_comes_back_as_a_new_node(c10d: Run) -> None:
    job = c10d.job
    c10d.start("a").says("hosts")
    c10d.start("b")
    c10d.start("c", "--node-rank", "0")
    number = job.trained(3)
    with cut(c10d.hosts["c"]):
        shrunk = job.trained(2, after=number)
        c10d.agents["c"].says("the workers train on")
    job.trained(3, after=shrunk)
    job.assert_nothing_done("c", number, job.first_step(shrunk))
    assert [event["node"] for event in job.events("node_lost") if event["broke"] == number] == ["c"]
    c10d.finish()


@pytest.mark.parametrize("end", ["switch", pytest.param("host", marks=pytest.mark.soak)])
def test_a_host_that_is_cut_off_continues_alone_and_readmits_the_others(c10d: Run, end: str) -> None:
    job = c10d.job
    c10d.start("a", "--node-rank", "1", nnodes="1:2").says("hosts")
    c10d.start("b", "--node-rank", "0", nnodes="1:2")
    number = job.trained(2)
    with cut(c10d.hosts["a"], end):
        shrunk = job.trained(1, after=number)
        c10d.agents["b"].says("the workers train on")
    job.trained(2, after=shrunk)
    job.assert_nothing_done("b", number, job.first_step(shrunk))
    assert {x["node"] for x in job.noted("steps.jsonl", number=shrunk)} == {"a"}
    c10d.finish()


def test_a_voter_that_leads_and_is_cut_off_is_succeeded_and_comes_back(voters: Run) -> None:
    job = voters.job
    for name in "abc":
        voters.start(name)
    number = job.trained(3)
    leader = job.events("leader_elected")[-1]["node"]
    with cut(voters.hosts[leader]):
        shrunk = job.trained(2, after=number)
        voters.agents[leader].says("this node no longer leads")
    job.trained(3, after=shrunk)
    job.assert_nothing_done(leader, number, job.first_step(shrunk))
    assert job.events("leader_elected")[-1]["node"] != leader
    voters.finish()


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["a", pytest.param("b", marks=pytest.mark.soak)])
def test_a_whole_round_without_a_majority_is_killed_before_the_others_train(
    voters: Run, hosts: list[Host], inside: str
) -> None:
    """Its nodes reach each other, so no collective stops their workers. The leader may be one of them."""
    job = voters.job
    voters.hosts["d"] = hosts[3]
    for name in "abcd":
        voters.start(name, "--node-rank", {inside: "0", "d": "1"}.get(name, "2"), nnodes="4")
    number = job.trained(4)
    where = ["--rdzv-endpoint", ",".join(f"{host.address}:29400" for host in hosts[:3]), "--rdzv-id", "run"]
    resize = [*hosts[0].prefix, sys.executable, "-m", "elastic_launch.cli.elasticctl", "resize", "2:2", *where]
    subprocess.run(resize, check=True, timeout=60)
    whole = job.trained(2, after=number)
    wait_for("steps of both", lambda: len({x["node"] for x in job.noted("steps.jsonl", number=whole)}) == 2)
    assert {x["node"] for x in job.noted("steps.jsonl", number=whole)} == {inside, "d"}
    with netns.apart([voters.hosts[inside], voters.hosts["d"]]):
        others = job.trained(2, after=whole)
        since = job.first_step(others)
        pids = {x["env"]["NODE"]: x["pid"] for x in job.started() if round_of(x) == whole}
        assert not any(map(alive, pids.values()))
        seen = len(job.events("node_joined"))
    # Not at the end of the run: the voters end with it, perhaps before the other node has come back.
    wait_for("both to come back", lambda: {inside, "d"} <= {x["node"] for x in job.events("node_joined")[seen:]})
    assert not {x["node"] for x in job.noted("steps.jsonl", number=others)} & {inside, "d"}
    for name in (inside, "d"):
        job.assert_nothing_done(name, whole, since)
    voters.finish()


@pytest.mark.soak
def test_a_leader_without_a_majority_steps_down_and_leads_again_with_one(voters: Run) -> None:
    job = voters.job
    for name in "abc":
        voters.start(name)
    number = job.trained(3)
    leader = job.events("leader_elected")[-1]["node"]
    others = [name for name in "abc" if name != leader]
    with cut(voters.hosts[others[0]]), cut(voters.hosts[others[1]]):
        voters.agents[leader].says("2 of 3 voters lost")
        voters.agents[leader].says("this node no longer leads")
        voters.agents[leader].says("its workers are killed")
        assert {x["round"] for x in job.noted("steps.jsonl")} == {number}
    job.trained(3, after=number)
    voters.finish()


@pytest.mark.parametrize("which", ["leader", pytest.param("member", marks=pytest.mark.soak)])
def test_on_etcd_a_node_that_is_cut_off_comes_back_as_a_new_one(etcd: Run, which: str) -> None:
    job = etcd.job
    ranks = {"a": "0", "b": "1"} if which == "leader" else {"a": "1", "b": "0"}
    etcd.start("a", "--node-rank", ranks["a"], nnodes="1:2").says("leads the run")
    etcd.start("b", "--node-rank", ranks["b"], nnodes="1:2")
    lost = "a" if which == "leader" else "b"
    number = job.trained(2)
    with cut(etcd.hosts[lost]):
        shrunk = job.trained(1, after=number)
    mended = now()
    job.trained(2, after=shrunk)
    job.assert_nothing_done(lost, number, job.first_step(shrunk))
    etcd.finish()
    assert job.until(mended + DEAD_AFTER, "leader_elected") == (["a", "b"] if which == "leader" else ["a"])


def test_on_etcd_a_node_alone_that_is_cut_off_is_killed_before_another_trains(etcd: Run) -> None:
    job = etcd.job
    first = etcd.start("a", nnodes="1:2")
    number = job.trained(1)
    worker = job.started()[0]
    with cut(etcd.hosts["a"]):
        etcd.start("b", nnodes="1:2")
        first.says("the store has not shown for")
        wait_for("the worker's end", lambda: not alive(worker["pid"]))
        alone = job.trained(1, after=number)
    job.trained(2, after=alone)
    job.assert_nothing_done("a", number, job.first_step(alone))
    etcd.finish()


@pytest.mark.soak
def test_on_etcd_a_run_of_one_node_that_is_cut_off_is_killed_before_its_spare_trains(etcd: Run) -> None:
    job = etcd.job
    first = etcd.start("a", nnodes="1")
    number = job.trained(1)
    worker = job.started()[0]
    etcd.start("b", nnodes="1")
    first.says("1 spare")
    with cut(etcd.hosts["a"]):
        first.says("the store has not shown for")
        wait_for("the worker's end", lambda: not alive(worker["pid"]))
        alone = job.trained(1, after=number)
    job.assert_nothing_done("a", number, job.first_step(alone))
    assert {x["node"] for x in job.noted("steps.jsonl", number=alone)} == {"b"}
    etcd.finish()


def test_training_continues_while_etcd_is_cut_off(etcd: Run, hosts: list[Host]) -> None:
    job = etcd.job
    leader = etcd.start("a")
    leader.says("leads the run")
    etcd.start("b")
    number = job.trained(2)
    with cut(hosts[3]):
        leader.says("the control record cannot be read, training goes on")
        seen = len(job.noted("steps.jsonl"))
        wait_for("further steps", lambda: len(job.noted("steps.jsonl")) >= seen + 20)
    etcd.start("c")
    job.trained(3, after=number)
    assert [event["term"] for event in job.events("leader_elected")] == [1]
    etcd.finish()


def test_a_cable_with_a_loose_contact_breaks_no_round(c10d: Run) -> None:
    job = c10d.job
    c10d.start("a", "--dead-after", "20", nnodes="2").says("hosts")
    c10d.start("b", "--dead-after", "20", nnodes="2")
    number = job.trained(2)
    for _ in range(5):
        with cut(c10d.hosts["b"]):
            # The beats of the node that is cut off do not arrive, and its worker waits for the other's.
            seen = len(job.noted("steps.jsonl"))
        wait_for("further steps", lambda seen=seen: len(job.noted("steps.jsonl")) >= seen + 4)  # type: ignore[misc]
    c10d.finish()
    assert {x["round"] for x in job.noted("steps.jsonl")} == {number}


def test_nothing_is_left_of_a_net() -> None:
    with netns.net(2) as hosts:
        names = {host.name for host in hosts}
        assert names <= set(netns.ip("netns", "list").split())
    assert not names & set(netns.ip("netns", "list").split())
