"""Which checkpoints a training keeps: the newest, the best, and milestones."""

from __future__ import annotations

import math
import runpy
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Job
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch import snapshot
from elastic_launch.contract import CopyJob
from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan
from elastic_launch.snapshot.storage import background
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

SCRIPT = str(SCRIPTS / "keeping.py")
SCORES = [3, 9, 5, 7, 1]  # after the steps 4, 8, 12, 16 and 20
DATA = TensorDataset(torch.ones(16, 3), torch.ones(16, 1))


def kept(directory: Path) -> dict[int, float | None]:
    """The scores of the checkpoints by their steps, the oldest first."""
    infos = snapshot.find(directory)[::-1]
    return {info.step: info.meta.get("metrics", {}).get("score") for info in infos}


def test_a_trainer_saves_after_each_evaluation_and_keeps_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(tmp_path), *map(str, SCORES)])
    runpy.run_path(SCRIPT, run_name="__main__")
    assert kept(tmp_path) == {8: 9, 12: 5, 16: 7, 20: 1}


@pytest.mark.slow
@pytest.mark.parametrize("at", [8, *(pytest.param(x, marks=pytest.mark.soak) for x in (7, 9))])
def test_a_killed_worker_changes_nothing_of_what_is_kept(job: Job, at: int) -> None:
    """After the kill between an evaluation and its checkpoint, the next step is saved as evaluated."""
    directory = job.work / "checkpoints"
    agent = job.launch(
        *("--standalone", "--nproc", "2", "--max-restarts", "1"),
        command=[SCRIPT, str(directory), *map(str, SCORES)],
        env=FaultPlan.fail_at(1, at).environment(),
    )
    assert agent.wait(90) == 0, agent.output
    found = kept(directory)
    assert {9, 7, 1} <= set(found.values()) <= {9, 5, 7, 1}, agent.output
    assert next(step for step, score in found.items() if score == 9) in (8, 9, 10)


@pytest.mark.parametrize("step", [8, None])
def test_a_process_that_goes_back_has_no_results_of_later_states(tmp_path: Path, step: int | None) -> None:
    """Else it alone would save after that step, which all ranks do together, or an earlier state with its results."""
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=100, keep_best=el.Best("score")))
    checkpoint.record({"score": 3.0}, step)
    assert checkpoint.due_everywhere(8) is (step == 8)
    assert checkpoint.wanted(4)
    checkpoint.forget_results()
    assert not checkpoint.due_everywhere(8)
    assert not checkpoint.wanted(4)
    assert not checkpoint.metrics


def test_results_are_wanted_unless_better_ones_are_being_saved(tmp_path: Path) -> None:
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=100, keep_best=el.Best("score", "max", count=2)))

    def wanted(score: float) -> bool:
        checkpoint.record({"score": score})
        assert checkpoint.take_results() == {"score": score}
        return checkpoint.route(World(), True, CopyJob(1, 7, 1), 0).results

    assert [wanted(score) for score in (5.0, 7.0, 4.0, math.nan, 5.0, 6.0, 5.5)] == [
        *(True, True, False, False),
        *(True, True, False),
    ]
    assert not checkpoint.route(World(), False, CopyJob(1, 7, 1), 0).results
    assert checkpoint.take_results() == {}
    assert not checkpoint.route(World(), True, CopyJob(1, 7, 1), 0).results


class Metric(StrEnum):
    SCORE = "score"


def test_a_metric_may_be_named_by_an_enum(tmp_path: Path) -> None:
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=100, keep_best=el.Best("score")))
    checkpoint.record({Metric.SCORE: 3.0})
    assert [type(name) for name in checkpoint.take_results()] == [str]
    assert checkpoint.take_results() == {}


@pytest.mark.parametrize("how", ["put off", "lost", "torn"])
def test_the_results_of_a_snapshot_that_is_not_saved_are_for_the_next_one(tmp_path: Path, how: str) -> None:
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=100, keep_best=el.Best("score")))
    checkpoint.record({"score": 3.0}, 8)
    assert checkpoint.take_results() == {"score": 3.0}
    checkpoint.requested(8, AgentLink())
    assert not checkpoint.wanted(8)
    if how == "put off":
        checkpoint.put_off(8)
    elif how == "lost":
        checkpoint.lost(8, "there is no memory")
    else:
        checkpoint.torn(8)
    assert checkpoint.wanted(9)
    assert checkpoint.take_results() == {"score": 3.0}
    checkpoint.record({"score": 2.0})
    checkpoint.put_off(9)
    assert checkpoint.take_results() == {"score": 2.0}


def test_the_best_is_saved_however_slow_the_storage_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, write: Any = background.write, **options: Any) -> Any:
        time.sleep(0.3)
        return write(*args, **options)

    monkeypatch.setattr(background, "write", slow)
    model, optimizer = _model()
    saving = el.Checkpoint(tmp_path, every=2, keep=1, keep_best=el.Best("score", "max"))
    loader = el.ElasticLoader(DATA, el.GlobalBatch(8, 8))
    for step in run.steps(loader, model, optimizer, until="9ba", checkpoint=saving):
        for x, y in step:
            step.backward(nn.functional.mse_loss(step.model(x), y))
        step.update()
        if step.number in (3, 5, 6):
            run.record({"score": {3: 0.7, 5: 0.9, 6: 0.8}[step.number]})
    assert kept(tmp_path) == {5: 0.9, 9: None}


def _written(run: Run) -> None:
    """Wait until nothing is being written, since newer states replace those that are waiting."""
    checkpoint = run._engine.checkpoint
    assert checkpoint is not None
    assert checkpoint._writer is None or checkpoint._writer.flush(30)


@pytest.fixture
def run() -> Iterator[Run]:
    with el.session() as run:
        yield run


def _model() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_a_loop_over_steps_records_its_own_evaluations(run: Run, tmp_path: Path) -> None:
    model, optimizer = _model()
    saving = el.Checkpoint(tmp_path, every="1h", keep=1, keep_best=el.Best("score", "max"))
    loader = el.ElasticLoader(DATA, el.GlobalBatch(8, 8))
    for step in run.steps(loader, model, optimizer, until="9ba", checkpoint=saving):
        for x, y in step:
            step.backward(nn.functional.mse_loss(step.model(x), y))
        step.update()
        _written(run)
        if step.number % 3 == 0:
            run.record({"score": {3: 0.8, 6: 0.4, 9: 0.1}[step.number]})
    assert kept(tmp_path) == {3: 0.8, 9: 0.1}


def test_a_loop_of_its_own_records_before_the_boundary(run: Run, tmp_path: Path) -> None:
    model, _ = _model()
    run.register("model", model)
    run.record({"score": 1.0})  # no checkpoint yet
    saving = el.Checkpoint(tmp_path, every=100, keep=1, keep_best=el.Best("score"))
    run.resume(saving)
    for step, score in enumerate([0.5, 0.2, 0.9, 0.4], 1):
        if step != 3:
            run.record({"score": score})
        run.boundary(step, end=step == 4)
        _written(run)
    run._engine.close()
    assert kept(tmp_path) == {2: 0.2, 4: 0.4}
    with pytest.raises(UsageError, match=r"metric='score'.* the evaluation has 'loss'"):
        run.record({"loss": 0.1})


def test_a_metric_that_a_trainer_does_not_evaluate_is_an_error_before_the_first_step(run: Run, tmp_path: Path) -> None:
    model, optimizer = _model()

    def trainer(metric: str, **options: Any) -> el.Trainer:
        loader = el.ElasticLoader(DATA, el.GlobalBatch(8, 8))
        saving = el.Checkpoint(tmp_path, keep_best=el.Best(metric))
        return el.Trainer(run, model, optimizer, loader, loss_fn=nn.functional.mse_loss, checkpoint=saving, **options)

    with pytest.raises(UsageError, match="it has no eval_loader"):
        trainer("loss")
    held_out = el.ElasticLoader(DATA, el.GlobalBatch(8, 8), shuffle=False)
    with pytest.raises(UsageError, match="no such metric, it has loss"):
        trainer("accuracy", eval_loader=held_out)
    trainer("loss", eval_loader=held_out)


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for arguments, message in (
        ({"keep": 0}, r"keep=0\): it must be 1 or more"),
        ({"keep": 2.5}, r"keep=2\.5\): it must be 1 or more"),
        ({"keep": "3"}, r"keep='3'\): it must be 1 or more"),
        ({"split": 0}, "it must be a number of bytes"),
        ({"split": "1GB"}, "it must be a number of bytes"),
        ({"keep_every": 0}, "keep_every=0"),
        ({"keep_every": "5min"}, "it must be a number of steps"),
        ({"keep_best": "loss"}, r"el\.Best\(\"loss\"\)"),
    ):
        with pytest.raises(UsageError, match=message):
            el.Checkpoint(tmp_path, **arguments)
    with pytest.raises(UsageError, match='Give "min" or "max"'):
        el.Best("loss", mode="least")
    with pytest.raises(UsageError, match="1 or more"):
        el.Best("loss", count=0)
