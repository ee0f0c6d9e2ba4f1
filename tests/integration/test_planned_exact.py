"""Planned changes cost no step, and the weights are those of the undisturbed run: resizes, drains, deadlines."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from changes import Changes, ctl
from etcd_servers import cluster, endpoints
from harness import Agent, Job, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]


def told(job: Job, *arguments: str) -> None:
    done = ctl(*arguments, "--log-dir", str(job.logs))
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_two_four_nodes_and_one_cost_no_step(job: Job, undisturbed: str) -> None:
    """Nodes come one by one and two at a time; three leave together, asked by signal and by elasticctl."""
    changes = Changes(job, step_time=1.0)  # enough is left for each resize to pay
    nodes = {"a": changes.node("a", nnodes="1:2")}
    one = changes.trains(1)
    nodes["b"] = changes.node("b", nnodes="1:2")
    two = changes.trains(2, after=one)
    nodes |= {name: changes.node(name, nnodes="1:2") for name in "cd"}
    wait_for("two spares", lambda: len(job.events("node_joined")) == 4, 100)
    told(job, "resize", "1:4")
    four = changes.trains(4, after=two)
    with ThreadPoolExecutor(1) as pool:
        # In one drain: if a node left while the next round had not begun to train, that would be broken.
        asked = pool.submit(told, job, "drain", "b")
        wait_for("its drain", lambda: [x for x in job.events("round_draining") if x["round"] == four], 60)
        for name in "cd":
            nodes[name].signal(signal.SIGTERM)
        asked.result()
    changes.trains(1, after=four)
    result = changes.finish(nodes["a"])
    assert [nodes[name].wait(60) for name in "bcd"] == [143] * 3, changes.outputs()

    assert job.events("round_broken") == []
    assert result["worlds"][:3] == [1, 2, 4]
    assert result["worlds"][-1] == 1
    assert changes.done_again() == 0
    ledger = changes.ledger()
    assert [incident["drained"] for incident in ledger["incidents"]] == [True] * (len(result["worlds"]) - 1)
    assert sum(incident["lost_steps"] for incident in ledger["incidents"]) == 0
    assert result["restarts"] == 0
    assert result["hash"] == undisturbed


def test_each_node_is_drained_in_turn_and_the_host_of_the_store_ends_the_run(job: Job, undisturbed: str) -> None:
    """The run can continue without the host only from a checkpoint."""
    changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), step_time=0.5)
    a, b, c = (changes.node(name, "--join-settle", "100", nnodes="1:3") for name in "abc")
    changes.trains(3)
    told(job, "drain", "c", "--deadline", "30")
    assert c.wait(60) == 143
    two = changes.trains(2)
    b.signal(signal.SIGTERM)
    assert b.wait(60) == 143
    changes.trains(1, after=two)
    refused = ctl("drain", "a", "--log-dir", str(job.logs))
    assert (refused.returncode, "hosts the run" in refused.stderr) == (2, True)
    a.signal(signal.SIGTERM)
    assert a.wait(60) == 143

    result = changes.finish(changes.alone(name="second"))
    assert [(kind, why) for kind, _, why in changes.kinds()] == [("drained", "preemption")] * 3
    assert result["worlds"] == [3, 2, 1, 1]
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.executed
def test_the_host_leaves_and_another_agent_at_its_address_resumes_from_the_others_memory(
    job: Job, undisturbed: str
) -> None:
    changes = Changes(job)
    host, other = (changes.node(name, nnodes="2:2") for name in "ab")
    changes.trains(2)
    host.signal(signal.SIGTERM)
    assert host.wait(60) == 143
    other.says("parked: the leader is gone")
    (drained,) = job.events("round_drained")
    new = changes.node("a", nnodes="2:2")
    second = changes.trains(2, after=1)
    result = changes.finish(new, other)
    assert changes.resumed(second) == drained["step"]
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.soak
def test_on_etcd_each_node_is_drained_in_turn_the_leader_first(job: Job, undisturbed: str, tmp_path: Path) -> None:
    changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), step_time=0.5)
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory, size=1) as members:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(members), "--rdzv-id", "run"]

        def node(name: str) -> Agent:
            flags = ["--nnodes", "1:3", "--node-id", name, "--join-settle", "100", *where]
            return job.launch(*flags, name=name, command=changes.command, env={"NODE": name})

        nodes = {name: node(name) for name in "abc"}
        number = changes.trains(3)
        for left in (2, 1, 0):
            leader = json.loads(ctl("status", "--json", *where).stdout)["leader"]
            done = ctl("drain", leader, *where)
            assert done.returncode == 0, done
            assert nodes.pop(leader).wait(60) == 143
            if left:
                number = changes.trains(left, after=number)
        last = node("d")
        changes.trains(1, after=number)
        result = changes.finish(last)
    # A leader may be gone before the others have reported that they are drained; its successor does not know it.
    assert [event["round"] for event in job.events("round_draining")] == [1, 2, 3]
    assert {event["kind"] for event in job.events("round_broken")} == {"node loss"}
    assert [changes.resumed(number + 1) for number in (1, 2, 3)] == [changes.last(number) for number in (1, 2, 3)]
    assert result["restarts"] == 0
    assert result["worlds"] == [3, 2, 1, 1]
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.parametrize(
    ("seconds", "by", "ends"),
    [
        (1, "signal", "broken"),
        pytest.param(1, "elasticctl", "broken", marks=pytest.mark.soak),
        pytest.param(15, "signal", "drained", marks=pytest.mark.soak),
        (15, "elasticctl", "drained"),
    ],
)
def test_a_node_leaves_by_a_drain_if_there_is_time_for_two_steps(
    job: Job, undisturbed: str, seconds: int, by: str, ends: str
) -> None:
    """Steps take 1 s; without time for two, the round is broken at once and the last snapshot is used."""
    changes = Changes(job, step_time=1.0)
    grace = ["--join-settle", "100", "--shutdown-timeout", str(seconds)]
    stays, leaves = (changes.node(name, *grace, nnodes="1:2") for name in "ab")
    changes.trains(2, steps=4)
    if by == "signal":
        leaves.signal(signal.SIGTERM)
    else:
        done = ctl("drain", "b", "--deadline", str(seconds), "--log-dir", str(job.logs))
        assert done.returncode == int(ends == "broken"), done
    assert leaves.wait(60) == 143
    changes.trains(1, after=1)
    result = changes.finish(stays)
    assert [(kind, why) for kind, _, why in changes.kinds()] == [(ends, "preemption")]
    lost = changes.assert_no_more_lost_than_an_interval(1)
    assert lost == 0 if ends == "drained" else "no time to stop after a step" in leaves.output
    assert changes.done_again() == lost
    # Between the worker's note and its word to the agent it may have been killed.
    assert lost - changes.ledger()["lost_steps"] in (0, ends == "broken")
    assert result["restarts"] == 0
    assert result["hash"] == undisturbed
