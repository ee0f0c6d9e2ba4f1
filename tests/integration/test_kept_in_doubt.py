"""Real trainings whose processes stay, but go back to a snapshot, as on GPUs, in exact mode: one hash."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import Changes, pids
from harness import SCRIPTS, Job, read_lines, run_script

from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "in_doubt.py")


def training(job: Job, *options: str, **how: Any) -> Changes:
    changes = Changes(job, *options, live=True, **how)
    changes.command.insert(0, SCRIPT)
    return changes


def repeated(changes: Changes) -> int:
    """How many steps were done again, each of which must have known it."""
    again = changes.done_again()
    assert sum(step["again"] for step in changes.steps()) == again
    return again


@pytest.mark.executed
def test_the_others_keep_their_processes_and_repeat_what_followed_the_last_snapshot(job: Job, undisturbed: str) -> None:
    changes = training(job)
    agent = changes.alone("--nproc", "3")
    changes.trains(3, steps=10)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGKILL)
    changes.trains(3, after=1)
    result = changes.finish(agent)
    last = len(job.events("round_formed"))
    assert {pids(job, last)[rank] for rank in (0, 2)} == {first[0], first[2]}
    lost = changes.assert_no_more_lost_than_an_interval(1)
    (incident,) = (each for each in changes.ledger()["incidents"] if each["kind"] == "crash")
    assert repeated(changes) == lost == incident["lost_steps"], incident
    assert (f"training goes back to the state of step {changes.resumed(2)}" in agent.output) == (lost > 0)
    assert result["hash"] == undisturbed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_an_update_that_came_out_wrong_on_the_others_is_undone(job: Job, undisturbed: str, rank: int) -> None:
    changes = training(job)
    agent = changes.alone("--nproc", "3", env={"SPOIL": f"1:9:{rank}"})
    changes.trains(3, after=1)
    result = changes.finish(agent)
    assert [kind for kind in changes.kinds() if kind[0] == "broken"] == [("broken", 1, "crash")]
    assert {*pids(job, 1).values()} & {*pids(job, 2).values()}
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_without_a_later_snapshot_they_go_back_to_the_first_step(job: Job, undisturbed: str) -> None:
    changes = training(job, "--due-until", "0")
    agent = changes.alone("--nproc", "2")
    changes.trains(2, steps=6)
    first = pids(job, 1)
    os.kill(first[1], signal.SIGKILL)
    changes.trains(2, after=1)
    result = changes.finish(agent)
    assert changes.resumed(2) == 0
    assert pids(job, 2)[0] == first[0]
    assert repeated(changes) >= 6
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_planned_changes_cost_no_step_and_a_lost_node_those_since_the_last_snapshot(job: Job, undisturbed: str) -> None:
    changes = training(job, step_time=0.2)  # it lasts until all have come
    result, broken = changes.joined_left_and_lost()
    repeated(changes)
    events = [e for e in job.events() if e["event"] == "worker_kept"]
    assert {e["pid"] for e in events if e["round"] > broken} == {pids(job, 1)[0]}
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_where_nothing_is_kept_in_memory_each_process_ends_with_its_round(job: Job, undisturbed: str) -> None:
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "5"]
    changes = training(job, *saving)
    agent = changes.alone("--nproc", "2", "--no-snapshots")
    changes.trains(2, steps=12)
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    changes.trains(2, after=1)
    result = changes.finish(agent)
    assert not {*pids(job, 1).values()} & {*pids(job, 2).values()}
    assert result["hash"] == undisturbed


@pytest.mark.slow
def test_all_that_is_saved_goes_back_in_place(job: Job, tmp_path: Path) -> None:
    """Compiled model, scheduler, average, scaler, and a layer that is unfrozen between the snapshot and the fault."""
    script = str(SCRIPTS / "registered.py")
    run_script(script, str(tmp_path))
    (alone,) = read_lines(tmp_path / "results.jsonl")
    plan = FaultPlan.fail_at(1, 14).environment()
    agent = job.launch("--standalone", "--nproc", "2", command=[SCRIPT, script, str(job.work)], env=plan)
    assert agent.wait(100) == 0, agent.output
    assert job.event("training_begun")["step"] == 0
    (went_back,) = [event["pid"] for event in job.events("worker_kept")]
    results = read_lines(job.work / "results.jsonl")
    for result in results:
        for name in ("hash", "average", "averaged", "scale", "lr"):
            assert result[name] == alone[name], name
    (kept,) = [result for result in results if result["pid"] == went_back]
    assert "training goes back to the state of step 6: steps 7 to 1" in agent.output
    assert kept["losses"] == alone["losses"], "each step once"
    assert kept["seen"] - kept["broken_off"] in (alone["seen"] + 7, alone["seen"] + 8)
    assert kept["graphs"] == alone["graphs"]


@pytest.mark.slow
def test_each_process_that_is_kept_is_told_which_steps_it_has_done_itself(job: Job, tmp_path: Path) -> None:
    """One of two has done the step that a third has died in, and the other one has not."""
    script = str(SCRIPTS / "registered.py")
    run_script(script, str(tmp_path))
    (alone,) = read_lines(tmp_path / "results.jsonl")
    spoiled = {"SPOIL": "1:9:1", "LATE": "2"}
    agent = job.launch("--standalone", "--nproc", "3", command=[SCRIPT, script, str(job.work)], env=spoiled)
    assert agent.wait(100) == 0, agent.output
    kept = {event["pid"] for event in job.events("worker_kept")}
    assert len(kept) == 2
    assert "training goes back to the state of step 6: steps 7 to 9" in agent.output
    results = read_lines(job.work / "results.jsonl")
    assert {result["hash"] for result in results} == {alone["hash"]}
    for result in results:
        assert result["losses"] == alone["losses"] or result["pid"] not in kept


@pytest.mark.slow
def test_the_others_keep_their_processes_if_one_dies_before_an_evaluation(job: Job, tmp_path: Path) -> None:
    """They find it as they confirm the state that is to be evaluated."""
    script = str(SCRIPTS / "evaluating.py")
    run_script(script, str(tmp_path))
    (alone,) = read_lines(tmp_path / "results.jsonl")
    command = [SCRIPT, script, str(job.work)]
    agent = job.launch("--standalone", "--nproc", "3", command=command, env={"SPOIL": "1:10:1"})
    assert agent.wait(100) == 0, agent.output
    kept = {event["pid"] for event in job.events("worker_kept")}
    assert len(kept) == 2
    for result in read_lines(job.work / "results.jsonl"):
        assert (result["hash"], result["history"]) == (alone["hash"], alone["history"])
        assert result["evaluations"] == alone["evaluations"] or result["pid"] not in kept


@pytest.mark.slow
@pytest.mark.parametrize("place", ["between", pytest.param("second", marks=pytest.mark.soak)])
def test_a_step_of_two_passes_is_done_again_as_a_whole(job: Job, tmp_path: Path, place: str) -> None:
    script = str(SCRIPTS / "passes.py")
    run_script(script, str(tmp_path))
    alone = json.loads((tmp_path / "result.json").read_text())
    ends = ["--end", f"1:1:5:{place}:kill", "--end", f"2:0:10:{place}:kill"]
    command = [SCRIPT, script, str(job.directory), *ends]
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(150) == 0, agent.output
    result = json.loads((job.directory / "result.json").read_text())
    assert result["hashes"] == alone["hashes"]
    assert (result["updates"], result["restarts"]) == (alone["updates"], 2)
    assert len(job.events("worker_kept")) == 2
