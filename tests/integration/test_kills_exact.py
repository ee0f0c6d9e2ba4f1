"""Kills in the middle of a snapshot, a drain, a restore and a copy: the weights are those of the undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from changes import STEPS, Changes
from harness import Job, alive, wait_for

from elastic_launch.faults import WAYS, FaultPlan

pytestmark = pytest.mark.timeout(600)


def test_a_killed_worker_costs_no_more_than_an_interval(job: Job, undisturbed: str) -> None:
    """The representative of the slow tests in make test."""
    changes = Changes(job)
    agent = changes.alone("--nproc", "2")
    changes.trains(2, steps=10)
    os.kill(job.events("worker_started")[1]["pid"], signal.SIGKILL)
    changes.trains(2, after=1)
    result = changes.finish(agent)
    assert changes.kinds() == [("broken", 1, "crash")]
    assert changes.done_again() == changes.assert_no_more_lost_than_an_interval(1)
    assert (result["worlds"], result["restarts"]) == ([2, 2], 1)
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_worker_may_be_killed_in_a_step_then_in_a_snapshot_then_while_it_restores(job: Job, undisturbed: str) -> None:
    """The first worker's snapshot is complete, but not yet reported: the second worker must not overwrite it."""
    plan = FaultPlan.fail_at(0, at="snapshot", round=2) + FaultPlan.fail_at(0, at="restore", round=3)
    changes = Changes(job, "--die-within", "1:20:0")
    agent = changes.alone(plan=plan)
    changes.trains(1, after=3)
    result = changes.finish(agent)
    assert agent.output.count("planned fault: rank 0 kills itself in the snapshot of step ") == 1
    assert agent.output.count("planned fault: rank 0 kills itself as step ") == 1
    assert changes.kinds() == [("broken", number, "crash") for number in (1, 2, 3)]
    lost = changes.assert_no_more_lost_than_an_interval(1)
    assert changes.last(1) == 19
    assert changes.resumed(4) >= changes.resumed(2)
    lost += changes.last(2) - changes.resumed(4)
    assert changes.done_again() == lost
    assert result["restarts"] == 3
    assert result["hash"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "rank", "kind"),
    [
        ("drain", 0, "crash"),
        ("leave", 1, "node loss"),
        pytest.param("leave", 1, "crash", marks=pytest.mark.soak),
        pytest.param("drain", 1, "node loss", marks=pytest.mark.soak),
    ],
)
def test_a_kill_in_a_drain_costs_no_more_than_an_interval(
    job: Job, undisturbed: str, moment: str, rank: int, kind: str
) -> None:
    """Kills after all have agreed to stop, before or after the save: a worker that stays or leaves, or an agent."""
    changes = Changes(job)
    do = "kill" if rank == 0 else "hang"
    plan = FaultPlan.fail_at(rank, at=moment, do=do)
    both = [("a", 0), ("b", 1)]
    stays, leaves = (changes.node(k, "--join-settle", "100", nnodes="1:2", rank=r, plan=plan) for k, r in both)
    changes.trains(2, steps=10)
    leaves.signal(signal.SIGTERM)
    fault = f"planned fault: rank {rank} {WAYS[do]} "
    (stays if rank == 0 else leaves).says(fault, 60)
    if moment == "leave":
        # A loss breaks the round at once, and ends a worker that is about to save, too. At the moment before, none may
        # have saved: they compare their states first, for which each waits for all.
        step = int(leaves.output.split(fault)[1].split("step ")[1].split()[0].strip(","))
        wait_for("the save of the node that stays", lambda: changes.whole(1, "a") == step, 60)
    if rank == 1:
        (worker,) = [x["pid"] for x in job.started() if x["env"]["RANK"] == "1"]
        os.kill(worker if kind == "crash" else leaves.process.pid, signal.SIGKILL)
    assert leaves.wait(60) == (143 if kind == "crash" else -signal.SIGKILL), changes.outputs()
    changes.trains(1, after=1)
    result = changes.finish(stays)
    assert changes.kinds() == [("broken", 1, kind)]
    assert job.events("round_draining")
    lost = changes.assert_no_more_lost_than_an_interval(1, "a")
    if moment == "leave":
        assert lost == 0, "the node that stays has saved"
    assert changes.done_again() == lost
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_a_worker_killed_as_it_gives_or_gets_a_state_costs_no_step(job: Job, undisturbed: str) -> None:
    """A node that joins has no snapshot: in round 2 its sender is killed half way, in round 3 its receiver.

    The receiver has trained nothing yet, so its end costs no restart, and its node comes again a while later.
    """
    plan = FaultPlan.fail_at(0, at="restore", round=2) + FaultPlan.fail_at(1, at="restore", round=3)
    changes = Changes(job, step_time=0.3)  # enough is left for a resize to pay
    host = changes.node("a", plan=plan)
    changes.trains(1, steps=3)
    guest = changes.node("b", plan=plan)
    changes.trains(2, after=3)
    result = changes.finish(host, guest)
    assert "planned fault: rank 0 kills itself as step " in host.output
    assert "planned fault: rank 1 kills itself as step " in guest.output
    ends = [("drained", 1, "membership"), ("broken", 2, "crash"), ("broken", 3, "crash"), ("drained", 4, "membership")]
    assert changes.kinds() == ends
    drained = job.events("round_drained")[0]
    assert changes.resumed(4) == drained["step"] == changes.last(1)
    assert changes.done_again() == 0
    assert result["worlds"] == [1, 1, 2]
    assert result["restarts"] == 1
    assert result["hash"] == undisturbed


def gated(changes: Changes) -> dict[str, str]:
    """An environment in which agents and workers have the driver of ``tests/gated``."""
    changes.checkpoints.mkdir()
    paths = [str(Path(__file__).parents[1] / "gated"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def halted(changes: Changes) -> set[int]:
    """Processes that are blocked in a copy."""
    found = {int(path.suffix[1:]) for path in changes.checkpoints.glob("halted.*")}
    return {pid for pid in found if alive(pid)}


@pytest.mark.slow
def test_a_copy_is_made_again_when_its_process_is_killed_and_never_seen_when_its_agent_is(
    job: Job, undisturbed: str
) -> None:
    """Half a copy is not a checkpoint: the next run resumes from the previous one."""
    checkpoints = job.directory / "checkpoints"
    changes = Changes(job, "--checkpoint", f"gated://{checkpoints}", "--every", "10")
    env, gate = gated(changes), checkpoints / "gate"
    agent = changes.alone(name="first", env=env)
    wait_for("a checkpoint", changes.durable, 100)
    gate.touch()
    (copier,) = wait_for("a copy", lambda: halted(changes), 60)
    os.kill(copier, signal.SIGKILL)
    agent.says(f"The process that copies it ended with -{signal.SIGKILL:d}. Tried again in 0.5 s.")
    (copier,) = wait_for("a second attempt", lambda: halted(changes), 60)
    assert changes.trains(1, steps=25) == 1, "storage that stands still holds up no step"
    os.kill(copier, signal.SIGSTOP)  # it does not notice by itself that its agent is gone
    agent.kill()
    gate.unlink()
    wait_for("the copier's end", lambda: not alive(copier), 60)
    saved = changes.durable()
    assert saved[-1] < changes.last(1) - 1

    second = changes.alone(name="second", env=env)
    result = changes.finish(second)
    assert changes.resumed(1, "second") == saved[-1]
    assert changes.durable()[-1] == STEPS
    assert changes.done_again() == max(x["step"] for x in changes.steps() if x["node"] == "first") - saved[-1]
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_the_last_copy_is_made_by_another_node_when_its_agent_is_killed(job: Job, undisturbed: str) -> None:
    """Training is over then; only what the dead node was doing remains to be done."""
    checkpoints = job.directory / "checkpoints"
    changes = Changes(job, "--checkpoint", f"gated://{checkpoints}")
    env, gate = gated(changes), checkpoints / "gate"
    gate.touch()
    host = changes.node("a", "--join-settle", "100", nnodes="1:2", env=env)
    first = changes.node("b", rank=0, nnodes="1:2", env=env)
    changes.trains(2)
    changes.hurry()
    wait_for("the last copy", lambda: halted(changes), 100)
    first.kill()
    gate.unlink()
    result = changes.finish(host)
    assert changes.durable() == [STEPS]
    assert changes.kinds() == [("broken", 1, "node loss")]
    assert changes.done_again() == 0
    assert result["resumed"] == STEPS
    assert result["hash"] == undisturbed
