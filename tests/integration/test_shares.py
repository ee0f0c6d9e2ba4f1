"""Checkpoints that all nodes write together: real agents, with the hash of the undisturbed run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from changes import STEPS, Changes
from harness import Job, alive, wait_for

from elastic_launch import snapshot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def of_step(changes: Changes, step: int) -> Path:
    (found,) = changes.checkpoints.glob(f"step-{step}.*")
    return found


def tensor_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.safetensors"))


def test_a_run_resumes_from_a_checkpoint_that_three_nodes_wrote_together(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), "--every", "10", "--split", "1")
    lost = [changes.node(name, nnodes="3:3") for name in "abc"]
    wait_for("a checkpoint", changes.durable, 100)
    for node in lost:
        node.kill()
    saved = changes.durable()[-1]
    assert tensor_files(of_step(changes, saved)) == [f"tensors-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    new = [changes.node(k, nnodes="2:2", rank=r, env={"NODE": f"new-{k}"}) for k, r in (("a", 0), ("b", 1))]
    result = changes.finish(*new)
    assert changes.resumed(1, "new-a") == saved
    assert changes.done_again() == changes.last(1, "abc") - saved
    assert tensor_files(of_step(changes, STEPS)) == [f"tensors-0000{k}-of-00002.safetensors" for k in (1, 2)]
    assert [path.name for path in changes.checkpoints.iterdir() if path.name.startswith(".writing")] == []
    assert result["worlds"] == [3, 2]
    assert result["hash"] == undisturbed


def test_the_first_node_writes_the_share_of_one_that_is_killed_while_it_does(job: Job, undisturbed: str) -> None:
    """The dead agent's copier survives; what it finally writes does no harm."""
    checkpoints = job.directory / "checkpoints"
    options = ["--checkpoint", f"gated://{checkpoints}", "--every", "100", "--split", "1"]
    changes = Changes(job, *options, step_time=0.05)
    checkpoints.mkdir()
    paths = [str(Path(__file__).parents[1] / "gated"), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    gate = checkpoints / "gate"
    gate.write_text("tensors-00002-of-00002.safetensors")
    host = changes.node("a", "--join-settle", "100", nnodes="1:2", rank=0, env=env)
    other = changes.node("b", nnodes="1:2", env=env)
    changes.trains(2)
    (halted,) = wait_for("half a share", lambda: list(checkpoints.glob("halted.*")), 100)
    other.kill()
    host.says("share 2 of the checkpoint did not come: the first node writes it", 60)
    wait_for("the checkpoint", lambda: changes.durable()[:1] == [100], 60)
    path = of_step(changes, 100)
    copier = int(halted.suffix[1:])
    assert alive(copier)
    gate.unlink()
    wait_for("the copier's end", lambda: not alive(copier), 60)
    assert tensor_files(path) == ["tensors-00001-of-00002.safetensors", "tensors-00002-of-00002.again.safetensors"]
    assert snapshot.load(snapshot.inspect(path)).info.step == 100
    result = changes.finish(host)
    assert changes.kinds() == [("broken", 1, "node loss")]
    assert changes.durable()[-1] == STEPS
    assert tensor_files(of_step(changes, STEPS)) == ["tensors.safetensors"], "one node, one file"
    assert result["hash"] == undisturbed


def test_a_node_with_its_own_directory_writes_the_whole_checkpoint_there(job: Job) -> None:
    changes = Changes(job, "--checkpoint", "checkpoints", "--every", "100", "--split", "1")
    changes.hurry()
    homes = [job.directory / name for name in "ab"]
    for home in homes:
        home.mkdir()
    nodes = [changes.node(home.name, nnodes="2:2", cwd=home) for home in homes]
    changes.finish(*nodes)
    for home in homes:
        (last,) = home.glob(f"checkpoints/step-{STEPS}.*")
        assert tensor_files(last) == ["tensors.safetensors"]
