"""Arguments of another kind, as scripts of other libraries would give them: each is named, with what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.session import Run
from elastic_launch.training.world import World

DATA = [(torch.ones(2), torch.ones(1)) for _ in range(8)]


@pytest.fixture
def run() -> Run:
    return Run(World(), torch.device("cpu"))


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
        ({"run": el.session()}, r"run=\.\.\.\) is a _GeneratorContextManager\.\n.*with el\.session\(\) as run"),
        ({"model": {"a": nn.Linear(2, 1)}}, r"model=\.\.\.\) is a dict\.\n.*run\.steps"),
        ({"optimizer": torch.optim.SGD}, r"optimizer=\.\.\.\) is the class SGD(.|\n)*run\.steps"),
        ({"callbacks": el.Progress(every=2)}, r"callbacks=\.\.\.\) is a Progress\.\n.*list"),
        ({"callbacks": [el.Progress]}, r"callbacks=\.\.\.\): one of them is the class Progress, not an object"),
        ({"callbacks": [print]}, r"callbacks=\.\.\.\): one of them is a builtin_function.*\n.*el\.Callback"),
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
        (lambda run: run.resume("runs/a"), r"run\.resume\(checkpoint\) is a str\.\n.*el\.Checkpoint\("),  # type: ignore[arg-type]
        (lambda run: run.register("model", nn.Linear), r"run\.register\('model'\) got the class Linear"),  # type: ignore[arg-type]
        (lambda run: el.session(threads="4").__enter__(), r"session\(threads='4'\)"),  # type: ignore[arg-type]
    ],
)
def test_of_other_calls(run: Run, call: Callable[[Run], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(run)


def test_a_loop_of_its_own_that_registers_and_does_not_resume(run: Run) -> None:
    """It would save nothing and, after a restart, begin from the start without a word."""
    run.register("model", nn.Linear(2, 1))
    assert run.boundary() is False, "an evaluation has nothing to save"
    with pytest.raises(
        UsageError, match=r"run\.boundary\(1\) came without run\.resume\(\)(.|\n)*'model'(.|\n)*el\.Chec"
    ):
        run.boundary(1)
