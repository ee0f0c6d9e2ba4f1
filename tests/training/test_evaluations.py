"""Evaluations in a loop over steps, in one process: when they are done, their results, what is kept and restored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch import snapshot
from elastic_launch.errors import UsageError
from elastic_launch.training.durations import Interval
from elastic_launch.training.engine import Engine
from elastic_launch.training.evaluations import Evaluations, keeping_buffers
from elastic_launch.training.ranks.agreement import Agreement, Wishes
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(44, 6, generator=GENERATOR)
TARGETS = INPUTS[:, :3].argmax(dim=1)


pytestmark = pytest.mark.usefixtures("one_thread")


class Loop:
    """A loop over steps with all its parts, made as after a restart."""

    def __init__(self, *, make: Mapping[str, Any] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.run = Run(Engine(World(), torch.device("cpu")))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.plateau = ReduceLROnPlateau(self.optimizer, "max", patience=0, threshold=0.1)
        self.loader = el.ElasticLoader(TensorDataset(INPUTS[:32], TARGETS[:32]), el.GlobalBatch(12, 4), seed=5)
        held_out = el.ElasticLoader(TensorDataset(INPUTS[32:], TARGETS[32:]), el.GlobalBatch(5, 2), shuffle=False)
        self.seen: list[el.Evaluation] = []
        self.steps: list[int] = []
        made: dict[str, Any] = {"metrics": ["accuracy", "loss"], "on_result": self.on_result, **(make or {})}
        self.evaluator = el.Evaluator(made.pop("loader", held_out), made.pop("measure", self.measure), **made)
        self.options = options

    def measure(self, batch: list[Tensor]) -> dict[str, Tensor | float]:
        assert not self.model.training
        output = self.model(batch[0])
        assert not output.requires_grad
        accuracy = (output.argmax(dim=1) == batch[1]).float().mean()
        return {"loss": nn.functional.cross_entropy(output, batch[1]), "accuracy": float(accuracy)}

    def on_result(self, evaluation: el.Evaluation) -> None:
        self.seen.append(evaluation)
        self.plateau.step(evaluation.metrics["accuracy"])

    def train(self, until: str) -> list[int]:
        """Return the steps that were evaluated."""
        for step in self.run.steps(
            self.loader,
            self.model,
            self.optimizer,
            until=until,
            scheduler=self.plateau,
            evaluator=self.evaluator,
            **self.options,
        ):
            for inputs, targets in step:
                step.backward(nn.functional.cross_entropy(self.model(inputs), targets))
            step.update()
            assert self.model.training
            self.steps.append(step.number)
        self.run._engine.close()
        return [evaluation.step for evaluation in self.seen]


@pytest.mark.parametrize(
    ("every", "evaluated"), [("1ep", [3, 6, 8]), (2, [6, 8]), ("4ba", [4, 8]), ("100ba", [8]), ("2h", [8])]
)
def test_evaluations_are_done_at_intervals_and_at_the_end(every: int | str, evaluated: list[int]) -> None:
    loop = Loop(make={"every": every})
    assert loop.train("8ba") == evaluated
    assert [x.epoch for x in loop.seen] == [step // 3 for step in evaluated]
    assert loop.evaluator.history == loop.seen


def test_an_evaluation_is_the_mean_over_all_samples() -> None:
    loop = Loop()
    loop.train("3ba")
    with torch.no_grad():
        output = loop.model.eval()(INPUTS[32:])
    expected = {
        "accuracy": (output.argmax(dim=1) == TARGETS[32:]).float().mean().item(),
        "loss": nn.functional.cross_entropy(output, TARGETS[32:]).item(),
    }
    assert loop.seen[0].metrics == pytest.approx(expected)


def test_micro_batches_have_the_weights_that_they_are_given() -> None:
    weights = {"weight_fn": lambda batch: float(batch[1][0] == 1), "metrics": ["first"]}
    loop = Loop(make={"measure": lambda batch: {"first": float(batch[1][0] == 1)}, "on_result": print, **weights})
    loop.train("1ba")
    assert loop.evaluator.history[0].metrics == {"first": 1.0}


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_restart_continues_schedule_and_evaluations(tmp_path: Path, stop: int) -> None:
    whole = Loop(make={"every": "2ba"})
    assert whole.train("8ba") == [2, 4, 6, 8]
    first = Loop(make={"every": "2ba"}, checkpoint=el.Checkpoint(tmp_path))
    first.train(f"{stop}ba")
    second = Loop(make={"every": "2ba"}, checkpoint=el.Checkpoint(tmp_path))
    second.train("8ba")
    assert second.steps == list(range(stop + 1, 9))
    if stop % 2 == 0:  # otherwise the first one took its end for the training's, which is always evaluated
        assert second.evaluator.history == whole.evaluator.history
        assert second.plateau.state_dict() == whole.plateau.state_dict()
        assert el.weights_sha256(second.model) == el.weights_sha256(whole.model)


@pytest.mark.parametrize("every", ["2ba", "1ep", "0.000001s"])
def test_the_best_checkpoint_is_kept(tmp_path: Path, every: str) -> None:
    scores = iter([0.5, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1])

    def measure(batch: list[Tensor]) -> dict[str, float]:
        if float(batch[0][0, 0]) == float(INPUTS[32, 0]):
            self_scores.append(next(scores))
        return {"score": self_scores[-1]}

    self_scores: list[float] = []
    checkpoint = el.Checkpoint(tmp_path, every="2h", keep=1, keep_best=el.Best("score", mode="max"))

    def wait(evaluation: el.Evaluation) -> None:
        writer = loop.run._engine.checkpoint._writer
        if writer is not None:
            assert writer.flush(30)  # newer states replace those that are waiting

    make = {"every": every, "measure": measure, "metrics": ["score"], "on_result": wait}
    loop = Loop(make=make, checkpoint=checkpoint)
    loop.train("8ba")
    kept = {info.step: info.meta["metrics"]["score"] for info in snapshot.find(tmp_path)}
    assert sorted(kept.values()) == pytest.approx(sorted([0.9, self_scores[-1]]))
    assert max(kept) == 8


def test_by_the_clock_an_evaluation_is_due_once_for_each_wish_and_after_a_restart_in_time() -> None:
    done: list[int] = []
    evaluations = Evaluations(Interval(None, 1e-9), lambda: {"loss": 1.0}, lambda x: done.append(x.step))
    assert evaluations.wanted()
    assert not evaluations.wanted(), "it waits for the other ranks"
    assert not evaluations.due(5, end=False)
    evaluations.agree(6)
    assert evaluations.due(6, end=False)
    assert not evaluations.due(7, end=False)
    evaluations.evaluate(6, 0, None)
    assert not evaluations.due(6, end=True)
    assert not evaluations.due(7, end=False)
    assert evaluations.wanted()
    evaluations.agree(8)
    evaluations.begin_round(-1)
    assert not evaluations.due(8, end=False), "the others may not have agreed"
    assert evaluations.wanted()
    evaluations.begin_round(7)
    assert evaluations.due(7, end=False), "a rank lacked it"

    hour = Evaluations(Interval(None, 3600.0), lambda: {"loss": 1.0}, lambda x: done.append(x.step))
    assert not hour.wanted()
    hour.load_state_dict({**evaluations.state_dict(), "age": 3600.0})
    assert hour.wanted()
    assert hour.history == evaluations.history
    hour.evaluate(6, 0, None)  # for the others
    assert done == [6]


def test_a_wish_to_evaluate_reaches_all_ranks() -> None:
    agreement = Agreement(1)
    agreement.arrive((Wishes(evaluate=True) | Wishes(keep=True)).counts())
    assert agreement.settle() == Wishes(evaluate=True, keep=True)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        ({"every": "often"}, {}, "every='often' is not an interval"),
        ({"metrics": "loss"}, {}, "Give a list of names"),
        ({"metrics": ["loss"]}, {}, r"returned \['accuracy', 'loss'\]; its metrics are \['loss'\]"),
        ({"measure": lambda batch: 1.0}, {}, "returned float"),
        ({}, {"checkpoint": el.Best("f1")}, r"keep_best=.*no such metric, it has accuracy, loss"),
        ({"loader": [1]}, {}, r"Evaluator\(loader=...\) is a list"),
        (
            {"loader": el.FunctionLoader(lambda step, micro: micro, el.GlobalBatch(4, 2))},
            {},
            r"Evaluator\(loader=...\) has no end",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    make: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "checkpoint" in options:
        options["checkpoint"] = el.Checkpoint(tmp_path, keep_best=options["checkpoint"])
    with pytest.raises(UsageError, match=message):
        Loop(make=make, **options).train("1ba")


def test_an_evaluator_must_be_one() -> None:
    loop = Loop()
    loop.evaluator = loop.measure  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"run\.steps\(evaluator=\.\.\.\) is"):
        loop.train("1ba")


def test_an_evaluation_leaves_buffers_as_they_were_but_for_those_to_ignore() -> None:
    """Torch's FakeQuantize observes in evaluation, too; a rank would keep what it has evaluated."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            for name in ("calls", "replaced", "ignored"):
                self.register_buffer(name, torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.replaced = self.replaced + 1
            self.ignored += 1
            return self.linear(x)

    model = Counts()
    with keeping_buffers(model, {"ignored": "ignore"}):
        model(INPUTS)
        assert [float(x) for x in model.buffers()] == [1, 1, 1]
    assert [float(x) for x in model.buffers()] == [0, 0, 1]
