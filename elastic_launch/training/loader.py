"""ElasticLoader: the same samples in the same micro-batches at every world size, through any restart.

Epoch e visits the dataset in an order that derives from (seed, e). Its global batches are cut off that order, their
micro-batches off them, and a rank loads its own slice of each. Where a run resumes, the loader starts at the first
micro-batch that is still to be done, of whatever world.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from elastic_launch.batch import BatchPlan, GlobalBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.randomness import derive, seeded

__all__ = ["ElasticLoader", "Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the training: step counts from 0 over all epochs."""

    step: int
    epoch: int
    step_in_epoch: int


class ElasticLoader:
    """Loads the micro-batches of a map-style dataset.

    Args:
        dataset: map-style: ``__len__`` and ``__getitem__``. Random numbers that an item draws (torch, ``random``,
            NumPy) are the same whatever process draws them: they derive from (seed, epoch, index).
        batch: the global batch.
        seed: of the order of samples and of all that is random in them.
        shuffle: whether each epoch has an order of its own; else it is the dataset's.
        drop_last: whether samples that fill no global batch are left out; else they make a short last one.
        num_workers, pin_memory, collate_fn, prefetch_factor: as of ``torch.utils.data.DataLoader``. Random numbers that
            ``collate_fn`` draws derive from (seed, epoch, index of the first sample).

    Raises:
        UsageError: if the dataset is iterable or empty, or holds no whole global batch under drop_last.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch: GlobalBatch,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise UsageError(
                f"ElasticLoader: {type(dataset).__name__} is an iterable dataset, whose samples cannot be told apart.",
                "Give a map-style dataset (__len__ and __getitem__): its samples can be shared out anew on a restart.",
            )
        self.dataset = dataset
        self.batch = batch
        self.seed = seed
        self.length = len(dataset)
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "collate_fn": _SeededCollate(collate_fn or default_collate, seed),
            "prefetch_factor": prefetch_factor,
        }
        if not self.steps_per_epoch:
            raise UsageError(
                f"ElasticLoader: a dataset of {self.length} samples holds no global batch of {batch.size}.",
                "Make the global batch smaller, or leave out drop_last.",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        whole, rest = divmod(self.length, self.batch.size)
        return whole + (1 if rest and not self._drop_last else 0)

    def position(self, step: int) -> Position:
        """Return where a step lies."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Position(step, epoch, within)

    def samples_in(self, step: int) -> int:
        """Return how many samples a step's global batch holds."""
        start = self.position(step).step_in_epoch * self.batch.size
        return min(self.batch.size, self.length - start)

    def plan(self, step: int, world_size: int, rank: int) -> BatchPlan:
        """Return a rank's share of a step."""
        return self.batch.plan(world_size, rank, self.samples_in(step))

    def order(self, epoch: int) -> list[int]:
        """Return an epoch's samples in the order in which they are used."""
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(derive("order", self.seed, epoch))
        return [int(index) for index in torch.randperm(self.length, generator=generator).tolist()]

    def indices(self, step: int, world_size: int, rank: int) -> list[list[int]]:
        """Return the dataset's indices in each of a rank's micro-batches of a step."""
        position = self.position(step)
        return self._cut(self.order(position.epoch), position, world_size, rank)

    def epoch_from(self, step: int, world_size: int, rank: int) -> Generator[Any]:
        """Yield a rank's collated micro-batches from a step on, to the end of its epoch, one after the other."""
        first = self.position(step)
        order = self.order(first.epoch)
        steps = range(first.step, first.step + self.steps_per_epoch - first.step_in_epoch)
        batches = [
            [(first.epoch, index) for index in micro]
            for number in steps
            for micro in self._cut(order, self.position(number), world_size, rank)
        ]
        # A generator of its own: DataLoader draws from the global one otherwise, once per epoch and restart.
        generator = torch.Generator().manual_seed(derive("loader", self.seed, first.epoch))
        seeded_samples = _SeededSamples(self.dataset, self.seed)
        yield from DataLoader(seeded_samples, batch_sampler=batches, generator=generator, **self._options)

    def _cut(self, order: list[int], position: Position, world_size: int, rank: int) -> list[list[int]]:
        start = position.step_in_epoch * self.batch.size
        plan = self.plan(position.step, world_size, rank)
        return [order[start + micro.start : start + micro.stop] for micro in plan.micro_batches]


class _SeededSamples(Dataset[Any]):
    """A dataset indexed by (epoch, index), whose items' randomness derives from these."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with seeded(derive("sample", self._seed, epoch, index), devices=False):
            return key, self._dataset[index]


class _SeededCollate:
    """Collates samples that come with their keys; its randomness derives from the first one's."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._collate = collate
        self._seed = seed

    def __call__(self, samples: list[tuple[tuple[int, int], Any]]) -> Any:
        epoch, index = samples[0][0]
        with seeded(derive("collate", self._seed, epoch, index), devices=False):
            return self._collate([sample for _, sample in samples])
