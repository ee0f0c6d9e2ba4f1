"""Models that are divided within replicas, in real processes: one global batch, and in exact mode one hash."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, SLOWNESS, Agent, Job, read_lines, run_script, wait_for

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "mesh" / "train.py")
MESHED = str(SCRIPTS / "meshed.py")

MICRO_BATCHES = [(step, micro) for step in range(1, 7) for micro in range(7 if step % 3 == 0 else 8)]
"""Of 46 samples in global batches of 16: two of 8 micro-batches, and one of 7, twice."""


def trained(job: Job, world: int, *options: str, name: str = "") -> dict[str, Any]:
    """Return what a training came to, on which all its ranks agree."""
    result = job.directory / (name or f"result-{'-'.join(options)}-{world}.json".replace("/", "_"))
    agent = job.launch("--standalone", "--nproc", str(world), name=result.name, command=[MESHED, str(result), *options])
    assert agent.wait(120 * SLOWNESS) == 0, agent.output
    found: dict[str, Any] = json.loads(result.read_text())
    ranks = [json.loads(result.with_name(f"{result.name}.{rank}").read_text()) for rank in range(world)]
    assert {rank["hash"] for rank in ranks} == {found["hash"]}, agent.output
    found["output"] = agent.output
    found["seen"] = [rank["seen"] for rank in ranks]
    return found


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process writes in exact mode, by optimizer."""
    found = {}
    for option in ("", "--sgd"):
        result = tmp_path_factory.mktemp("undivided") / "result.json"
        run_script(MESHED, str(result), "--exact", *option.split())
        found[option] = json.loads(result.read_text())
    return found


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("norms", "losses"):
        torch.testing.assert_close(found[key][:4], expected[key][:4], rtol=1e-5, atol=1e-5)
    for name, values in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_within_replicas_give_the_weights_of_the_undivided_model(job: Job, undivided: dict[str, Any]) -> None:
    """In exact mode to the bit, also after a kill, and when the training goes on with other replicas, or none."""
    saved = job.directory / "saved"
    exact = ("--exact", "--shard", "2")
    killed = trained(job, 4, *exact, "--kill", "1:4", "--checkpoint", str(saved / "killed"))
    assert (killed["worlds"], killed["restarts"]) == ([4, 4], 1)
    assert killed["hash"] == undivided[""]["hash"]
    for name, world, shape in (("a", 4, exact), ("b", 3, ("--exact", "--shard", "3")), ("c", 1, ("--exact",))):
        place = saved / name
        if not (saved / "before").exists():
            trained(job, 2, *exact, "--steps", "4", "--checkpoint", str(saved / "before"))
        shutil.copytree(saved / "before", place)
        on = trained(job, world, *shape, "--checkpoint", str(place), name=name)
        assert (on["worlds"], on["resumed"]) == ([2, world], 4)
        assert [on[key] for key in ("hash", "history")] == [undivided[""][key] for key in ("hash", "history")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tensor_ranks_give_one_hash_at_any_number_of_replicas(job: Job, undivided: dict[str, Any]) -> None:
    saved = job.directory / "saved"
    exact = ("--exact", "--sgd", "--shard", "1", "--tensor", "2")
    one = trained(job, 2, *exact)
    assert_close(one, undivided["--sgd"])
    two = trained(job, 4, *exact, "--kill", "3:4", "--checkpoint", str(saved))
    assert (two["worlds"], two["restarts"]) == ([4, 4], 1)
    assert two["hash"] == one["hash"]
    agent = job.launch(
        "--standalone", command=[MESHED, str(saved), "--exact", "--sgd", "--checkpoint", str(saved)], name="refused"
    )
    assert agent.wait(60 * SLOWNESS) == 93
    assert "was made in exact mode with tensor ranks 2, this training has none" in agent.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_every_micro_batch_counts_once_in_the_default_mode(
    job: Job, undivided: dict[str, Any], shape: tuple[int, int]
) -> None:
    shard, tensor = shape
    found = trained(job, 4, "--sgd", "--shard", str(shard), "--tensor", str(tensor))
    assert_close(found, undivided["--sgd"])
    assert Counter(tuple(each) for seen in found["seen"] for each in seen) == dict.fromkeys(MICRO_BATCHES, tensor)
    for first in range(0, 4, tensor):
        assert all(found["seen"][first] == found["seen"][first + t] for t in range(tensor))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_node_takes_its_replica_with_it(job: Job) -> None:
    """The example on two nodes with a replica each, of which one is lost; the other goes on, alone."""
    result, drill = job.directory / "result.json", job.directory / "drill.yaml"
    drill.write_text(json.dumps([{"rank": 3, "step": 7, "do": "lose"}]))
    command = [EXAMPLE, "--exact", "--tensor", "2", "--shard", "1", "--steps", "12", "--result", str(result)]

    agent = job.launch("--standalone", "--nproc", "2", command=[*command, "--checkpoint", str(job.directory / "alone")])
    assert agent.wait(120 * SLOWNESS) == 0, agent.output
    alone = json.loads(result.read_text())
    flags = ("--nnodes", "1:2", "--join-settle", "300", "--drill", str(drill))  # neither begins without the other
    command += ["--checkpoint", str(job.directory / "lost")]
    a = job.node("a", *flags, nproc=2, command=command)
    a.says("hosts the run")
    b = job.node("b", *flags, nproc=2, command=command)
    assert (b.wait(120 * SLOWNESS), a.wait(120 * SLOWNESS)) == (-signal.SIGKILL, 0), a.output
    found = json.loads(result.read_text())
    assert (found["worlds"], 0 < found["resumed"] <= 7) == ([4, 2], True)
    assert found["hash"] == alone["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("shard", "tensor"), [("2", "1"), ("1", "2")])
def test_the_processes_of_a_whole_replica_are_kept(job: Job, shard: str, tensor: str) -> None:
    """A node joins with a second replica, and is lost; the first one's processes go on in both rounds.

    Those that wait for another tensor rank when the node is lost do not.
    """
    result = job.directory / "result.json"
    # The gradients' norm is exchanged by DTensor's operators.
    command = [EXAMPLE, "--live", "--exact", "--shard", shard, "--tensor", tensor, "--result", str(result)]

    def run(name: str, nnodes: str = "1:2") -> Agent:
        steps = "120" if tensor == "1" else "80"
        given = [*command, "--steps", steps, "--checkpoint", str(job.directory / nnodes.replace(":", "-"))]
        flags = ("--replica-size", "2", "--rdzv-conf", "resize_delay=0.1")
        return job.node(name, *flags, nnodes=nnodes, nproc=2, command=given)

    first = run("a")
    first.says("started: world size 2", 120)
    other = run("b")
    first.says("round 2: 2 workers kept, 0 started", 120)
    wait_for("a step of both", lambda: any(x["round"] == 2 for x in job.events("first_step")), 60)
    other.kill()
    if tensor == "1":
        first.says("round 3: 2 workers kept, 0 started", 60)
    assert first.wait(240 * SLOWNESS) == 0, first.output
    found = json.loads(result.read_text())
    assert [event["world_size"] for event in job.events("round_formed")] == [2, 4, 2]
    events = [event for path in job.logged("events-a.jsonl") for event in read_lines(path)]
    if tensor == "1":
        assert len([event for event in events if event["event"] == "worker_started"]) == 2
    alone = run("c", "1")
    assert alone.wait(240 * SLOWNESS) == 0, alone.output
    assert json.loads(result.read_text())["hash"] == found["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_snapshots_of_replicas_that_are_split_bring_back_a_lost_node(job: Job) -> None:
    """Three nodes with a replica each; the snapshot has each shard once, and a copy on the next node."""
    result, drill = job.directory / "result.json", job.directory / "drill.yaml"
    drill.write_text(json.dumps([{"rank": 5, "step": 7, "do": "lose"}]))
    command = [EXAMPLE, "--exact", "--shard", "2", "--steps", "12", "--every", "1000", "--result", str(result)]
    agent = job.launch("--standalone", "--nproc", "2", command=[*command, "--checkpoint", str(job.directory / "alone")])
    assert agent.wait(120 * SLOWNESS) == 0, agent.output
    alone = json.loads(result.read_text())
    flags = ("--nnodes", "2:3", "--join-settle", "300", "--drill", str(drill), "--split-snapshots")
    command += ["--checkpoint", str(job.directory / "lost")]
    nodes = [job.node("a", *flags, nproc=2, command=command)]
    nodes[0].says("hosts the run")
    nodes += [job.node(name, *flags, nproc=2, command=command) for name in ("b", "c")]
    assert sorted(node.wait(120 * SLOWNESS) for node in nodes) == [-signal.SIGKILL, 0, 0], nodes[0].output
    assert "snapshots in memory are split among the nodes" in nodes[0].output
    found = json.loads(result.read_text())
    assert (found["worlds"], 0 < found["resumed"] <= 7) == ([6, 4], True), nodes[0].output
    assert found["hash"] == alone["hash"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_that_differ_are_named_by_rank(job: Job, undivided: dict[str, Any]) -> None:
    """The training goes back to the last state that was the same."""
    options = ("--exact", "--shard", "2", "--spoil", "3:4", "--checkpoint", str(job.directory / "saved"))
    found = trained(job, 4, *options, name="spoilt")
    assert (found["worlds"], found["restarts"]) == ([4, 4], 1)
    assert found["hash"] == undivided[""]["hash"]
    assert "the ranks do not have the same parameter '0.weight': ranks 1, 3 differ" in found["output"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tensor", ["1", "2"])
def test_replicas_begin_with_the_shards_of_the_first(job: Job, tensor: str) -> None:
    """Their scripts have built other models, as those without a seed do; tensor ranks have copies, too."""
    trained(job, 4, "--shard", "2", "--tensor", tensor, "--seed-by-rank", "--steps", "2")
