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


def trained_alone(job: Job, command: list[str]) -> dict[str, Any]:
    """Return the result of the example with one replica, undisturbed; it ends with ``--result FILE``."""
    agent = job.launch("--standalone", "--nproc", "2", command=[*command, "--checkpoint", str(job.directory / "alone")])
    assert agent.wait(120 * SLOWNESS) == 0, agent.output
    found: dict[str, Any] = json.loads(Path(command[-1]).read_text())
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

    alone = trained_alone(job, command)
    flags = ("--nnodes", "1:2", "--join-settle", "300", "--drill", str(drill))  # neither begins without the other
    command += ["--checkpoint", str(job.directory / "lost")]
    a = job.node("a", *flags, nproc=2, command=command)
    a.says("hosts the run")
    b = job.node("b", *flags, nproc=2, command=command)
    assert (b.wait(120 * SLOWNESS), a.wait(120 * SLOWNESS)) == (-signal.SIGKILL, 0), a.output
    found = json.loads(result.read_text())
    assert (found["worlds"], 0 < found["resumed"] <= 7) == ([4, 2], True)
    assert found["hash"] == alone["hash"]


LIVE = ("--exact", "--sgd")


def assert_went_on(result: Path, steps: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Assert that the processes that began as these ranks have done each step once, and that no other is repeated."""
    lines = read_lines(result.with_name(f"{result.name}.steps"))
    for first in [line for line in lines if line["step"] == 1 and line["rank"] in ranks]:
        mine = [line["step"] for line in lines if line["pid"] == first["pid"] and not line["repeated"]]
        assert mine == [*range(1, steps + 1)], lines
    assert len({line["step"] for line in lines if line["repeated"]}) <= 1, lines


@pytest.mark.slow
@pytest.mark.timeout(600)
# In the last one the others wait for the lost replica within a backward pass, and for each other.
@pytest.mark.parametrize("shape", [("2", "1"), ("1", "2"), ("1", "2", "--wrap", "--micro", "8")])
@pytest.mark.parametrize("kill", ["--kill", "--kill-in-pass"])
def test_a_killed_worker_costs_the_other_replica_no_step(job: Job, shape: tuple[str, ...], kill: str) -> None:
    """Its two processes go on from their own state; new ones of the broken replica get it from these."""
    options = (*LIVE, "--shard", shape[0], "--tensor", shape[1], *shape[2:], "--steps", "12")
    expected = trained(job, 2, *options)
    result = job.directory / "killed.json"
    command = [MESHED, str(result), *options, kill, "2:5", "--pause", "0.05"]
    agent = job.launch("--standalone", "--nproc", "4", "--replica-size", "2", name="killed", command=command)
    assert agent.wait(240 * SLOWNESS) == 0, agent.output
    found = json.loads(result.read_text())
    assert (found["hash"], found["history"]) == (expected["hash"], expected["history"])
    assert_went_on(result, 12)
    assert "training goes back" not in agent.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", [("2", "1"), ("1", "2")])
def test_the_second_replica_becomes_the_first(job: Job, shape: tuple[str, str]) -> None:
    """The others wait for no worker whose start takes long: a replica that has lost one has no place meanwhile."""
    options = (*LIVE, "--shard", shape[0], "--tensor", shape[1], "--steps", "12")
    result = job.directory / "killed.json"
    command = [MESHED, str(result), *options, "--kill-in-pass", "1:5", "--pause", "0.05"]
    flags = ("--standalone", "--nproc", "4", "--replica-size", "2", "--rdzv-conf", "start_wait=0")
    agent = job.launch(*flags, name="killed", command=command)
    assert agent.wait(240 * SLOWNESS) == 0, agent.output
    assert "round 2: 2 workers kept, 0 started" in agent.output
    assert_went_on(result, 12, ranks=(2, 3))
    assert {x["rank"] for x in read_lines(result.with_name(f"{result.name}.steps")) if x["step"] == 6} == {0, 1}
    assert json.loads(result.read_text())["hash"] == trained(job, 2, *options)["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_that_breaks_in_its_update_is_done_again_from_its_start(job: Job, undivided: dict[str, Any]) -> None:
    """In default mode all ranks exchange the gradients' norm in it."""
    result = job.directory / "killed.json"
    command = [MESHED, str(result), "--sgd", "--shard", "2", "--kill", "2:4"]
    agent = job.launch("--standalone", "--nproc", "4", "--replica-size", "2", name="killed", command=command)
    assert agent.wait(240 * SLOWNESS) == 0, agent.output
    found = json.loads(result.read_text())
    lines = [line for line in read_lines(result.with_name(f"{result.name}.steps")) if line["rank"] == 0]
    assert [(line["step"], line["repeated"]) for line in lines] == [
        *((step, False) for step in (1, 2, 3)),
        (4, True),
        *((step, False) for step in (4, 5, 6)),
    ]
    assert_went_on(result, 6)
    for which in ("norms", "losses"):
        del found[which][3]
    assert_close(found, undivided["--sgd"])
    assert "training goes back" not in agent.output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [("2", "1"), ("1", "2")])
def test_nodes_come_and_go_and_no_step_is_lost(job: Job, shape: tuple[str, str]) -> None:
    """A second replica joins, leaves, joins, a third one joins, and the second one is lost; all others go on.

    A new one builds its model and rehearses a step while the others train. A rehearsal that fails changes nothing.
    """
    result = job.directory / "result.json"
    options = (*LIVE, "--shard", shape[0], "--tensor", shape[1], "--steps", "200")
    flags = ("--replica-size", "2", "--rdzv-conf", "resize_delay=0.1,start_wait=0")
    command = [MESHED, str(result), *options, "--pause", "0.2"]

    def node(name: str, round: int) -> Agent:
        agent = job.node(name, *flags, nnodes="1:3", nproc=2, command=command)
        if round > 1:
            first.says(f"round {round}: 2 workers kept, 0 started", 120)
        found = lambda: any(x["round"] == round for x in job.events("first_step"))  # noqa: E731
        wait_for(f"a step of round {round}", found, 120)
        return agent

    first = node("a", 1)
    other = node("b", 2)
    other.signal(signal.SIGTERM)
    first.says("round 3: 2 workers kept, 0 started", 60)
    other.wait(60)
    fail = result.with_name(f"{result.name}.fail")
    fail.touch()
    other = node("c", 4)
    assert "could not rehearse its first step" in other.output
    fail.unlink()
    third = node("d", 5)
    other.says("round 5: 2 workers kept, 0 started", 60)
    other.kill()
    first.says("round 6: 2 workers kept, 0 started", 60)
    result.with_name(f"{result.name}.fast").touch()
    assert [node.wait(240 * SLOWNESS) for node in (first, third)] == [0, 0], first.output
    found = json.loads(result.read_text())
    assert (found["worlds"], found["hash"]) == ([2, 4, 2, 4, 6, 4], trained(job, 2, *options)["hash"])
    assert_went_on(result, 200)
    lines = read_lines(result.with_name(f"{result.name}.steps"))
    kept = {line["pid"] for line in lines if line["step"] == 1}
    assert {(line["pid"] in kept, line["built_ahead"], line["rehearsed"]) for line in lines} == {
        (True, False, False),
        (False, True, True),
        (False, True, False),  # of the node whose rehearsal failed
    }
    assert "training goes back" not in first.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_that_is_left_alone_takes_a_snapshot_at_once(job: Job) -> None:
    """A fault that breaks it, too, costs the steps since then, and not those since the last snapshot before."""
    result, drill = job.directory / "result.json", job.directory / "drill.yaml"
    drill.write_text(json.dumps([{"rank": 3, "step": 30, "do": "lose"}, {"rank": 1, "step": 34, "do": "kill"}]))
    command = [EXAMPLE, "--exact", "--shard", "2", "--steps", "36", "--every", "1000", "--result", str(result)]
    alone = trained_alone(job, command)
    flags = ("--nnodes", "1:2", "--replica-size", "2", "--join-settle", "300", "--drill", str(drill))
    command += ["--checkpoint", str(job.directory / "lost")]
    a = job.node("a", *flags, nproc=2, command=command)
    a.says("hosts the run")
    b = job.node("b", *flags, nproc=2, command=command)
    assert (b.wait(120 * SLOWNESS), a.wait(120 * SLOWNESS)) == (-signal.SIGKILL, 0), a.output
    found = json.loads(result.read_text())
    assert found["worlds"] == [4, 2, 2], a.output
    # After the first step of the replica alone: step 31, or 30 if node b was lost before node a had completed it.
    assert found["resumed"] in (30, 31), a.output
    assert found["hash"] == alone["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_snapshots_of_replicas_that_are_split_bring_back_a_lost_node(job: Job) -> None:
    """Three nodes with a replica each; the snapshot has each shard once, and a copy on the next node."""
    result, drill = job.directory / "result.json", job.directory / "drill.yaml"
    drill.write_text(json.dumps([{"rank": 5, "step": 7, "do": "lose"}]))
    command = [EXAMPLE, "--exact", "--shard", "2", "--steps", "12", "--every", "1000", "--result", str(result)]
    alone = trained_alone(job, command)
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
