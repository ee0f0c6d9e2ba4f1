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
from elastic_launch.training.randomness import derive, seed_all, seeded

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
        self._collate = collate_fn or default_collate
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "collate_fn": _as_it_is,
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
        seeded = _SeededBatches(self.dataset, self._collate, self.seed)
        yield from DataLoader(seeded, batch_sampler=batches, generator=generator, **self._options)

    def _cut(self, order: list[int], position: Position, world_size: int, rank: int) -> list[list[int]]:
        start = position.step_in_epoch * self.batch.size
        plan = self.plan(position.step, world_size, rank)
        return [order[start + micro.start : start + micro.stop] for micro in plan.micro_batches]


class _SeededBatches(Dataset[Any]):
    """A dataset whose items are collated micro-batches; the randomness of samples derives from epoch and index.

    DataLoader asks for a micro-batch at a time, by ``__getitems__``: all is done there, as to keep the generators'
    states takes longer than to seed them.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        collating = derive("collate", self._seed, *keys[0])
        with seeded(collating, devices=False):
            samples = []
            for epoch, index in keys:
                seed_all(derive("sample", self._seed, epoch, index), devices=False)
                samples.append(self._dataset[index])
            seed_all(collating, devices=False)
            return self._collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch
