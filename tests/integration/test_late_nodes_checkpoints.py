"""A node that joins late has, in its own directory, what an earlier run has left there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import SCRIPTS, Agent, Job, wait_for

from elastic_launch import snapshot

SCRIPT = str(SCRIPTS / "late_node.py")


def saved(directory: Path) -> list[int]:
    return [info.step for info in snapshot.find(directory / "saved")]


MEMORY, STORAGE = (), ("--no-snapshots", "--no-live")
"""What the round with the late node goes on from."""


@pytest.mark.parametrize(
    ("form", "flags"),
    [("safetensors", MEMORY), ("dcp", MEMORY), ("safetensors", STORAGE)],
    ids=["own", "dcp", "stored"],
)
def test_a_run_goes_on_from_its_own_state_and_not_from_what_a_node_that_joined_late_had(
    job: Job, form: str, flags: tuple[str, ...]
) -> None:
    """The earlier runs in that node's directory were two, so that their checkpoints count as newer by number."""
    gate = job.directory / "gate"
    first, late = job.directory / "a", job.directory / "b"
    for directory in (first, late):
        directory.mkdir()

    def command(epochs: int) -> list[str]:
        return [SCRIPT, str(epochs), form, str(gate)]

    def node(name: str, epochs: int, nnodes: str, directory: Path) -> Agent:
        return job.node(name, *flags, nnodes=nnodes, command=command(epochs), cwd=directory)

    for epochs in (1, 2):
        agent = job.launch("--standalone", name=f"earlier-{epochs}", command=command(epochs), cwd=late)
        assert agent.wait(100) == 0, agent.output
    assert saved(late)[0] == 20
    gate.touch()
    one = node("one", 3, "1:2", first)
    wait_for("a checkpoint", lambda: saved(first), 60)
    two = node("two", 3, "1:2", late)
    wait_for("the late node's part", lambda: "round 2 formed" in one.output, 60)
    before = saved(first)[0]
    wait_for("the round", lambda: "round 2 begins" in one.output, 60)
    gate.unlink()
    for agent in (one, two):
        assert agent.wait(100) == 0, agent.output
    (again,) = re.findall(r"round 2 begins with step (\d+)", one.output)
    assert before - 1 <= int(again) < 20
    for agent in [node("again-one", 4, "2:2", first), node("again-two", 4, "2:2", late)]:
        assert agent.wait(100) == 0, agent.output
        assert "round 1 begins with step 31" in agent.output


def test_a_run_goes_on_from_what_one_node_has_though_another_one_is_new(job: Job) -> None:
    first, new = job.directory / "a", job.directory / "b"
    for directory in (first, new):
        directory.mkdir()
    agent = job.launch("--standalone", name="earlier", command=[SCRIPT, "1", "safetensors", "gate"], cwd=first)
    assert agent.wait(100) == 0, agent.output
    again = [
        job.node(name, nnodes="2:2", command=[SCRIPT, "2", "safetensors", "gate"], cwd=directory)
        for name, directory in (("one", first), ("two", new))
    ]
    for agent in again:
        assert agent.wait(100) == 0, agent.output
        assert "round 1 begins with step 11" in agent.output
    assert saved(first)[0] == saved(new)[0] == 20
