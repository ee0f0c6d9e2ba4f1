"""The newest state wins, wherever it is: a node that was left out has an older state in memory than on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import Changes, ctl
from etcd_servers import Member, cluster, endpoints
from harness import Agent, Job, wait_for

pytestmark = pytest.mark.timeout(600)  # three rounds each, of workers that import torch


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Member]]:
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory) as members:
        yield members


class Pair:
    """Two nodes that save every fifth step; ``a`` leads, and comes first."""

    def __init__(self, job: Job, servers: list[Member], checkpoint: Path, step_time: float = 0.2) -> None:
        self.changes = Changes(job, "--checkpoint", str(checkpoint), "--every", "5", step_time=step_time)
        self.checkpoints = checkpoint
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(servers), "--rdzv-id", "run"]
        timing = ["--rdzv-conf", "dead_after=4,beat=0.5,join_settle=60"]
        self.where = where
        self._flags = ["--nnodes", "1:2", "--nproc", "1", *where, *timing]
        self.a = self.node("a")
        self.a.says("leads the run")
        wait_for("the first node", lambda: job.events("node_joined"))  # which may lead before it has joined
        self.b = self.node("b")

    def node(self, name: str) -> Agent:
        cwd = self.changes.job.directory / name
        cwd.mkdir(exist_ok=True)
        options = {"name": name, "command": self.changes.command, "env": {"NODE": name}, "cwd": cwd}
        return self.changes.job.launch(*self._flags, "--node-id", name, **options)

    def saved(self, above: int, rounds: int = 0) -> list[int]:
        """Durable steps above one, of rounds above one, in order."""
        found = [path.parent.name.split(".") for path in self.checkpoints.glob("step-*/manifest.json")]
        steps = [int(step.removeprefix("step-")) for step, number, _ in found if int(number[1:]) > rounds]
        return sorted(step for step in steps if step > above)


@pytest.mark.slow
def test_a_spare_with_an_older_state_in_memory_resumes_from_the_durable_one(
    job: Job, servers: list[Member], tmp_path: Path, undisturbed: str
) -> None:
    pair = Pair(job, servers, tmp_path / "checkpoints")
    both = pair.changes.trains(2, steps=10)
    done = ctl("resize", "1:1", *pair.where)
    assert done.returncode == 0, done
    alone = pair.changes.trains(1, after=both)
    left = pair.changes.resumed(alone)
    saved = wait_for("a newer checkpoint", lambda: pair.saved(left + 10))
    pair.a.kill()
    last = pair.changes.trains(1, after=alone)
    assert pair.changes.resumed(last, "b") >= saved[-1] > left
    # What the new branch saves is the newest there is, and stays.
    wait_for("its own checkpoint", lambda: pair.saved(saved[-1], alone))
    result = pair.changes.finish(pair.b)
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_node_that_thaws_with_an_older_state_in_memory_resumes_from_the_durable_one(
    job: Job, servers: list[Member], tmp_path: Path, undisturbed: str
) -> None:
    pair = Pair(job, servers, tmp_path / "checkpoints")
    both = pair.changes.trains(2, steps=10)
    pids = pair.b.freeze()
    alone = pair.changes.trains(1, after=both)
    left = pair.changes.resumed(alone)
    saved = wait_for("a newer checkpoint", lambda: pair.saved(left + 10))
    pair.a.kill()
    pair.b.thaw(pids)
    last = pair.changes.trains(1, after=alone)
    assert pair.changes.resumed(last, "b") >= saved[-1] > left
    wait_for("its own checkpoint", lambda: pair.saved(saved[-1], alone))
    result = pair.changes.finish(pair.b)
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_with_separate_directories_the_newest_state_of_either_node_is_the_branch_that_continues(
    job: Job, servers: list[Member], undisturbed: str
) -> None:
    """The state that b cannot see is abandoned; when its node is back, the current branch wins on both."""
    pair = Pair(job, servers, Path("checkpoints"))
    both = pair.changes.trains(2, steps=10)
    assert ctl("resize", "1:1", *pair.where).returncode == 0
    alone = pair.changes.trains(1, after=both)
    pair.checkpoints = job.directory / "a" / "checkpoints"
    left = pair.changes.resumed(alone)
    wait_for("a newer checkpoint", lambda: pair.saved(left + 10))
    pair.a.kill()
    older = pair.changes.trains(1, after=alone, steps=10)
    assert pair.changes.resumed(older, "b") == left
    assert ctl("resize", "1:2", *pair.where).returncode == 0
    reached = pair.changes.resumed(older, "b")
    back = pair.node("a")
    again = pair.changes.trains(2, after=older)
    assert pair.changes.resumed(again) >= reached + 10, "b's branch, not what a has on its disk"
    wait_for("its checkpoint on a's disk", lambda: pair.saved(0, older))
    result = pair.changes.finish(pair.b, back)
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_checkpoints_are_added_while_etcd_is_gone_and_the_log_and_the_status_say_so(
    job: Job, servers: list[Member], tmp_path: Path, undisturbed: str
) -> None:
    """The leader cannot know whether another node leads meanwhile, so it removes nothing."""
    pair = Pair(job, servers, tmp_path / "checkpoints", step_time=0.5)
    both = pair.changes.trains(2, steps=1)
    wait_for("a checkpoint", lambda: pair.saved(0), 60)
    for member in servers:
        member.freeze()
    pair.a.says("training goes on, and checkpoints are added, but none is removed until it does", 60)
    wait_for("more checkpoints than are kept", lambda: len(pair.saved(0)) > 3, 90)
    shown = ctl("status", "--log-dir", str(job.logs))
    assert "that the leader still leads; its node adds checkpoints and removes none" in shown.stdout, shown
    for member in servers:
        member.thaw()
    wait_for("checkpoints that are removed", lambda: len(pair.saved(0)) <= 3, 60)
    assert "that the leader still leads" not in ctl("status", "--log-dir", str(job.logs)).stdout
    assert {event["round"] for event in job.events("round_formed")} == {both}
    result = pair.changes.finish(pair.a, pair.b)
    assert result["hash"] == undisturbed
