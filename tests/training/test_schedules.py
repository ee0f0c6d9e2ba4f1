"""Learning-rate schedules that are not saved are noticed, and random numbers of a step do not depend on restarts."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SCRIPTS, Job
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import elastic_launch as el
from elastic_launch.training.checkpoints.parts import Group, flat
from elastic_launch.training.checkpoints.schedules import forgotten, has_forgotten_average, has_forgotten_scaler
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

SCHEDULE = str(SCRIPTS / "guards" / "schedule.py")


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def _asked_for_its_state(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    """After this the optimizer is referred to by its ``__dict__``, in some versions of Python."""
    scheduler = ReduceLROnPlateau(optimizer)
    scheduler.state_dict()
    return scheduler


class Holder:
    """An object of the script that saves a scheduler with its own state."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 2),
        lambda optimizer: SequentialLR(optimizer, [ConstantLR(optimizer), LinearLR(optimizer)], [2]),
        lambda optimizer: ChainedScheduler([ConstantLR(optimizer), LinearLR(optimizer)]),
        ReduceLROnPlateau,
        _asked_for_its_state,
    ],
)
def test_a_scheduler_is_forgotten_unless_it_or_its_holder_is_saved(make: Any) -> None:
    optimizer, other = _optimizer(), _optimizer()
    assert forgotten([optimizer]) == []
    scheduler = make(optimizer)
    assert forgotten([optimizer, other]) == [optimizer]
    assert forgotten([optimizer, scheduler]) == []
    groups = {"optimizer": Group({"a": optimizer, "b": other}), "scheduler": Group({"a": scheduler})}
    assert forgotten([part for _, part in flat(groups)]) == []
    assert forgotten([optimizer, Holder(scheduler)]) == []
    assert forgotten([optimizer, Holder([scheduler])]) == []
    forgotten_one = make(other)
    assert forgotten([optimizer, other, scheduler]) == [other]
    assert forgotten([optimizer, other, scheduler, forgotten_one]) == []


def test_an_average_of_a_model_is_forgotten_unless_it_or_its_holder_is_saved() -> None:
    model = nn.Linear(1, 1)
    assert not has_forgotten_average([model])
    averaged = AveragedModel(model)
    assert has_forgotten_average([model])
    for saved in (averaged, Holder(averaged), Group({"a": averaged}), nn.ModuleList([averaged])):
        assert not has_forgotten_average([part for _, part in flat({"model": model, "saved": saved})])


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_what_the_script_has_dropped_is_not_forgotten() -> None:
    """Objects in a reference cycle stay until garbage is collected, and a second training may begin before that."""
    model, optimizer = nn.Linear(1, 1), _optimizer()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    dropped: list[Any] = [AveragedModel(model), ReduceLROnPlateau(optimizer), scaler]
    dropped.append(dropped)
    del dropped, scaler
    assert not has_forgotten_average([model])
    assert not has_forgotten_scaler([model])
    assert forgotten([optimizer]) == []


def test_an_average_that_is_not_saved_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1)
    averaged = AveragedModel(model)
    loader = el.ElasticLoader(torch.ones(8, 1), el.GlobalBatch(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(Engine(World(), torch.device("cpu")))
    for step in run.steps(loader, model, optimizer, until=1, checkpoint=el.Checkpoint(tmp_path)):
        for x in step:
            step.backward(model(x).mean())
        step.update()
        averaged.update_parameters(model)
    run._engine.close()
    assert [text for text in caplog.messages if "an AveragedModel is not saved" in text and "run.register" in text]


@pytest.mark.parametrize("when", ["before", "in the first step"])
def test_it_is_reported_once_if_something_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str) -> None:
    def train(saving: el.Checkpoint | None, **options: Any) -> None:
        run, model = Run(Engine(World(), torch.device("cpu"))), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = StepLR(optimizer, 2) if when == "before" or options else None
        if options:
            options["scheduler"] = scheduler
        loader = el.ElasticLoader(torch.randn(16, 4), el.GlobalBatch(8, 4))
        for step in run.steps(loader, model, optimizer, until="3ba", checkpoint=saving, **options):
            for x in step:
                step.backward(step.model(x).square().mean())
            step.update()
            if scheduler is None:
                scheduler = StepLR(optimizer, 2)
            else:
                scheduler.step()

    train(None)
    train(el.Checkpoint(tmp_path / "a"), scheduler=True)
    assert "scheduler" not in caplog.text
    train(el.Checkpoint(tmp_path / "b"))
    assert caplog.text.count("the learning-rate scheduler of the optimizer is not saved") == 1


def test_random_numbers_of_a_step_are_the_same_after_a_restart(tmp_path: Path) -> None:
    def draw(until: str, directory: str) -> list[tuple[float, ...]]:
        run, model, drawn = Run(Engine(World(), torch.device("cpu"))), nn.Linear(4, 4), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = el.ElasticLoader(torch.randn(16, 4), el.GlobalBatch(8, 4), seed=3)
        checkpoint = el.Checkpoint(tmp_path / directory, every=100)
        for step in run.steps(loader, model, optimizer, until=until, checkpoint=checkpoint):
            drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))
            for x in step:
                step.backward(step.model(x).square().mean())
            step.update()
        return drawn

    whole = draw("4ba", "whole")
    assert len(set(whole)) == 4
    assert [*draw("2ba", "parts"), *draw("4ba", "parts")] == whole


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_schedule_continues_after_a_kill(job: Job, nproc: int) -> None:
    plan = {"ELASTIC_LAUNCH_FAULTS": '[{"rank": 0, "step": 13}]'}
    agents = {
        name: job.launch(
            *("--standalone", "--nproc", str(nproc)),
            name=name,
            command=[SCHEDULE, str(job.directory / name), *(["forget"] if name == "forgets" else [])],
            env=plan if name != "whole" else {},
        )
        for name in ("whole", "killed", "forgets")
    }
    for agent in agents.values():
        assert agent.wait(100) == 0, agent.output
    (drawn,) = [line.split()[-1] for line in agents["whole"].output.splitlines() if "drawn" in line]
    assert f"restarts 0 rate 0.0476 drawn {drawn}" in agents["whole"].output
    assert f"restarts 1 rate 0.0476 drawn {drawn}" in agents["killed"].output
    assert "is not saved" not in agents["killed"].output
    assert "the learning-rate scheduler of the optimizer is not saved" in agents["forgets"].output
    assert "rate 0.0476" not in agents["forgets"].output


def test_a_scaler_is_forgotten_unless_it_or_its_holder_is_saved() -> None:
    assert not has_forgotten_scaler([])
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert not has_forgotten_scaler([])
    scaler = torch.amp.GradScaler("cpu")
    assert not has_forgotten_scaler([]), "it may be for a later training"
    scaler.scale(torch.ones(()))
    assert has_forgotten_scaler([])
    assert not has_forgotten_scaler([scaler])
    assert not has_forgotten_scaler([Holder(scaler)])
    del off
