"""Fetches one micro-batch, in any process; its random numbers depend only on its place in the training."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from elastic_launch.batch import MicroBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.data.generators import own_generators, refuse_generators
from elastic_launch.training.randomness import derive, seed_all, seeded
from elastic_launch.training.wrapped import tensors_in

GetBatch = Callable[[int, MicroBatch], Any]
"""``(step, micro) -> data``: the collated data of one micro-batch of a step; steps count from 0 over all epochs."""


class MicroBatchRequest(NamedTuple):
    """A request for one micro-batch."""

    step: int  # the step that it belongs to, from 0
    epoch: int  # the epoch that it belongs to, from 0
    start: int  # position of its first sample in the epoch
    micro: MicroBatch
    indices: list[int]  # the dataset's indices of its samples, if there is a dataset
    exact: bool = False  # whether the data must not have random generators of their own


class Feed:
    """The sampler given to torch's DataLoader: yields the requests of the epoch that is being loaded."""

    def __init__(self) -> None:
        self.requests: Iterator[MicroBatchRequest] = iter(())

    def __iter__(self) -> Iterator[MicroBatchRequest]:
        return self.requests


class BatchSource(Dataset[Any]):
    """Fetches the micro-batch of a request, in any process."""

    _searched_in = 0  # the process that has been searched for generators

    def __getitem__(self, request: MicroBatchRequest) -> Any:
        fetched = self.fetch(request)
        if request.exact and self._searched_in != os.getpid():
            # Many datasets make theirs in each process, when they first need it.
            refuse_generators(self.own_generators())
            self._searched_in = os.getpid()
        return fetched

    @abstractmethod
    def fetch(self, request: MicroBatchRequest) -> Any:
        """Return the collated micro-batch of a request."""

    @abstractmethod
    def own_generators(self) -> list[str]:
        """Return the names of the random generators that the data have in this process."""


class Batches(BatchSource):
    """Collated micro-batches of a map-style dataset.

    If the dataset has ``__getitems__``, it is called once for all samples of a micro-batch, as by torch's DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], samples: int, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset = dataset
        self._samples = samples
        self._collate = collate
        self._seed = seed

    def own_generators(self) -> list[str]:
        found = own_generators(self._dataset, type(self._dataset).__name__)
        return found + own_generators(self._collate, "collate_fn")

    def fetch(self, request: MicroBatchRequest) -> Any:
        with _seeded(derive("batch", self._seed, request.epoch, request.start)):
            try:
                samples = self._fetch(request.indices)
            except Exception:
                if isinstance(self._dataset, Sized):
                    check_length("dataset", self._dataset, self._samples)  # the more helpful error
                raise
            return self._collate(samples)

    def _fetch(self, indices: list[int]) -> Any:
        at_once = getattr(self._dataset, "__getitems__", None)
        if not callable(at_once):
            return [self._dataset[index] for index in indices]
        samples = at_once(indices)
        if isinstance(samples, list) and len(samples) != len(indices):
            raise UsageError(
                f"{type(self._dataset).__name__}.__getitems__() returned {len(samples)} samples, "
                f"{len(indices)} were asked for."
            )
        return samples


class Drawn(BatchSource):
    """Micro-batches made by a function."""

    def __init__(self, get_batch: GetBatch, seed: int, name: str, hint: str, *, equal: bool = False) -> None:
        self._get_batch = get_batch
        self._seed = seed
        self._name, self._hint = name, hint  # for the error if the size is wrong
        self._equal = equal  # whether all micro-batches have one size
        self._counts_first: bool | None = None  # whether the first dimension counted the first one's samples

    def own_generators(self) -> list[str]:
        return own_generators(self._get_batch, name_of(self._get_batch))

    def fetch(self, request: MicroBatchRequest) -> Any:
        with _seeded(derive("get_batch", self._seed, request.step, request.micro.index)):
            made = self._get_batch(request.step, request.micro)
        # Only the script knows which dimension counts samples; a wrong size would change the mean of the global batch.
        shapes = [tuple(tensor.shape) for tensor in tensors_in(made) if tensor.dim()]
        size, firsts = len(request.micro), {shape[0] for shape in shapes}
        if self._counts_first is None:
            self._counts_first = self._equal and firsts == {size}
        # Another dimension may have this length, too, such as that of the features.
        is_short = self._counts_first and len(firsts) == 1 and max(firsts) < size
        if shapes and (is_short or not any(size in shape for shape in shapes)):
            raise UsageError(
                f"{self._name} gave tensors of the shapes {', '.join(map(str, shapes))} for a micro-batch of "
                f"{size} samples (step {request.step}, micro-batch {request.micro.index}).",
                self._hint,
            )
        return made


def name_of(function: Any) -> str:
    """Return the name of a function, or of another callable's class."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_length(what: str, data: Sized, length: int) -> None:
    """Check that data of a loader, its ``"dataset"`` or ``"sampler"``, still have the length that it was made with."""
    if (found := len(data)) != length:
        raise UsageError(
            f"ElasticLoader: the length of its {what}, a {type(data).__name__}, has changed from {length} to {found} "
            "since the loader was made.",
            "The places of all samples and the length of the training derive from it, on all ranks and after every "
            "restart. Have all samples in the dataset from the start, and choose those of each epoch by "
            "ElasticLoader(sampler=...). Or make another loader, and give it to another loop, with "
            'Checkpoint(another directory, start_from=this one, allow=["dataset length"]).',
        )


class NotedBatch:
    """A collated micro-batch, and how it was.

    Attributes:
        shows: whether any change of it in place can be noticed. One of a NumPy array or of a script's object cannot.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._parts = [*_parts(batch)]
        self.shows = all(version is not None for _, version in self._parts)

    def is_as_it_was(self) -> bool:
        """Whether it is known to be unchanged."""
        now = [*_parts(self.batch)]
        return self.shows and len(now) == len(self._parts) and all(map(_same, now, self._parts))


def _parts(value: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield what a micro-batch consists of, with the version of each part: None if it may change unnoticed."""
    if isinstance(value, Tensor):
        yield value, None if value.is_inference() else value._version
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key, 0
            yield from _parts(item)
    elif is_dataclass(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _parts(vars(value))
    else:
        yield value, 0 if value is None or isinstance(value, str | bytes | int | float | complex) else None


def _same(one: tuple[Any, int | None], other: tuple[Any, int | None]) -> bool:
    (now, version), (before, version_before) = one, other
    # Comparing tensors would take long, and NaN is not equal to itself.
    same = now is before or (not isinstance(now, Tensor) and type(now) is type(before) and now == before)
    return same and version == version_before


def _seeded(seed: int) -> AbstractContextManager[None]:
    """Seed all generators; in the training's own process, restore their state afterwards."""
    if get_worker_info() is None:
        return seeded(seed, devices=True)
    seed_all(seed, devices=False)
    return nullcontext()
