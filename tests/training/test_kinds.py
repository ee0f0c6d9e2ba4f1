"""Arguments of the wrong kind, as scripts for other libraries pass them: the error names each, and what to pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

DATA = [(torch.ones(2), torch.ones(1)) for _ in range(8)]


class Drawing:
    """A sampler that draws, as a sampler of torch does."""

    def __len__(self) -> int:
        return len(DATA)

    def indices(self, seed: int, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        return torch.randint(len(DATA), (len(positions),))


@pytest.fixture
def run() -> Run:
    return Run(Engine(World(), torch.device("cpu")))


def _given(**others: Any) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    loader = el.ElasticLoader(DATA, el.GlobalBatch(4, 2))  # type: ignore[arg-type]
    return {"loader": loader, "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **others}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"loader": DataLoader(DATA)}, r"loader=\.\.\.\) is a DataLoader\.\n.*el\.ElasticLoader"),  # type: ignore[arg-type]
        ({"checkpoint": "runs/a"}, r"checkpoint=\.\.\.\) is a str\.\n.*el\.Checkpoint\(directory"),
        ({"scheduler": "cosine"}, r"scheduler=\.\.\.\) is a str\.\n.*state_dict"),
        ({"scheduler": StepLR}, r"scheduler=\.\.\.\) is the class StepLR, not an object of it"),
    ],
)
def test_of_a_loop_and_of_a_trainer(run: Run, others: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"run\.steps\({message}"):
        run.steps(**_given(**others), until=1)
    with pytest.raises(UsageError, match=rf"Trainer\({message}"):
        el.Trainer(run, loss_fn=nn.functional.mse_loss, **_given(**others))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"run": None}, r"run=\.\.\.\) is None\.\n.*with el\.session\(\) as run"),
        ({"run": el.session()}, r"run=\.\.\.\) is a _Session\.\n.*with el\.session\(\) as run"),
        ({"model": {"a": nn.Linear(2, 1)}}, r"model=\.\.\.\) is a dict\.\n.*run\.steps"),
        ({"optimizer": torch.optim.SGD}, r"optimizer=\.\.\.\) is the class SGD(.|\n)*run\.steps"),
        ({"callbacks": el.Progress(every=2)}, r"callbacks=\.\.\.\) is a Progress\.\n.*list"),
        ({"callbacks": [el.Progress]}, r"callbacks=\.\.\.\): one of them is the class Progress, not an object"),
        ({"callbacks": [print]}, r"callbacks=\.\.\.\): one of them is a builtin_function.*\n.*el\.Callback"),
        ({"loss_fn": None}, r"loss_fn=\.\.\.\) is None\.\n.*scalar"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn=\.\.\.\) is the class MSELoss, not an object of it"),
        ({"metrics": {"a": 3}}, r"metrics=\.\.\.\): 'a' is an int\."),
        ({"metrics": [print]}, r'metrics=\.\.\.\) is a list\.\n.*{"accuracy"'),
    ],
)
def test_of_a_trainer(run: Run, others: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"Trainer\({message}"):
        el.Trainer(**{"run": run, "loss_fn": nn.functional.mse_loss, **_given(**others)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: el.ElasticLoader(DATA, 4), r"ElasticLoader\(batch=\.\.\.\) is an int\.\n.*el\.GlobalBatch"),  # type: ignore[arg-type]
        (lambda run: el.FunctionLoader(print, 4), r"FunctionLoader\(batch=\.\.\.\) is an int\.\n.*el\.GlobalBatch"),  # type: ignore[arg-type]
        (lambda run: el.GlobalBatch(4.0, 2), r"GlobalBatch\(size=4\.0\): .*a whole number"),  # type: ignore[arg-type]
        (lambda run: el.Checkpoint(""), r"Checkpoint\(''\) names no directory"),
        (lambda run: run.resume("runs/a"), r"run\.resume\(checkpoint\) is a str\.\n.*el\.Checkpoint\("),  # type: ignore[arg-type]
        (lambda run: run.register("model", nn.Linear), r"run\.register\('model'\) got the class Linear"),  # type: ignore[arg-type]
        (lambda run: el.session(threads="4").__enter__(), r"session\(threads='4'\)"),  # type: ignore[arg-type]
    ],
)
def test_of_other_calls(run: Run, call: Callable[[Run], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(run)


def test_a_loss_that_is_a_number(run: Run) -> None:
    trainer = el.Trainer(run, loss_fn=lambda output, target: 1.0, **_given())
    with pytest.raises(UsageError, match=r"what loss_fn returned is a float\.\n.*tensor"):
        trainer.fit("1ba")


def test_a_loop_of_its_own_that_registers_and_does_not_resume(run: Run) -> None:
    """It would save nothing and, after a restart, silently begin from the start."""
    run.register("model", nn.Linear(2, 1))
    assert run.boundary() is False, "an evaluation has nothing to save"
    with pytest.raises(
        UsageError, match=r"run\.boundary\(1\) came without run\.resume\(\)(.|\n)*'model'(.|\n)*el\.Chec"
    ):
        run.boundary(1)


def test_a_loop_of_its_own_that_registers_nothing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.resume\(\) came without run\.register\(\)"):
        run.resume(el.Checkpoint(tmp_path))


def test_a_loop_of_its_own_that_counts_the_steps_of_an_epoch(run: Run, tmp_path: Path) -> None:
    """Its checkpoints would have the first epoch's numbers, and a restart would repeat epochs."""
    run.register("model", nn.Linear(2, 1))
    run.resume(el.Checkpoint(tmp_path, every=100))
    run.boundary(1)
    run.boundary(2)
    with pytest.raises(UsageError, match=r"run\.boundary\(1\) came after step 2\.\n.*not in an epoch"):
        run.boundary(1)
    run._engine.close()


def test_a_sampler_that_draws(run: Run) -> None:
    """No restart would find its order again, and each rank would have its own."""
    loader = el.ElasticLoader(DATA, el.GlobalBatch(4, 2), sampler=Drawing())  # type: ignore[arg-type]
    steps = run.steps(**_given(loader=loader), until=1)
    with pytest.raises(
        UsageError, match=r"Drawing\.indices\(\) returned other samples for the same seed(.|\n)*el\.samplers"
    ):
        next(steps)


def test_the_name_of_an_optimizer_as_the_first_argument_of_update(run: Run) -> None:
    step = next(run.steps(**_given(), until=1))
    with pytest.raises(UsageError, match=r"step\.update\('critic'\)(.|\n)*step\.update\(optimizer="):
        step.update("critic")  # type: ignore[arg-type]
