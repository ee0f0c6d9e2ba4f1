"""A node that joins late has, in its own directory, what an earlier run has left there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import SCRIPTS, Job, wait_for

from elastic_launch import snapshot

SCRIPT = str(SCRIPTS / "late_node.py")


def saved(directory: Path) -> list[int]:
    return [info.step for info in snapshot.find(directory / "saved")]


@pytest.mark.parametrize("form", ["own", "dcp"])
def test_a_run_goes_on_from_its_own_state_and_not_from_what_a_node_that_joined_late_had(job: Job, form: str) -> None:
    """The earlier runs in that node's directory were two, so that their checkpoints count as newer by number."""
    gate = job.directory / "gate"
    first, late = job.directory / "a", job.directory / "b"
    for directory in (first, late):
        directory.mkdir()

    def command(epochs: int) -> list[str]:
        return [SCRIPT, str(epochs), form, str(gate)]

    for epochs in (1, 2):
        agent = job.launch("--standalone", name=f"earlier-{epochs}", command=command(epochs), cwd=late)
        assert agent.wait(100) == 0, agent.output
    assert saved(late)[0] == 20
    gate.touch()
    one = job.node("one", nnodes="1:2", command=command(3), cwd=first)
    wait_for("a checkpoint", lambda: saved(first), 60)
    two = job.node("two", nnodes="1:2", command=command(3), cwd=late)
    wait_for("the late node's part", lambda: "round 2 formed" in one.output, 60)
    gate.unlink()
    for agent in (one, two):
        assert agent.wait(100) == 0, agent.output
    again = [
        job.node(f"again-{name}", nnodes="2:2", endpoint="", command=command(4), cwd=directory)
        for name, directory in (("one", first), ("two", late))
    ]
    for agent in again:
        assert agent.wait(100) == 0, agent.output
    began = re.findall(r"began at step (\d+)", again[0].output + again[1].output)
    assert set(began) == {"30"}, (began, saved(first), saved(late))
