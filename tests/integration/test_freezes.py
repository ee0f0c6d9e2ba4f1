"""Nodes that freeze, as a whole (agent, guard and workers) or only their agents, and come back.

They never train or save beside the next round.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import Member, cluster, endpoints
from harness import SCRIPTS, STEPS, Agent, Job, alive, freeze, now, round_of, state_of, wait_for

pytestmark = pytest.mark.timeout(600)  # three rounds each, of workers that import torch

DEAD_AFTER = 4
TIMING = ["--rdzv-conf", f"dead_after={DEAD_AFTER},beat=0.5,join_settle=2"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Member]]:
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory) as members:
        yield members


def node(job: Job, name: str, *flags: str, servers: list[Member] | None = None, **options: Any) -> Agent:
    """Start a node whose worker notes its steps and checkpoints; on etcd if there are servers."""
    options |= {"command": [STEPS, str(job.work)], "env": {"NODE": name}}
    if servers is None:
        return job.node(name, *TIMING, *flags, **options)
    several = ["--nnodes", "1:2", "--nproc", "1", "--node-id", name, "--rdzv-id", "run"]
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(servers)]
    return job.launch(*several, *where, *TIMING, *flags, name=name, **options)


def wait_until_saving(job: Job, name: str, number: int) -> None:
    """Return when a node's worker of a round has just begun to write a checkpoint."""
    parts = f"checkpoint-{number}-*.{name}.part"  # a round that ended in the middle of one leaves it behind
    wait_for("the end of a checkpoint", lambda: not list(job.work.glob(parts)))
    wait_for("the next checkpoint", lambda: list(job.work.glob(parts)))


def freeze_until_lost(job: Job, agent: Agent, number: int) -> tuple[list[int], float, int]:
    """Freeze a node in the middle of a checkpoint until the others train without it, and for longer than dead_after.

    Returns:
        its processes, the time of the others' first step, and their round.
    """
    wait_until_saving(job, agent.name, number)
    pids, frozen = agent.freeze(), now()
    shrunk = job.trained(1, after=number)
    time.sleep(max(0.0, frozen + DEAD_AFTER + 1 - now()))
    return pids, job.first_step(shrunk), shrunk


@pytest.mark.slow
def test_a_node_that_freezes_comes_back_as_a_new_one(job: Job) -> None:
    host = node(job, "a", nnodes="1:2")
    host.says("hosts")
    other = node(job, "b", "--node-rank", "0", nnodes="1:2")
    number = job.trained(2)
    worker = next(x["pid"] for x in job.started() if x["env"]["NODE"] == "b" and round_of(x) == number)
    pids, since, shrunk = freeze_until_lost(job, other, number)
    other.thaw(pids)
    other.says("this node was frozen for")
    job.trained(2, after=shrunk)
    job.assert_nothing_done("b", number, since)
    assert [x["node"] for x in job.events("node_lost") if x["broke"] == number] == ["b"]
    assert not alive(worker)
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    formed = {x["round"]: x["nodes"] for x in job.events("round_formed")}
    assert (formed[number + 1], formed[number + 2]) == (["a"], ["b", "a"])


@pytest.mark.slow
def test_a_host_that_freezes_and_comes_back_evicts_no_node(job: Job) -> None:
    host = node(job, "a", nnodes="2")
    host.says("hosts")
    other = node(job, "b", nnodes="2")
    number = job.trained(2)
    pids = host.freeze()
    other.says("the leader was silent for 4 s; the workers train on")
    host.thaw(pids)
    thawed = now()
    wait_for("a step", lambda: [x for x in job.noted("steps.jsonl", "b", number) if x["clock"] > thawed])
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert job.until(thawed + DEAD_AFTER, "node_lost") == []
    assert {x["round"] for x in job.noted("steps.jsonl") if x["clock"] < thawed + DEAD_AFTER} == {number}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["leader", pytest.param("member", marks=pytest.mark.soak)])
def test_on_etcd_a_frozen_node_comes_back_as_a_new_one(job: Job, servers: list[Member], which: str) -> None:
    # The one that freezes is rank 0, which saves.
    first = node(job, "a", "--node-rank", "0" if which == "leader" else "1", servers=servers)
    first.says("leads the run")
    second = node(job, "b", "--node-rank", "1" if which == "leader" else "0", servers=servers)
    frozen, survivor = (first, second) if which == "leader" else (second, first)
    number = job.trained(2)
    pids, since, shrunk = freeze_until_lost(job, frozen, number)
    frozen.thaw(pids)
    thawed = now()
    job.trained(2, after=shrunk)
    job.assert_nothing_done(frozen.name, number, since)
    job.finish()
    assert (survivor.wait(), frozen.wait()) == (0, 0)
    assert job.until(thawed + DEAD_AFTER, "leader_elected") == (["a", "b"] if which == "leader" else ["a"])


@pytest.mark.slow
def test_on_etcd_a_node_that_froze_alone_does_not_train_on_next_to_its_successor(
    job: Job, servers: list[Member]
) -> None:
    first = node(job, "a", servers=servers)
    number = job.trained(1)
    wait_until_saving(job, "a", number)
    pids = first.freeze()
    second = node(job, "b", servers=servers)
    alone = job.trained(1, after=number)
    since = job.first_step(alone)
    first.thaw(pids)
    job.trained(2, after=alone)
    job.assert_nothing_done("a", number, since)
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)
    assert "never retrieved" not in first.output


@pytest.mark.parametrize(("nnodes", "often"), [pytest.param("1:4", 2, marks=pytest.mark.soak), ("1", 1)])
def test_a_node_that_trains_alone_stops_while_etcd_is_out_of_reach(
    job: Job, servers: list[Member], nnodes: str, often: int
) -> None:
    several = ["--nnodes", nnodes, "--nproc", "1", "--node-id", "a", "--rdzv-id", "run"]
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(servers)]
    agent = job.launch(*several, *where, *TIMING, name="a")
    number = 0
    for times in range(1, often + 1):  # the second time as soon as a round began anew
        before = job.world(1, after=number)[0]
        servers[0].freeze()
        agent.says("the store has not shown for", times=times)
        wait_for("the worker's end", lambda pid=before["pid"]: not alive(pid))
        servers[0].thaw()
        number = round_of(before)
    job.world(1, after=number)
    job.finish()
    assert agent.wait() == 0
    assert not job.events("restart_charged")


def pair(job: Job, dead_after: int) -> tuple[Agent, Agent, int]:
    """Two nodes whose plain workers need no other rank, and their first round; the first one hosts the run."""

    def apart(name: str) -> Agent:
        timing = ["--rdzv-conf", f"dead_after={dead_after},beat=0.5,join_settle=2"]
        command = [str(SCRIPTS / "apart.py"), str(job.work)]
        return job.node(name, *timing, nnodes="1:2", command=command, env={"NODE": name})

    host = apart("a")
    host.says("hosts")
    other = apart("b")
    number = round_of(job.world(2)[0])
    wait_for("steps", lambda: all(job.noted("children.jsonl", name, number) for name in "ab"))
    return host, other, number


def of_node(job: Job, name: str, number: int) -> list[int]:
    """The worker of a node, and the process that it has forked."""
    (one,) = [x for x in job.started() if x["env"]["NODE"] == name and round_of(x) == number]
    return [one["pid"], *one["children"]]


def stand(pids: list[int]) -> bool:
    return [state_of(pid) for pid in pids] == ["T"] * len(pids)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_workers_do_no_step_beside_the_next_round(job: Job, whole: bool) -> None:
    """No collective stops them: neither while only their agent is frozen, nor when all thaw before it."""
    host, other, number = pair(job, DEAD_AFTER)
    pids = of_node(job, "b", number)
    standing = other.freeze() if whole else [other.process.pid]
    freeze(*standing)
    alone = job.trained(1, after=number)
    assert stand(pids)
    since = job.first_step(alone)
    time.sleep(1)
    other.thaw(standing)
    job.world(2, after=alone)
    job.assert_nothing_done("b", number, since)
    assert len([x for x in job.noted("children.jsonl", "b", number) if x["clock"] > since]) <= 1
    assert not any(map(alive, pids))
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert not job.events("restart_charged")


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_whose_agent_is_back_before_the_others_go_on_lose_nothing(job: Job, whole: bool) -> None:
    host, other, number = pair(job, 10)
    pids = of_node(job, "b", number)
    if whole:
        standing = other.freeze()
        time.sleep(8.5)
        other.thaw(standing)
    else:
        freeze(other.process.pid)
        wait_for("the guard", lambda: stand(pids))
        before = job.noted("steps.jsonl", "b")[-1]["step"]
        time.sleep(0.2)
        assert job.noted("steps.jsonl", "b")[-1]["step"] == before
        other.signal(signal.SIGCONT)
    thawed = now()
    other.says("this agent did not run for 8 s or longer")
    other.says("the leader has answered: the workers go on")
    wait_for("a step", lambda: job.noted("steps.jsonl", "b")[-1]["clock"] > thawed)
    wait_for("a step of its child", lambda: job.noted("children.jsonl", "b")[-1]["clock"] > thawed)
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert len(job.events("round_formed")) == 1
    assert not job.events("node_lost")
    (event,) = job.events("workers_held")
    assert event["round"] == number
    assert 0.2 < event["seconds"] < event["clock"] - thawed + 10


@pytest.mark.slow
def test_a_node_can_be_ended_while_its_workers_are_stopped_and_the_leader_does_not_answer(job: Job) -> None:
    host, other, number = pair(job, 10)
    pids = of_node(job, "b", number)
    freeze(host.process.pid, other.process.pid)
    wait_for("the guard", lambda: stand(pids))
    other.signal(signal.SIGCONT)
    other.says("its guard has stopped the workers until the leader answers")
    other.says("the leader was silent for 10 s; the workers stay stopped")
    assert stand(pids)
    other.signal(signal.SIGTERM)
    assert other.wait() == 143
    assert not any(map(alive, pids))
    host.signal(signal.SIGCONT)
    job.finish()
    assert host.wait() == 0


def test_the_workers_of_a_host_whose_agent_is_frozen_train_on(job: Job) -> None:
    """No other node can lead, so there is no next round."""
    host, other, _ = pair(job, 2)
    freeze(host.process.pid)
    frozen = now()
    wait_for("steps", lambda: job.noted("steps.jsonl", "a")[-1]["clock"] > frozen + 4)
    host.signal(signal.SIGCONT)
    time.sleep(2)
    job.finish()
    assert (host.wait(), other.wait()) == (0, 0)
    assert len(job.events("round_formed")) == 1
    assert "its guard has stopped" not in host.output + other.output


ANEW = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import elastic_launch as el

work, node = Path(sys.argv[1]), os.environ["NODE"]
with el.session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = el.ElasticLoader(TensorDataset(torch.ones(800, 2)), el.GlobalBatch(4, micro=2), seed=0)
    saved = el.Checkpoint(work / "saved", every="1000ba")
    for step in run.steps(data, model, optimizer, until="60ba", checkpoint=saved):
        for (inputs,) in step:
            step.backward(model(inputs).sum())
        step.update()
        time.sleep(0.1)
        while step.number > 5 and node == "a" and (work / "alone").exists():
            time.sleep(0.01)
        with open(work / node, "a") as file:
            print(run.world_size, step.number, file=file)
"""


@pytest.mark.slow
def test_a_node_that_thaws_after_the_run_has_begun_anew_drops_what_it_holds(job: Job) -> None:
    """It has the newer state, in rounds whose numbers the new run has used for others, and may not save it."""
    script = job.work / "anew.py"
    script.write_text(ANEW)

    def start(name: str) -> Agent:
        command = [str(script), str(job.work)]
        return job.node(name, "--no-live", *TIMING, nnodes="1:2", command=command, env={"NODE": name})

    def steps(name: str) -> list[list[int]]:
        there = job.work / name
        return [[*map(int, line.split())] for line in there.read_text().splitlines()] if there.exists() else []

    host = start("a")
    host.says("hosts")
    other = start("b")
    wait_for("step 40 on both", lambda: [2, 40] in steps("b"))
    pids = other.freeze()
    (job.work / "alone").touch()
    host.kill()
    host = start("a")
    wait_for("steps of the new run", lambda: [1, 5] in steps("a"))
    other.thaw(pids)
    other.says("in this node's memory is dropped: the run has begun anew")
    (job.work / "alone").unlink()
    assert (host.wait(), other.wait()) == (0, 0)
    assert "Two runs" not in host.output + other.output
    seen = steps("b")
    resumed = seen[seen.index([2, 40]) + 1 :]
    assert min(step for size, step in resumed) < 40, "it goes on from the new run's state"
    assert seen[-1] == [2, 60]
