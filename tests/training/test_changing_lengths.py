"""A dataset or a sampler whose length changes while it is in use is refused, with both lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS, Job
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.steps import Step

INPUTS = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
CHANGED = "the length of its {}, a {}, has changed from {} to {} since the loader was made"


class Growing(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.length:
            raise IndexError(index)
        return INPUTS[index], INPUTS[index].sum(0, keepdim=True)


class Some:
    """A sampler whose length is given."""

    length = 32

    def __len__(self) -> int:
        return self.length

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        return positions


def loader_of(data: Growing, sampler: Some | None = None) -> el.ElasticLoader:
    return el.ElasticLoader(data, el.GlobalBatch(16, 4), sampler=sampler)


def train(
    loader: el.ElasticLoader, until: str, after: Callable[[Step], None], evaluator: el.Evaluator | None = None
) -> int:
    model = nn.Linear(3, 1)
    done = 0
    with el.session() as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(loader, model, optimizer, until=until, evaluator=evaluator):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            step.update()
            done = step.number
            after(step)
    return done


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [31, 48])
@pytest.mark.parametrize("at", [3, 4])  # within an epoch, and at its end
def test_the_next_epoch_does_not_begin_with_another_length(workers: int, length: int, at: int) -> None:
    data, done = Growing(32), 0

    def after(step: Step) -> None:
        nonlocal done
        done = step.number
        if step.number == at:
            data.length = length

    loader = el.ElasticLoader(data, el.GlobalBatch(16, 4), shuffle=False, num_workers=workers)
    with pytest.raises(UsageError, match=CHANGED.format("dataset", "Growing", 32, length)):
        train(loader, "9ba", after)
    # A sample that is gone is missed at once, unless it was loaded ahead.
    assert done == (3 if (at, length, workers) == (3, 31, 0) else 4)


def test_what_changes_in_the_last_epoch_does_not_matter_to_it() -> None:
    data = Growing(32)
    loader = loader_of(data)
    assert train(loader, "1ep", lambda step: setattr(data, "length", 48)) == 2
    with pytest.raises(UsageError, match=CHANGED.format("dataset", "Growing", 32, 48)):
        train(loader, "2ep", lambda step: None)
    assert train(loader_of(data), "1ep", lambda step: None) == 3


def test_a_sampler_may_not_change_its_length_either() -> None:
    sampler = Some()
    with pytest.raises(UsageError, match=CHANGED.format("sampler", "Some", 32, 16)):
        train(loader_of(Growing(64), sampler), "2ep", lambda step: setattr(sampler, "length", 16))


def test_an_evaluation_has_the_length_that_its_loader_was_made_with() -> None:
    held_out = Growing(32)
    evaluator = el.Evaluator(loader_of(held_out), lambda batch: {"loss": batch[1].mean()})
    assert train(loader_of(Growing(32)), "1ep", lambda step: None, evaluator) == 2
    with pytest.raises(UsageError, match=CHANGED.format("dataset", "Growing", 32, 40)):
        train(loader_of(Growing(32)), "1ep", lambda step: setattr(held_out, "length", 40), evaluator)


@pytest.mark.parametrize("flags", [(), pytest.param(("--no-live",), marks=pytest.mark.slow)])
def test_a_run_ends_if_the_data_of_one_rank_grow(job: Job, flags: tuple[str, ...]) -> None:
    """Also after a kill, and without a restart for it."""
    env = {"ELASTIC_LAUNCH_FAULTS": json.dumps([{"rank": 0, "step": 1}])}
    command = [str(SCRIPTS / "growing.py"), str(job.work)]
    agent = job.launch("--standalone", "--nproc", "2", *flags, command=command, env=env)
    assert agent.wait(100) == 93, agent.output
    assert re.search("UsageError: .*" + CHANGED.format("dataset", "Growing", 32, 48), agent.output)
    steps = [json.loads(line) for line in Path(job.work / "steps.jsonl").read_text().splitlines()]
    assert max(steps) == 2
