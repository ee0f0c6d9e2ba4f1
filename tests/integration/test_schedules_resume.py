"""Workers that are killed: learning rates, evaluations and weights are those of the undisturbed run, in every form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, SLOWNESS, Job, read_lines, run_script

from elastic_launch import snapshot
from elastic_launch.faults import FaultPlan

pytestmark = pytest.mark.timeout(600)

SCRIPT = str(SCRIPTS / "schedules.py")
LOGGERS = str(Path(__file__).parents[2] / "examples" / "loggers" / "train.py")
EVALUATED = {"warm-up": [7, 14, 21, 28, 30], "epochs": [5, 10, 15, 20, 25, 30], "loop": [5, 10, 15, 20, 25, 30]}
PLAN = FaultPlan.fail_at(1, 9) + FaultPlan.fail_at(0, 15, round=2) + FaultPlan.fail_at(1, 22, round=3)

FLAGS = pytest.mark.parametrize(
    "flags",
    [pytest.param((), id="live"), pytest.param(("--no-live",), id="restarted", marks=pytest.mark.soak)],
)


def alone(form: str, directory: Path) -> dict[str, Any]:
    """The result of the training in one process, without a launcher."""
    directory.mkdir()
    run_script(SCRIPT, form, str(directory))
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
@FLAGS
@pytest.mark.parametrize(
    "form", [pytest.param("warm-up", marks=pytest.mark.soak), "epochs", pytest.param("loop", marks=pytest.mark.soak)]
)
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
@FLAGS
def test_evaluations_by_the_clock_are_on_all_ranks_after_the_same_steps(job: Job, flags: tuple[str, ...]) -> None:
    result = killed(job, "clock", *flags)
    assert [step for step, *_ in result["rates"]] == list(range(1, 31))
    evaluated = [step for step, *_ in result["evaluations"]]
    assert evaluated[-1] == 30
    assert evaluated == sorted(set(evaluated))
    assert 3 <= len(evaluated) < 20, "every 0.2 s, of steps of about 0.05 s"


@pytest.mark.slow
@FLAGS
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_loggers_lines_are_those_of_the_undisturbed_run(job: Job, rank: int, flags: tuple[str, ...]) -> None:
    whole, log = job.directory / "whole.jsonl", job.work / "log.jsonl"
    run_script(LOGGERS, "--log", str(whole))
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


def logged_by_wandb(directory: Path) -> list[dict[str, Any]]:
    """What the last offline run holds: a file of records in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (directory / "wandb" / "latest-run").glob("run-*.wandb")
    data, at, held, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if not kind or at % 32768 > 32768 - 7:  # a block's rest is not used
            at += 32768 - at % 32768
            continue
        held, at = held + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            record, held = Record.FromString(held), b""
            if record.HasField("history"):
                items = record.history.item
                found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return found


@pytest.mark.slow
def test_trackers_have_each_step_once_and_the_incidents(job: Job) -> None:
    for package in ("wandb", "mlflow"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}, which make env with --frameworks brings")
    board, store = job.work / "board", f"file://{job.work / 'mlflow'}"
    command = [LOGGERS, "--log", str(job.work / "log.jsonl"), "--wandb", str(board), "--mlflow", store]
    env = {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true"}
    flags = ("--standalone", "--nproc", "2", "--no-live")
    agent = job.launch(*flags, command=command, env={**env, **FaultPlan.fail_at(0, 10).environment()})
    assert agent.wait(200) == 0, agent.output
    assert len(job.events("round_broken")) == 1
    steps = logged_by_wandb(board)
    assert [step["_step"] for step in steps] == list(range(1, 61))
    assert [step["loss"] for step in steps] == [x["loss"] for x in read_lines(job.work / "log.jsonl") if "loss" in x]
    assert ["restart: rank 0" in line["text"] for line in read_lines(board / "loggers-incidents.jsonl")] == [True]
    read = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("elastic-launch").experiment_id])
steps = [[metric.step for metric in client.get_metric_history(run.info.run_id, name)] for name in ("loss", "lr")]
print(json.dumps([steps, run.data.tags]))
"""
    command = [sys.executable, "-W", "ignore", "-c", read, store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100 * SLOWNESS, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    found, tags = json.loads(done.stdout)
    assert found == [list(range(1, 61))] * 2
    assert [text.startswith("restart: rank 0") for name, text in tags.items() if name.startswith("incident.")] == [True]
