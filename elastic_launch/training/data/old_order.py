"""Support for checkpoints made before :mod:`permutation`, when the order of an epoch was drawn as a whole.

A training resumed from such a checkpoint keeps its order of samples and the random numbers in each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic_launch.training.data.batches import Request
from elastic_launch.training.randomness import derive, seed_all, seeded

__all__ = ["OldBatches", "OldShuffled"]


class OldShuffled:
    """A sampler that holds the order of one epoch in memory, drawn by ``torch.randperm``."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._held: tuple[int, int] | None = None
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        if self._held != (seed, epoch):
            generator = torch.Generator().manual_seed(derive("order", seed, epoch))
            self._order = torch.randperm(self._length, generator=generator, device="cpu")
            self._held = (seed, epoch)
        return self._order[positions]


class OldBatches(Dataset[Any]):
    """Micro-batches whose samples are fetched and seeded one by one."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, request: Request) -> Any:
        collating = derive("collate", self._seed, request.epoch, request.indices[0])
        with seeded(collating, devices=False):
            samples = []
            for index in request.indices:
                seed_all(derive("sample", self._seed, request.epoch, index), devices=False)
                samples.append(self._dataset[index])
            seed_all(collating, devices=False)
            return self._collate(samples)
