"""Sharded models and optimizers under the launcher: kills, lost nodes, other worlds, and one hash in exact mode."""

from __future__ import annotations

import json
import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, SLOWNESS, Job, run_script

import elastic_launch as el
from elastic_launch.faults import FaultPlan

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = str(EXAMPLES / "fsdp" / "train.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process writes after 12 steps of the unsharded model in exact mode."""
    directory = tmp_path_factory.mktemp("undisturbed")
    saving = ["--checkpoint", str(directory / "saved"), "--result", str(directory / "result.json")]
    run_script(EXAMPLE, "--shard", "none", "--exact", "--steps", "12", *saving)
    return dict(json.loads((directory / "result.json").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", ["fsdp", "zero"])
def test_a_kill_and_other_worlds_end_with_the_weights_of_an_undisturbed_unsharded_run(
    job: Job, undisturbed: dict[str, Any], shard: str
) -> None:
    """The example on 2 processes, one of which is killed, then on 3, then on 1.

    On 3 it is given the directory as a URL: one rank reads it, and sends the others their shards.
    """
    result, saved = job.directory / "result.json", job.directory / "saved"
    command = [EXAMPLE, "--exact", "--shard", shard]
    resumed = 0
    for world, steps in ((2, 6), (3, 9), (1, 12)):
        plan = FaultPlan.fail_at(1, 4) if world == 2 else FaultPlan()
        place = f"file://{saved}" if world == 3 else str(saved)
        told = [*command, "--checkpoint", place, "--steps", str(steps), "--result", str(result)]
        agent = job.launch(
            "--standalone", "--nproc", str(world), name=f"w{world}", command=told, env=plan.environment()
        )
        assert agent.wait(120 * SLOWNESS) == 0, agent.output
        found: dict[str, Any] = json.loads(result.read_text())
        if world == 2:
            # The killed one's steps are in memory, so that at most the last one is done again.
            assert (found["worlds"], found["restarts"]) == ([2, 2], 1), agent.output
            assert found["resumed"] > 0
        else:
            # Only the directory has a state. A later one would come from a broken round, and nothing here breaks one.
            assert (found["worlds"][-1], found["restarts"], found["resumed"]) == (world, 0, resumed), agent.output
        resumed = steps
    assert found["hash"] == undisturbed["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["fsdp --exact", pytest.param("zero", marks=pytest.mark.soak)])
def test_a_lost_node_takes_no_shard_with_it_also_of_a_compiled_model(
    job: Job, undisturbed: dict[str, Any], mode: str
) -> None:
    """Of two nodes that save behind a URL one is lost with its worker; the other goes on from its memory, alone."""
    result, saved, drill = (job.directory / name for name in ("result.json", "saved", "drill.yaml"))
    drill.write_text(json.dumps([{"rank": 1, "step": 7, "do": "lose"}]))
    saving = ["--checkpoint", f"file://{saved}", "--every", "3", "--steps", "12", "--result", str(result)]
    command = [EXAMPLE, *saving, "--compile", "aot_eager", "--shard", *mode.split()]
    # Neither begins without the other.
    flags = ("--nnodes", "1:2", "--join-settle", "300", "--drill", str(drill))
    a = job.node("a", *flags, command=command)
    a.says("hosts the run")
    b = job.node("b", *flags, command=command)
    assert (b.wait(120), a.wait(120)) == (-signal.SIGKILL, 0), a.output
    found = json.loads(result.read_text())
    assert (found["worlds"], 0 < found["resumed"] <= 7) == ([2, 1], True), found
    if "--exact" in mode:
        assert found["hash"] == undisturbed["hash"]
    assert found["loss"] == pytest.approx(undisturbed["loss"], rel=1e-3)
    assert list(el.load_checkpoint(saved)["model"]) == list(el.load_checkpoint(f"file://{saved}")["model"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_of_a_snapshot_split_among_nodes_the_loss_of_one_takes_no_shard(
    job: Job, undisturbed: dict[str, Any], lost: int
) -> None:
    """Of three nodes one is lost with its worker: the node before it has a copy of its shards."""
    result, saved, drill = (job.directory / name for name in ("result.json", "saved", "drill.yaml"))
    drill.write_text(json.dumps([{"rank": lost, "step": 7, "do": "lose"}]))
    saving = ["--checkpoint", str(saved), "--every", "1000", "--steps", "12", "--result", str(result)]
    flags = ("--nnodes", "2:3", "--join-settle", "300", "--drill", str(drill), "--split-snapshots")
    command = [EXAMPLE, *saving, "--exact"]
    nodes = [job.node("a", *flags, command=command)]
    nodes[0].says("hosts the run")
    nodes += [job.node(name, *flags, command=command) for name in ("b", "c")]
    ended = sorted(node.wait(120 * SLOWNESS) for node in nodes)
    assert ended == [-signal.SIGKILL, 0, 0], nodes[0].output
    assert "snapshots in memory are split among the nodes: --split-snapshots was given" in nodes[0].output
    found = json.loads(result.read_text())
    # There is no checkpoint, so the snapshot was in memory.
    assert (found["worlds"], 0 < found["resumed"] <= 7) == ([3, 2], True), nodes[0].output
    assert found["hash"] == undisturbed["hash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_that_have_no_whole_state_write_checkpoints_together_also_if_one_is_slow(job: Job) -> None:
    """A checkpoint that is due while a node still writes is made later; one process goes on from the last one."""
    (job.work / "go").touch()
    env = {"EVERY": "1", "ROWS": "64", "SLOW": "0.2"}
    script, saved = str(SCRIPTS / "sharded_room.py"), job.directory / "saved"
    command = [script, str(job.work), "40", str(saved)]
    nodes = [job.node(name, "--split-snapshots", nnodes="3", command=command, env=env) for name in "abc"]
    assert [node.wait(120 * SLOWNESS) for node in nodes] == [0] * 3, nodes[0].output
    output = "".join(node.output for node in nodes)
    assert "did not come" not in output
    made = sorted(path.name for path in saved.glob("step-*"))
    assert len(made) > 1, output
    for checkpoint in saved.glob("step-*"):
        assert len([*checkpoint.glob("tensors-*-of-00003.safetensors")]) == 3, made
    more = run_script(script, str(job.work), "42", str(saved), env=env)
    assert "went on from step 40" in more
    alone = run_script(script, str(job.work), "42", str(job.directory / "alone"), env=env)
    assert re.findall("weights .*", more) == re.findall("weights .*", alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_faults_in_the_midst_of_split_snapshots_leave_the_one_before_both(job: Job) -> None:
    """Of four nodes two that keep the same shards do not complete one, then the other two do not complete the next."""
    (job.work / "go").touch()
    alone = job.directory / "alone"
    steps = range(5, 12)  # of the second snapshot in round 1, and of the first one in round 2
    first = [FaultPlan.fail_at(rank, step, at="snapshot") for rank in (0, 1) for step in steps]
    then = [FaultPlan.fail_at(rank, at="snapshot", round=2) for rank in (2, 3)]
    env = sum([*first, *then], FaultPlan()).environment()
    script = str(SCRIPTS / "sharded_room.py")
    expected = re.findall("weights .*", run_script(script, str(job.work), "12", str(alone)))
    command = [script, str(job.work), "12", str(job.directory / "saved")]
    nodes = [job.node(name, "--split-snapshots", nnodes="4", command=command, env=env) for name in "abcd"]
    assert [node.wait(120 * SLOWNESS) for node in nodes] == [0] * 4, nodes[0].output
    output = "".join(node.output for node in nodes)
    assert len(job.events("round_broken")) == 2, output
    resumed = re.findall(r"went on from step (\d+)", output)
    assert (len(resumed), len({*resumed})) == (4, 1), output
    assert int(resumed[0]) > 0, f"there is no checkpoint, so nothing was left: {output}"
    assert re.findall("weights .*", output) == expected


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU")
def test_on_a_gpu_a_killed_sharded_training_goes_on_from_memory(job: Job) -> None:
    """On one GPU: NCCL takes no two ranks on the same one."""
    result = job.directory / "result.json"
    saving = ["--checkpoint", str(job.directory / "saved"), "--every", "100", "--result", str(result)]
    plan = FaultPlan.fail_at(0, 8)
    agent = job.launch("--standalone", command=[EXAMPLE, *saving, "--steps", "12"], env=plan.environment())
    assert agent.wait(120 * SLOWNESS) == 0, agent.output
    found = json.loads(result.read_text())
    assert (found["worlds"], 0 < found["resumed"] <= 8) == ([1, 1], True), agent.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((1, 2, 4), marks=pytest.mark.soak)], ids=str)
def test_exact_mode_gives_the_same_weights_and_evaluations_at_each_world(job: Job, worlds: tuple[int, ...]) -> None:
    """At 3 a rank has no micro-batch in one of the kinds."""
    found = {}
    for world in worlds:
        result = job.directory / f"result-{world}.json"
        command = [str(SCRIPTS / "sharded.py"), str(result)]
        agent = job.launch("--standalone", "--nproc", str(world), name=f"world-{world}", command=command)
        assert agent.wait(120 * SLOWNESS) == 0, agent.output
        found[world] = json.loads(result.read_text())
    whole = {kind: found[1].pop(f"{kind} whole") for kind in list(found[1]) if f"{kind} whole" in found[1]}
    assert all(found[world] == found[1] for world in worlds), found
    assert found[1] | whole == found[1]
    assert len(whole) == 7


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("transformers") is None, reason="pip install '.[frameworks]'")
def test_a_killed_lora_ends_with_the_undisturbed_weights_also_sharded_and_saves_its_adapters_alone(job: Job) -> None:
    result = job.directory / "result.json"
    command = [str(EXAMPLES / "lora" / "train.py"), "--steps", "24", "--result", str(result), "--checkpoint"]
    run_script(*command, str(job.directory / "alone"))
    expected = json.loads(result.read_text())["hash"]
    for name, options in (("lora", []), ("sharded", ["--fsdp"])):
        saved = job.directory / name
        told, environ = [*command, str(saved), *options], FaultPlan.fail_at(1, 22).environment()
        agent = job.launch("--standalone", "--nproc", "2", name=name, command=told, env=environ)
        assert agent.wait(120) == 0, agent.output
        found = json.loads(result.read_text())
        assert (found["hash"], found["worlds"], found["resumed"] > 0) == (expected, [2, 2], True)
        names = el.load_checkpoint(saved)["model"]
        assert all(".up." in key or ".down." in key for key in names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_restore_takes_no_whole_state_per_process_besides_what_it_maps(job: Job) -> None:
    """From memory, from the disk and by way of a URL, where rank 0 maps all of it: twice the state was read before."""
    saved, script = job.directory / "saved", str(SCRIPTS / "sharded_memory.py")
    for number, (place, plan) in enumerate(
        ((saved, FaultPlan.fail_at(1, 4)), (saved, None), (f"file://{saved}", None))
    ):
        environ = plan.environment() if plan is not None else {}
        told = [script, str(place), str(6 + number)]
        # Without live rounds: what a process takes that began anew.
        flags = ["--standalone", "--no-live", "--nproc", "2"]
        agent = job.launch(*flags, name=f"run-{number}", command=told, env=environ)
        assert agent.wait(120 * SLOWNESS) == 0, agent.output
        found = dict(re.findall(r"rank (\d) restored step \d+: (\d\.\d+) of the state", agent.output))
        assert set(found) == {"0", "1"}, agent.output
        assert float(found["1"]) < 1.3, found
        assert float(found["0"]) < (1.3 if number < 2 else 1.95), found
