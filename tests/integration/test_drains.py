"""Planned changes lose no step: real agents and workers, with the hash of the undisturbed run as the oracle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, run_script, wait_for

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights after six epochs in one process."""
    result = tmp_path_factory.mktemp("undisturbed") / "result.json"
    run_script(DIGITS, "--exact", "--result", str(result))
    return str(json.loads(result.read_text())["weights_sha256"])


def digits(job: Job, *options: str, step_time: float = 0.1) -> list[str]:
    """A command that saves only at the end by default, and is slow until :func:`hurry`."""
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "100000"]
    result = ["--result", str(job.directory / "result.json")]
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry"), DIGITS]
    return [*paced, "--exact", "--step-time", str(step_time), *saving, *result, *options]


def hurry(job: Job) -> None:
    (job.directory / "hurry").touch()


def result_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.directory / "result.json").read_text()))


def trains(job: Job, world_size: int, after: int = 0) -> int:
    """Wait until a round of a world size has done steps; return its number."""

    def probe() -> int:
        formed = [event for event in job.events("round_formed") if event["world_size"] == world_size]
        rounds = [event["round"] for event in formed if event["round"] > after]
        done = {event["round"] for event in job.events("first_step")}
        return rounds[-1] if rounds and rounds[-1] in done else 0

    return wait_for(f"steps of a round of world size {world_size}", probe, 60)


@pytest.mark.slow
def test_workers_whose_local_ranks_are_all_0_are_distinguished(job: Job) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--virtual-local-rank", command=digits(job))
    number = trains(job, 2)
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143
    assert [event["round"] for event in job.events("round_drained")] == [number]
    assert job.events("round_broken") == []


@pytest.mark.slow
def test_a_node_that_joins_and_one_that_leaves_cost_no_step(job: Job, undisturbed: str) -> None:
    command = digits(job, step_time=0.5)  # enough work is left for a resize to pay off
    host = job.node("a", command=command)
    first = trains(job, 1)
    guest = job.node("b", command=command)
    second = trains(job, 2, after=first)
    guest.signal(signal.SIGTERM)
    assert guest.wait(60) == 143
    hurry(job)
    assert host.wait(100) == 0, host.output

    assert job.events("round_broken") == []
    drained = job.events("round_drained")
    assert [(event["round"], event["kind"]) for event in drained] == [(first, "membership"), (second, "preemption")]
    result = result_of(job)
    assert result["resumed_step"] == drained[-1]["step"], "the step after the last one that was drained is the next"
    assert result["worlds"] == [1, 2, 1]
    assert result["restarts"] == 0
    assert result["weights_sha256"] == undisturbed


def _resumed(job: Job, *, nproc: int = 1) -> Agent:
    hurry(job)
    return job.launch("--standalone", "--nproc", str(nproc), command=digits(job), name="resumed")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_run_that_is_stopped_by_hand_resumes_at_its_step(job: Job, undisturbed: str, number: signal.Signals) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=digits(job), name="first")
    trains(job, 2)
    agent.signal(number)
    assert agent.wait(60) == 128 + number
    (drained,) = job.events("round_drained")
    assert not (job.directory / "result.json").exists(), "a run that is stopped has come to no result"
    resumed = _resumed(job)
    assert resumed.wait(100) == 0, resumed.output
    assert result_of(job)["resumed_step"] == drained["step"]
    assert result_of(job)["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_a_sigterm_to_one_worker_makes_all_stop_and_continue(job: Job, undisturbed: str) -> None:
    agent = job.launch("--standalone", "--nproc", "2", command=digits(job))
    trains(job, 2)
    os.kill(job.events("worker_started")[1]["pid"], signal.SIGTERM)
    wait_for("the drain's end", lambda: job.events("round_drained"))
    hurry(job)
    assert agent.wait(100) == 0, agent.output
    (drained,) = job.events("round_drained")
    assert "a worker on node" in drained["cause"]
    assert result_of(job)["resumed_step"] == drained["step"]
    assert result_of(job)["restarts"] == 0
    assert result_of(job)["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_a_script_alone_saves_on_sigterm_and_exits_with_143(job: Job, undisturbed: str) -> None:
    script = subprocess.Popen([sys.executable, *digits(job)], stdout=subprocess.PIPE)
    assert script.stdout is not None
    try:
        assert script.stdout.readline().startswith(b"step 1 ")
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 143
    finally:
        script.kill()
        script.wait()
        script.stdout.close()
    resumed = _resumed(job)
    assert resumed.wait(100) == 0, resumed.output
    assert result_of(job)["resumed_step"] >= 1
    assert result_of(job)["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_without_time_for_a_drain_the_round_is_broken_at_once(job: Job) -> None:
    agent = job.launch("--standalone", "--shutdown-timeout", "1", command=digits(job, step_time=1.0), name="slow")
    wait_for("a step", lambda: "step 1 " in agent.output, 60)
    agent.signal(signal.SIGTERM)
    assert agent.wait(30) == 143
    assert job.events("round_drained") == []
