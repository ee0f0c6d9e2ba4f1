"""Micro-batches that a function makes: the same at every world size, in every process, from every step on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.data.loader import epochs_of
from elastic_launch.training.transaction import NonFiniteLossError

TOKENS = torch.arange(1000)


def get_batch(step: int, micro: el.MicroBatch) -> Tensor:
    starts = torch.randint(len(TOKENS) - 4, (len(micro),)).tolist()
    drawn = torch.tensor([[random.random(), np.random.rand(), step, micro.index]] * len(micro))
    return torch.cat([torch.stack([TOKENS[start : start + 4] for start in starts]), drawn], dim=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_is_the_same_at_every_world_size(workers: int) -> None:
    def step(number: int, world: int) -> list[Any]:
        found = []
        for rank in range(world):
            loader = el.FunctionLoader(get_batch, el.GlobalBatch(10, micro=3), seed=2, num_workers=workers)
            batches = epochs_of(loader).epoch_from(number, world, rank)
            found += [next(batches).tolist() for _ in range(epochs_of(loader).plan(number, world, rank).grad_accum)]
            batches.close()
        return found

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one = step(10**6, 1)
    assert torch.rand(1) == expected
    assert [len(micro) for micro in one] == [3, 3, 3, 1]
    assert [micro[0][6:] for micro in one] == [[10**6, index] for index in range(4)]
    assert len({tuple(row[:4]) for micro in one for row in micro}) == 10
    assert len({tuple(micro[0][4:6]) for micro in one}) == 4
    assert step(10**6, 3) == one
    loader = el.FunctionLoader(get_batch, el.GlobalBatch(10, micro=3), seed=2)
    batches = epochs_of(loader).epoch_from(10**6 - 30, 1, 0)
    assert [next(batches).tolist() for _ in range(4 * 31)][-4:] == one
    assert step(10**6 + 1, 1) != one


def test_there_are_epochs_if_they_are_given() -> None:
    loader = el.FunctionLoader(get_batch, el.GlobalBatch(4, 2), steps_per_epoch=5)
    assert (loader.steps_per_epoch, loader.length, epochs_of(loader).position(12).epoch) == (5, 20, 2)
    assert len(list(epochs_of(loader).epoch_from(7, 1, 0))) == 6
    assert "dataset length" not in epochs_of(loader).identity
    assert (
        epochs_of(loader).identity
        != epochs_of(el.FunctionLoader(get_batch, el.GlobalBatch(4, 2), steps_per_epoch=6)).identity
    )


def test_lengths_in_epochs_need_them() -> None:
    loader = el.FunctionLoader(get_batch, el.GlobalBatch(4, 2))
    with el.session() as run:
        model = torch.nn.Linear(1, 1)
        with pytest.raises(UsageError, match="'3ep' are epochs, and this loader has none") as caught:
            run.steps(loader, model, torch.optim.SGD(model.parameters()), until="3ep")
        assert "steps_per_epoch" in caught.value.hint
        trainer = el.Trainer(
            run,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            el.FunctionLoader(lambda step, micro: (torch.rand(len(micro), 1),) * 2, el.GlobalBatch(4, "auto")),
            loss_fn=torch.nn.functional.mse_loss,
            exact=True,
        )
        trainer.fit("3ba")
        assert trainer.step == 3
        endless = trainer.loader
        with pytest.raises(UsageError, match=r"Trainer.evaluate\(loader\) has no end"):
            trainer.evaluate(endless)


def test_a_loss_that_is_not_finite_is_attributed_to_the_function() -> None:
    def nothing(step: int, micro: el.MicroBatch) -> Tensor:
        return torch.full((len(micro), 1), float("nan") if (step, micro.index) == (1, 1) else 1.0)

    def train() -> None:
        with el.session() as run:
            model = torch.nn.Linear(1, 1)
            loader = el.FunctionLoader(nothing, el.GlobalBatch(4, 2))
            for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.1), until="3ba"):
                for sample in step:
                    step.backward(step.model(sample).mean())
                step.update()

    with pytest.raises(NonFiniteLossError, match=r"The micro-batch has what nothing\(\) gives for step 1 and micro-"):
        train()


@pytest.mark.parametrize("steps", [0, 1.5, "3"])
def test_an_epoch_has_a_whole_number_of_steps(steps: Any) -> None:
    with pytest.raises(UsageError) as caught:
        el.FunctionLoader(get_batch, el.GlobalBatch(4, 2), steps_per_epoch=steps)
    assert str(caught.value).startswith(f"FunctionLoader(steps_per_epoch={steps!r}): an epoch has at least 1 step.")


def test_a_function_that_makes_another_number_of_samples_is_named() -> None:
    """The last micro-batch of a step is smaller, and the mean would weight its samples wrongly."""

    def of_three(step: int, micro: el.MicroBatch) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(3, 7), "number": torch.tensor(1.0)}

    def train() -> None:
        with el.session() as run:
            model = torch.nn.Linear(7, 1)
            loader = el.FunctionLoader(of_three, el.GlobalBatch(10, micro=3))
            for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.1), until="3ba"):
                for sample in step:
                    step.backward(step.model(sample["tokens"]).mean())
                step.update()

    said = r"of_three\(\) gave tensors of the shapes \(3, 7\) for a micro-batch of 1 samples \(step 0, micro-batch 3\)"
    with pytest.raises(UsageError, match=said):
        train()
