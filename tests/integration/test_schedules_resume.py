"""Workers that are killed: learning rates, evaluations and weights are those of the undisturbed run, in every form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, SLOWNESS, Job, read_lines

from elastic_launch import snapshot
from elastic_launch.faults import FaultPlan

pytestmark = pytest.mark.timeout(600)

SCRIPT = str(SCRIPTS / "schedules.py")
LOGGERS = str(Path(__file__).parents[2] / "examples" / "loggers" / "train.py")
EVALUATED = {"warm-up": [7, 14, 21, 28, 30], "epochs": [5, 10, 15, 20, 25, 30], "loop": [5, 10, 15, 20, 25, 30]}
PLAN = FaultPlan.fail_at(1, 9) + FaultPlan.fail_at(0, 15, round=2) + FaultPlan.fail_at(1, 22, round=3)


def alone(form: str, directory: Path) -> dict[str, Any]:
    """The result of the training in one process, without a launcher."""
    directory.mkdir()
    subprocess.run([sys.executable, SCRIPT, form, directory], check=True, capture_output=True, timeout=100 * SLOWNESS)
    (result,) = read_lines(directory / "results.jsonl")
    return result


def killed(job: Job, form: str, *flags: str, options: tuple[str, ...] = (), plan: FaultPlan = PLAN) -> Any:
    """The result of the training on two workers, of which some are killed."""
    command = [SCRIPT, form, str(job.work), *options]
    agent = job.launch("--standalone", "--nproc", "2", *flags, command=command, env=plan.environment())
    assert agent.wait(100) == 0, agent.output
    first, second = read_lines(job.work / "results.jsonl")
    for key in ("hash", "rates", "evaluations"):
        assert first[key] == second[key], key
    return first


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-live",)], ids=["live", "restarted"])
@pytest.mark.parametrize("form", EVALUATED)
def test_rates_and_evaluations_are_those_of_the_undisturbed_run(job: Job, form: str, flags: tuple[str, ...]) -> None:
    undisturbed = alone(form, job.directory / "alone")
    assert [step for step, *_ in undisturbed["rates"]] == list(range(1, 31))
    assert len({rate for _, rate in undisturbed["rates"]}) > 4
    assert [step for step, *_ in undisturbed["evaluations"]] == EVALUATED[form]
    result = killed(job, form, *flags)
    assert len(job.events("round_broken")) == 3
    for key in ("hash", "rates", "evaluations"):
        assert result[key] == undisturbed[key], key


@pytest.mark.slow
def test_a_loops_evaluation_that_a_kill_breaks_begins_again_in_the_next_round(job: Job) -> None:
    undisturbed = alone("loop", job.directory / "alone")
    options = ("--die-in-evaluation", "1:10:1")
    result = killed(job, "loop", options=options, plan=FaultPlan())
    assert len(job.events("worker_kept")) == 1
    for key in ("hash", "rates", "evaluations"):
        assert result[key] == undisturbed[key], key
    found = {info.step: info.meta["metrics"]["accuracy"] for info in snapshot.find(job.work / "checkpoints")}
    best = max(metrics["accuracy"] for _, _, metrics in undisturbed["evaluations"])
    assert best in found.values()
    assert 30 in found


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-live",)], ids=["live", "restarted"])
def test_evaluations_by_the_clock_are_on_all_ranks_after_the_same_steps(job: Job, flags: tuple[str, ...]) -> None:
    result = killed(job, "clock", *flags)
    assert [step for step, *_ in result["rates"]] == list(range(1, 31))
    evaluated = [step for step, *_ in result["evaluations"]]
    assert evaluated[-1] == 30
    assert evaluated == sorted(set(evaluated))
    assert 3 <= len(evaluated) < 20, "every 0.2 s, of steps of about 0.05 s"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-live",)], ids=["live", "restarted"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loggers_lines_are_those_of_the_undisturbed_run(job: Job, rank: int, flags: tuple[str, ...]) -> None:
    whole, log = job.directory / "whole.jsonl", job.work / "log.jsonl"
    command = [sys.executable, LOGGERS, "--log", str(whole)]
    subprocess.run(command, check=True, capture_output=True, timeout=100 * SLOWNESS)
    plan = FaultPlan.fail_at(rank, 10) + FaultPlan.fail_at(rank, 33, round=2) + FaultPlan.fail_at(rank, 47, round=3)
    flags = ("--standalone", "--nproc", "2", *flags)
    agent = job.launch(*flags, command=[LOGGERS, "--log", str(log)], env=plan.environment())
    assert agent.wait(100) == 0, agent.output
    assert len(job.events("round_broken")) == 3
    lines = read_lines(whole)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61))
    assert [line["step"] for line in lines if "evaluation" in line] == list(range(10, 61, 10))
    assert all(line["grad_norm"] > 0 for line in lines if "loss" in line)
    assert read_lines(log) == lines


@pytest.mark.slow
def test_tensorboard_hides_what_was_done_again(job: Job) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard, which make env with --frameworks brings")
    command = [LOGGERS, "--log", str(job.work / "log.jsonl"), "--tensorboard", str(job.work / "board")]
    flags = ("--standalone", "--nproc", "2", "--no-live")
    agent = job.launch(*flags, command=command, env=FaultPlan.fail_at(0, 10).environment())
    assert agent.wait(100) == 0, agent.output
    read = """
import json, sys
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
board = EventMultiplexer().AddRunsFromDirectory(sys.argv[1]).Reload()
print(json.dumps([event.step for event in board.Scalars(".", "loss")]))
"""
    done = subprocess.run([sys.executable, "-c", read, job.work / "board"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(range(1, 61))
