"""Trainings that began with the old order of samples keep it; data/old_order was written by the old code."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import elastic_launch as el
from elastic_launch.errors import UsageError

DATA = Path(__file__).parent / "data" / "old_order"


class Noisy(Dataset[Tensor]):
    """As it was when the checkpoints were written."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def _train(directory: Path, until: int, **options: Any) -> tuple[int, list[list[list[float]]]]:
    """Train to a step; return the first step, and the micro-batches that were consumed."""
    seen: list[list[list[float]]] = []
    with el.session() as run:
        model = torch.nn.Linear(4, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = el.ElasticLoader(Noisy(), el.GlobalBatch(8, 3), seed=4, **options)
        checkpoint = el.Checkpoint(directory, every=100)
        for step in run.steps(loader, model, optimizer, until=f"{until}ba", checkpoint=checkpoint):
            for sample in step:
                seen.append(sample.tolist())
                step.backward(step.model(sample).mean())
            step.update()
        return run.resumed_step, seen


@pytest.mark.parametrize("name", ["shuffled", "in_order"])
def test_an_old_checkpoint_keeps_the_old_order_and_random_numbers(tmp_path: Path, name: str) -> None:
    shutil.copytree(DATA / name, tmp_path / "run")
    resumed, expected = json.loads((DATA / f"{name}.json").read_text())
    shuffle = name == "shuffled"
    began, first = _train(tmp_path / "run", 8, shuffle=shuffle)
    # What is saved on the way knows it, too.
    then, second = _train(tmp_path / "run", 10, shuffle=shuffle)
    assert (began, then) == (resumed, 8)
    assert first + second == expected
    _, fresh = _train(tmp_path / "fresh", 10, shuffle=shuffle)
    assert fresh[len(fresh) - len(expected) :] != expected


def test_an_old_checkpoint_is_refused_by_a_loader_with_a_sampler(tmp_path: Path) -> None:
    shutil.copytree(DATA / "shuffled", tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"checkpoint of step 6 in .* was made with the order of ElasticLoader without"
    ):
        _train(tmp_path / "run", 8, sampler=el.samplers.Weighted([1.0] * 30))


def test_another_order_is_refused(tmp_path: Path) -> None:
    _train(tmp_path / "run", 2)
    for other in ({"shuffle": False}, {"drop_last": True}, {"sampler": el.samplers.Weighted([1.0] * 30)}):
        with pytest.raises(
            UsageError, match=r"checkpoint of step 2 in .* was made with order of samples \(as a hash\) \d+"
        ):
            _train(tmp_path / "run", 4, **other)
    assert _train(tmp_path / "run", 4, shuffle=True)[0] == 2
