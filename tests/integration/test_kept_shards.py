"""Real trainings of a model that ``fully_shard`` has sharded, whose processes stay when the world changes: one hash."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import STEPS, Changes, pids, undisturbed_hash
from harness import SCRIPTS, Job, read_lines, run_script, wait_for

from elastic_launch.faults import FaultPlan

EVALUATING = str(SCRIPTS / "evaluating.py")


def training(job: Job, *options: str, **how: Any) -> Changes:
    return Changes(job, "--shard", *options, live=True, **how)


def repeated(changes: Changes, unnoted: int = 0) -> int:
    """How many steps were done again, each of which must have known it.

    Args:
        unnoted: how many the first rank may have completed without noting it, as it was killed.
    """
    again = changes.done_again()
    assert again <= sum(step["again"] for step in changes.steps()) <= again + unnoted, changes.outputs()
    return again


@pytest.mark.executed
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_keep_their_processes_and_repeat_what_followed_the_last_snapshot(
    job: Job, undisturbed: str, killed: int
) -> None:
    changes = training(job)
    agent = changes.alone("--nproc", "3")
    changes.trains(3, steps=10)
    first = pids(job, 1)
    os.kill(first[killed], signal.SIGKILL)
    changes.trains(3, after=1)
    result = changes.finish(agent)
    last = len(job.events("round_formed"))
    assert {*pids(job, last).values()} >= {*first.values()} - {first[killed]}
    lost = changes.assert_no_more_lost_than_an_interval(1)
    assert repeated(changes, unnoted=int(killed == 0)) == lost
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_planned_changes_cost_no_step_and_a_lost_node_those_since_the_last_snapshot(job: Job, undisturbed: str) -> None:
    changes = training(job, step_time=0.2)  # it lasts until all have come
    result, broken = changes.joined_left_and_lost()
    repeated(changes)
    events = [e for e in job.events() if e["event"] == "worker_kept"]
    assert {e["pid"] for e in events if e["round"] > broken} == {pids(job, 1)[0]}
    assert result["hash"] == undisturbed


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("evaluated")
    run_script(EVALUATING, str(directory))
    (result,) = read_lines(directory / "results.jsonl")
    return dict(result)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--die-in-step", "--die-in-evaluation"])
def test_a_kill_within_a_forward_pass_leaves_the_others_in_their_processes(
    job: Job, evaluated: dict[str, Any], where: str
) -> None:
    command = [EVALUATING, str(job.work), "--shard", where, "1:10:1"]
    agent = job.launch("--standalone", "--nproc", "3", command=command)
    assert agent.wait(100) == 0, agent.output
    assert {event["pid"] for event in job.events("worker_kept")} >= {pids(job, 1)[rank] for rank in (0, 2)}
    results = read_lines(job.work / "results.jsonl")
    assert len(results) == 3
    for result in results:
        assert [result[key] for key in ("hash", "rate", "history")] == [
            evaluated[key] for key in ("hash", "rate", "history")
        ]


@pytest.mark.slow
def test_ranks_that_exchange_the_norm_of_their_gradients_keep_their_processes(job: Job, tmp_path: Path) -> None:
    changes = training(job, "--clip", "--die-within", "1:9:1")
    agent = changes.alone("--nproc", "3")
    before = changes.trains(3, after=1, steps=3)
    first = pids(job, 1)
    result = changes.finish(agent)
    assert {*pids(job, before).values()} >= {first[0], first[2]}
    (tmp_path / "undisturbed").mkdir()
    assert result["hash"] == undisturbed_hash(tmp_path / "undisturbed", STEPS, "--clip")


@pytest.mark.slow
def test_compiled_code_stays_with_the_process(job: Job, undisturbed: str) -> None:
    changes = training(job, "--compile", "--die-within", "1:9:1")
    agent = changes.alone("--nproc", "2")
    before = changes.trains(2, after=1, steps=3)
    graphs = changes.steps(before)[-1]["graphs"]
    changes.trains(2, after=before - 1, steps=6)
    result = changes.finish(agent)
    assert changes.steps()[-1]["graphs"] == graphs
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_snapshots_that_are_split_bring_back_a_lost_node(job: Job, undisturbed: str) -> None:
    changes = training(job, step_time=0.2)
    nodes = [changes.node(name, "--split-snapshots", nnodes="2:3") for name in "abc"]
    changes.trains(3, steps=8)
    formed = len(job.events("round_formed"))
    nodes[2].kill()
    changes.trains(2, after=formed, steps=3)
    result = changes.finish(*nodes[:2])
    assert "snapshots in memory are split among the nodes" in "".join(node.output for node in nodes)
    kept = {e["pid"] for e in job.events("worker_kept") if e["round"] > formed}
    assert kept == {*pids(job, formed).values()} & {*pids(job, formed + 1).values()}
    assert len(kept) == 2
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_layers_that_are_tied_frozen_of_bfloat16_or_smaller_than_the_world_go_on(job: Job, tmp_path: Path) -> None:
    changes = training(job, "--hard", step_time=0.2)
    a = changes.node("a")
    changes.trains(1, steps=3)
    b = changes.node("b", nproc=2)
    joined = changes.trains(3, steps=3)
    os.kill(pids(job, joined)[1], signal.SIGKILL)
    killed = changes.trains(3, after=joined, steps=3)
    b.signal(signal.SIGTERM)
    changes.trains(1, after=killed, steps=3)
    assert b.wait() == 143
    result = changes.finish(a)
    repeated(changes)
    assert {e["pid"] for e in job.events("worker_kept") if e["round"] > killed} == {pids(job, 1)[0]}
    (tmp_path / "undisturbed").mkdir()
    assert result["hash"] == undisturbed_hash(tmp_path / "undisturbed", STEPS, "--hard")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 2])
def test_a_kill_as_shards_change_owners_costs_the_steps_since_the_last_snapshot_or_none(
    job: Job, undisturbed: str, killed: int
) -> None:
    """The newcomer has nothing that others lack: they still have all of the state."""
    changes = training(job, step_time=0.2)
    plan = FaultPlan.fail_at(killed, at="restore", round=2)
    a = changes.node("a", nproc=2, plan=plan)
    changes.trains(2, steps=8)
    b = changes.node("b", plan=plan)
    changes.trains(3, after=2, steps=3)
    result = changes.finish(a, b)
    assert changes.kinds()[:2] == [("drained", 1, "membership"), ("broken", 2, "crash")], changes.outputs()
    resumed, last = changes.resumed(3), changes.last(1)
    assert changes.whole(1) <= resumed <= last, changes.outputs()
    assert resumed == last or killed == 1, changes.outputs()
    assert repeated(changes) == last - resumed
    first = pids(job, 1)
    assert {*pids(job, len(job.events("round_formed"))).values()} >= {
        pid for rank, pid in first.items() if rank != killed
    }
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_node_that_leaves_as_another_one_joins_takes_no_shard_with_it(job: Job, undisturbed: str) -> None:
    changes = training(job, step_time=0.2)
    a, b = changes.node("a"), changes.node("b")
    before = changes.trains(2, steps=5)
    changes.node("c")
    wait_for("a drain for the third node", lambda: job.events("round_draining"), 100)
    b.signal(signal.SIGTERM)
    changes.trains(2, after=before, steps=3)
    assert b.wait() == 143
    result = changes.finish(a, job.agents[-1])
    repeated(changes)
    assert result["hash"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_while_too_few_nodes_are_left_the_processes_that_wait_have_all_shards(
    job: Job, undisturbed: str, rank: int
) -> None:
    """The process that waits has rank 0 after that, as before or instead of rank 1."""
    changes = training(job, step_time=0.2)
    # Ranks beyond the round's size determine the order.
    a, b = changes.node("a", nnodes="2", rank=10), changes.node("b", nnodes="2", rank=11 - 2 * rank)
    before = changes.trains(2, steps=10)
    b.signal(signal.SIGTERM)
    assert b.wait() == 143
    c = changes.node("c", nnodes="2", rank=12)
    changes.trains(2, after=before, steps=3)
    result = changes.finish(a, c)
    assert repeated(changes) == 0, changes.outputs()
    assert {e["pid"] for e in job.events("worker_kept")} == {pids(job, before)[rank]}
    assert result["hash"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("at", "killed"), [("drain", 2), ("leave", 2), ("leave", 1)])
def test_a_kill_as_a_node_leaves_costs_no_more_than_the_steps_since_the_last_snapshot(
    job: Job, undisturbed: str, at: str, killed: int
) -> None:
    """Before the node that leaves has given its shards to the others, or after that."""
    changes = training(job, step_time=0.2)
    plan = FaultPlan.fail_at(killed, at=at, round=1)
    flags, how = ("--join-settle", "300"), {"nnodes": "1:2", "plan": plan}
    a = changes.node("a", *flags, nproc=2, rank=0, **how)
    b = changes.node("b", *flags, rank=1, **how)
    changes.trains(3, steps=8)
    b.signal(signal.SIGTERM)
    changes.trains(2, after=1, steps=3)
    assert b.wait() == 143
    result = changes.finish(a)
    assert changes.whole(1) <= changes.resumed(2) <= changes.last(1), changes.outputs()
    assert repeated(changes) == changes.last(1) - changes.resumed(2)
    assert pids(job, 1)[0] in {*pids(job, len(job.events("round_formed"))).values()}
    assert result["hash"] == undisturbed
