"""Lost nodes: the newest remaining snapshot is used, else storage; the weights are those of the undisturbed run."""

from __future__ import annotations

import os
import signal

import pytest
from changes import Changes
from harness import Job, wait_for

from elastic_launch.faults import FaultPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_where_the_newest_snapshot_is_lost_with_its_node_an_older_one_serves(job: Job, undisturbed: str) -> None:
    """Node a has only the drain's snapshot: its next one is never complete, while b has complete ones."""
    changes = Changes(job, step_time=0.3)  # enough is left for a resize to pay
    host = changes.node("a", plan=FaultPlan.fail_at(0, at="snapshot", round=2, do="hang"))
    changes.trains(1)
    guest = changes.node("b")
    host.says("planned fault: rank 0 hangs in the snapshot of step", 100)
    wait_for("the other's", lambda: changes.whole(2, "b") > changes.whole(1, "a"), 60)
    guest.kill()
    changes.trains(1, after=2)
    result = changes.finish(host)
    (drained,) = job.events("round_drained")
    assert changes.whole(2, "a") == 0
    assert changes.resumed(3) == drained["step"]
    assert changes.kinds() == [("drained", 1, "membership"), ("broken", 2, "node loss")]
    assert changes.done_again() == changes.last(2) - drained["step"] > 0
    assert result["restarts"] == 0
    assert result["hash"] == undisturbed


@pytest.mark.parametrize("saved", [False, True])
def test_where_the_only_snapshot_is_lost_with_its_node_storage_serves_or_the_beginning(
    job: Job, undisturbed: str, saved: bool
) -> None:
    options = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "2"] if saved else []
    changes = Changes(job, *options)
    plan = FaultPlan.fail_at(1, at="snapshot", do="hang")
    host = changes.node("a", "--join-settle", "100", nnodes="1:2", plan=plan)
    first = changes.node("b", rank=0, nnodes="1:2", plan=plan)
    host.says("planned fault: rank 1 hangs in the snapshot of step", 100)
    wait_for("the other's", lambda: changes.whole(1, "b"), 60)
    served = wait_for("a checkpoint", changes.durable, 60)[-1] if saved else 0
    first.kill()
    changes.trains(1, after=1)
    result = changes.finish(host)
    assert changes.whole(1, "a") == 0
    assert changes.resumed(2) == served
    assert changes.done_again() == changes.last(1) - changes.resumed(2)
    assert changes.kinds() == [("broken", 1, "node loss")]
    assert result["hash"] == undisturbed


def test_where_all_nodes_are_lost_storage_serves(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), "--every", "10")
    lost = [changes.node(name, nnodes="2:2") for name in "ab"]
    wait_for("checkpoints", lambda: len(changes.durable()) > 1, 100)
    for node in lost:
        node.kill()
    saved = changes.durable()[-1]
    new = [changes.node(k, nnodes="2:2", rank=r, env={"NODE": f"new-{k}"}) for k, r in (("a", 0), ("b", 1))]
    result = changes.finish(*new)
    assert changes.resumed(1, "new-a") == saved >= 20
    assert changes.done_again() == changes.last(1, "ab") - saved
    assert result["worlds"] == [2, 2]
    assert result["hash"] == undisturbed


def test_where_memory_has_no_room_any_more_storage_serves(job: Job, undisturbed: str) -> None:
    """Training does not resume from the old snapshot, which still exists."""
    options = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "5", "--room-until", "10"]
    changes = Changes(job, *options)
    agent = changes.alone(plan=FaultPlan.fail_at(0, 40, do="hang"))
    agent.says("planned fault: rank 0 hangs after step 40", 100)
    wait_for("the last checkpoint before", lambda: changes.durable()[-1:] == [35], 60)
    assert 0 < changes.whole(1) < 10
    os.kill(job.event("worker_started")["pid"], signal.SIGKILL)
    changes.trains(1, after=1)
    result = changes.finish(agent)
    assert changes.resumed(2) == 35
    assert changes.done_again() == 5
    assert result["restarts"] == 1
    assert result["hash"] == undisturbed
