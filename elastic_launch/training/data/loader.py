"""Loaders that yield the same samples in the same micro-batches at every world size and after every restart.

Epoch e visits the dataset in an order that derives from (seed, e). This order is cut into global batches, these into
micro-batches, and each rank loads its own slice of each global batch. On a resume, the loader starts at the first
micro-batch that remains, at any world size. No state is held for a whole epoch: neither memory nor startup time depends
on its length.
"""

from __future__ import annotations

import copy
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.context import BaseContext
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from elastic_launch.batch import BatchPlan, GlobalBatch
from elastic_launch.contract import ENV_SOCKET
from elastic_launch.errors import UsageError
from elastic_launch.stack_dump import dump_stacks_on_signal
from elastic_launch.training.data.batches import Batches, Drawn, Feed, GetBatch, MicroBatchRequest, check_length
from elastic_launch.training.data.generators import own_generators
from elastic_launch.training.data.samplers import SAMPLE_ORDER, InOrder, Sampler, Shuffled
from elastic_launch.training.data.streams import ShardedStream, StreamOrder
from elastic_launch.training.durations import ENDLESS
from elastic_launch.training.kinds import check_kind
from elastic_launch.training.randomness import derive

AT_A_TIME = 16384
"""Number of positions requested from a sampler at a time; a request for few would take as long."""

LIST_OF_SHARDS = "list of shards (as a hash)"
"""Name of the fingerprint of a stream in a checkpoint's identity."""


class LoaderOptions(TypedDict, total=False):
    """Options passed to ``torch.utils.data.DataLoader``, with its defaults."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    timeout: float


_INSTEAD = {
    "batch_size": "Give the number of samples as GlobalBatch(size, micro).",
    "batch_sampler": "GlobalBatch(size, micro) cuts the batches; give the order as sampler=, see el.samplers.",
    "generator": "Give seed=: the order derives from it, and from the epoch.",
    "in_order": "Micro-batches come in order, or they would not be the same at every world size.",
    "pin_memory_device": "Give pin_memory=True.",
}
"""Advice for options of torch's DataLoader that are not accepted."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the training.

    Attributes:
        step: the step, counted from 0 over all epochs.
        epoch: the epoch, from 0.
        step_in_epoch: the step within its epoch, from 0.
    """

    step: int
    epoch: int
    step_in_epoch: int


class Loader(ABC):
    """Base class of :class:`ElasticLoader` and :class:`FunctionLoader`, which load micro-batches.

    Attributes:
        batch: the global batch.
        seed: all randomness in the data derives from it.
        length: number of samples in an epoch.
    """

    def __init__(self, batch: GlobalBatch, seed: int, length: int, options: Mapping[str, Any]) -> None:
        self.batch = batch
        self.seed = seed
        self.length = length
        self._options = _checked(type(self).__name__, options)
        self._feed = Feed()
        # Without a generator, DataLoader would draw from the global one once per epoch and restart.
        self._generator = torch.Generator()
        self._order_hash: int | None = None
        self._data_loader = self._made()

    def _apart(self) -> Self:
        """Return a loader of the same data whose processes, if there are any, end with its iterators."""
        other = copy.copy(self)
        other._options = {**self._options, "persistent_workers": False}
        other._feed, other._generator = Feed(), torch.Generator()
        other._data_loader = other._made()
        return other

    def _spare(self, step: int) -> Any:
        """Return the first micro-batch of a step's global batch, on any rank."""
        with closing(self._apart()._epoch_from(step, 1, 0)) as batches:
            return next(batches)

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""

    @abstractmethod
    def _source(self) -> Dataset[Any]:
        """Return the dataset that fetches the micro-batch of a request."""

    @abstractmethod
    def _indices(self, epoch: int, positions: Tensor) -> list[int]:
        """Return the dataset's index at each position of an epoch."""

    @abstractmethod
    def _hashed(self) -> int:
        """Return a hash of the order of samples."""

    @abstractmethod
    def _contents(self, step: int, micro: int) -> str:
        """Describe the samples of a step's micro-batch, for errors."""

    @abstractmethod
    def _own_generators(self) -> list[str]:
        """Return the names of the random generators that the data holds."""

    def _check_exact(self) -> None:
        """Check, as far as possible, that the data will be the same after a restart."""
        found = self._own_generators()
        if found:
            raise UsageError(
                f"exact=True: the data have a generator of their own, which is not restored: {', '.join(found)}.",
                "Draw from the global generators of torch, random or NumPy, which the loader seeds, or make one where "
                "you draw: torch.Generator().manual_seed(torch.initial_seed()).",
            )

    def _check_lengths(self) -> None:
        """Check, where an epoch begins, that the data have the length with which the loader was made."""
        for what, data, length in self._sized():
            check_length(what, data, length)

    def _sized(self) -> Sequence[tuple[str, Sized, int]]:
        """Return what the data consist of, each with its name in errors and its length when the loader was made."""
        return ()

    def _position(self, step: int) -> Position:
        """Return the position of a step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Position(step, epoch, within)

    def _samples_in(self, step: int) -> int:
        """Return the number of samples in a step's global batch."""
        start = step % self.steps_per_epoch * self.batch.size
        return min(self.batch.size, self.length - start)

    def _plan(self, step: int, world_size: int, rank: int) -> BatchPlan:
        """Return a rank's share of a step's global batch."""
        return _cached_plan(self.batch, world_size, rank, self._samples_in(step))

    def indices(self, step: int, world_size: int, rank: int) -> list[list[int]]:
        """Return the dataset's indices of a rank's samples in a step, as one list per micro-batch."""
        return [request.indices for request in self._requests(range(step, step + 1), world_size, rank)]

    @property
    def _identity(self) -> dict[str, int]:
        """What must be the same when a training resumes from a checkpoint."""
        identity = {"global batch": self.batch.size, "seed": self.seed, **self._of_data()}
        if self.batch.micro != "auto":
            identity["micro-batch"] = self.batch.micro
        if self._order_hash is None:
            self._order_hash = self._hashed()
        return identity | {SAMPLE_ORDER: self._order_hash}

    def _of_data(self) -> dict[str, int]:
        return {}

    def _go_on(self, identity: Mapping[str, int]) -> None:
        """Continue the training of a checkpoint with this identity: take its micro-batch size if there is none here."""
        if self.batch.micro == "auto" and "micro-batch" in identity:
            self.batch = GlobalBatch(self.batch.size, identity["micro-batch"])

    def _epoch_from(self, step: int, world_size: int, rank: int) -> Generator[Any]:
        """Yield a rank's collated micro-batches one by one, from a step to the end of its epoch."""
        first = self._position(step)
        steps = range(step, step + self.steps_per_epoch - first.step_in_epoch)
        self._feed.requests = requests = self._requests(steps, world_size, rank)
        self._generator.manual_seed(derive("loader", self.seed, first.epoch))
        for batch in self._data_loader:
            yield batch
            if self._data_loader.persistent_workers and self._feed.requests is not requests:
                raise UsageError(
                    f"{type(self).__name__}(persistent_workers=True) was asked for an epoch in the middle of another.",
                    "Give evaluation a loader of its own, or leave out persistent_workers.",
                )

    def _made(self) -> DataLoader[Any]:
        try:
            return DataLoader(
                self._source(),
                batch_size=None,
                sampler=self._feed,
                collate_fn=_as_it_is,
                generator=self._generator,
                **{**self._options, "worker_init_fn": partial(_begin, self._options.get("worker_init_fn"))},
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"{type(self).__name__}: {error}", "These options go on to torch's DataLoader.") from None

    def _requests(self, steps: range, world_size: int, rank: int) -> Iterator[MicroBatchRequest]:
        """Yield a rank's requests for some steps of one epoch."""
        size, start = self.batch.size, steps.start
        first = self._position(start)
        in_full = _cached_plan(self.batch, world_size, rank, None).micro_batches
        share = in_full[-1].stop - in_full[0].start if in_full else 0
        while start < steps.stop:
            plan = self._plan(start, world_size, rank)
            within = first.step_in_epoch + start - steps.start
            # As many full global batches as one request to the sampler covers; the last global batch may be short.
            full = min(steps.stop, self.length // size - within + start) - start
            count = max(1, min(full, AT_A_TIME // share if share else full))
            micros = plan.micro_batches
            if micros:
                starts = torch.arange(within, within + count, device="cpu").mul_(size)
                shares = torch.arange(micros[0].start, micros[-1].stop, device="cpu")
                indices = self._indices(first.epoch, (starts.unsqueeze(1) + shares).flatten())
                done = 0
                for step in range(start, start + count):
                    for micro in micros:
                        place = (within + step - start) * size + micro.start
                        yield MicroBatchRequest(step, first.epoch, place, micro, indices[done : done + len(micro)])
                        done += len(micro)
            start += count


class ElasticLoader(Loader):
    """Loads the micro-batches of a map-style dataset.

    Args:
        dataset: a map-style dataset with ``__len__`` and ``__getitem__``, or with ``__getitems__``, which returns all
            samples of a micro-batch at once; or a :class:`elastic_launch.ShardedStream`. Random numbers that it draws
            from the global generators of torch, ``random`` or NumPy are the same in any process: they derive from the
            seed, the epoch and the micro-batch's place in the epoch.
        batch: the global batch.
        seed: seed of the order of samples and of all randomness in them.
        shuffle: whether each epoch has its own random order; False: the dataset's order. The default is to shuffle.
        sampler: gives another order, see :class:`elastic_launch.samplers.Sampler`; leave out ``shuffle`` then.
        drop_last: whether to drop samples that do not fill a global batch; otherwise they make a short last one.
        collate_fn: as in ``torch.utils.data.DataLoader``. It may draw random numbers as the dataset does.
        options: ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``worker_init_fn``,
            ``multiprocessing_context`` and ``timeout``, as in ``torch.utils.data.DataLoader``.

    Raises:
        UsageError: if the dataset is iterable or empty, or has fewer samples than a global batch with ``drop_last``;
            and for DataLoader's other options, naming them. In a training or evaluation, if the length of the dataset
            or the sampler is another when an epoch begins.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch: GlobalBatch,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        sampler: Sampler | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        _check_batch("ElasticLoader(batch=...)", batch)
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise UsageError(
                f"ElasticLoader: {type(dataset).__name__} is an iterable dataset, whose samples cannot be told apart.",
                "Give the shards that it reads, el.ShardedStream(shards, open=..., lengths=...), or a map-style "
                "dataset (__len__ and __getitem__): their samples have numbers, and can be shared out anew on a "
                "restart.",
            )
        self.dataset = dataset
        self._samples = len(dataset)
        self._sampler = _checked_sampler(sampler, shuffle, dataset, batch)
        self._own_sampler = sampler is not None
        self._drop_last = drop_last
        self._collate = collate_fn or default_collate
        super().__init__(batch, seed, len(self._sampler), options)
        if not self.steps_per_epoch:
            raise UsageError(
                f"ElasticLoader: a dataset of {self.length} samples holds no global batch of {batch.size}.",
                "Make the global batch smaller, or leave out drop_last.",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same at every world size."""
        whole, rest = divmod(self.length, self.batch.size)
        return whole + (1 if rest and not self._drop_last else 0)

    def order(self, epoch: int, positions: Tensor | None = None) -> list[int]:
        """Return the dataset's indices of the samples at some positions of an epoch.

        Args:
            positions: a one-dimensional int64 CPU tensor; None: the whole epoch, in the order of use, which takes
                memory for all of it.
        """
        return self._indices(epoch, torch.arange(self.length, device="cpu") if positions is None else positions)

    def _contents(self, step: int, micro: int) -> str:
        items = self.indices(step, 1, 0)[micro]
        name = self.dataset._describe if isinstance(self.dataset, ShardedStream) else str
        return f"the dataset's items {', '.join(map(name, items[:8]))}{', ...' if len(items) > 8 else ''}"

    def _own_generators(self) -> list[str]:
        found = own_generators(self.dataset, type(self.dataset).__name__)
        found += own_generators(self._collate, "collate_fn")
        return found + own_generators(self._sampler, type(self._sampler).__name__)

    def _source(self) -> Dataset[Any]:
        return Batches(self.dataset, self._samples, self._collate, self.seed)

    def _sized(self) -> Sequence[tuple[str, Sized, int]]:
        assert isinstance(self.dataset, Sized)
        return ("dataset", self.dataset, self._samples), ("sampler", self._sampler, self.length)

    def _of_data(self) -> dict[str, int]:
        identity = {"dataset length": self._samples}
        if isinstance(self.dataset, ShardedStream):
            identity[LIST_OF_SHARDS] = self.dataset._fingerprint
        return identity

    def _hashed(self) -> int:
        spread = {place * (self.length - 1) // 31 for place in range(32)}
        places = sorted(spread | set(range(min(self.length, 32))))
        positions = torch.tensor(places, device="cpu")
        indices = self._indices(0, positions)
        if self._own_sampler and indices != self._indices(0, positions):
            name = type(self._sampler).__name__
            raise UsageError(
                f"{name}.indices() returned other samples for the same seed, epoch and positions.",
                "Compute them from its arguments alone, by el.samplers.Permutation or el.samplers.uniform for example.",
            )
        return derive("order", self.steps_per_epoch, *indices) >> 16

    def _indices(self, epoch: int, positions: Tensor) -> list[int]:
        given = self._sampler.indices(self.seed, epoch, positions)
        indices = torch.as_tensor(given, device="cpu")
        name = type(self._sampler).__name__
        if indices.shape != positions.shape or indices.is_floating_point() or indices.dtype is torch.bool:
            raise UsageError(
                f"{name}.indices() returned {indices.dtype} of shape {tuple(indices.shape)} for {len(positions)} "
                "positions.",
                "Return one integer for each position.",
            )
        lowest, highest = (int(bound) for bound in indices.aminmax())
        if lowest < 0 or highest >= self._samples:
            raise UsageError(
                f"{name}.indices() returned {lowest if lowest < 0 else highest}; the dataset has the samples 0 to "
                f"{self._samples - 1}."
            )
        listed: list[int] = indices.tolist()
        return listed


class FunctionLoader(Loader):
    """Loads micro-batches made by a function, for example from random offsets into one long array.

    ::

        def get_batch(step, micro):
            starts = torch.randint(len(tokens) - context, (len(micro),))
            return torch.stack([tokens[start : start + context + 1] for start in starts])

        loader = el.FunctionLoader(get_batch, el.GlobalBatch(64, micro=8))

    Args:
        get_batch: ``(step, micro) -> data``. ``step`` counts from 0 over the whole training, ``micro`` is a
            :class:`elastic_launch.MicroBatch`; returns that micro-batch's data, collated, with ``len(micro)`` samples.
            Random numbers that it draws from the global generators of torch, ``random`` or NumPy derive from the seed,
            the step and the micro-batch's index: they are the same at every world size and after every restart. The
            function must therefore keep no state between calls.
        batch: the global batch.
        seed: seed of all randomness.
        steps_per_epoch: number of optimizer steps that count as an epoch; None: there are no epochs, and lengths are
            given in steps (``"1000ba"``).
        options: as for :class:`ElasticLoader`.

    Raises:
        UsageError: if ``steps_per_epoch`` is less than 1, and for options that are not accepted, naming them.
    """

    def __init__(
        self,
        get_batch: GetBatch,
        batch: GlobalBatch,
        *,
        seed: int = 0,
        steps_per_epoch: int | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        _check_batch("FunctionLoader(batch=...)", batch)
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise UsageError(f"FunctionLoader(steps_per_epoch={steps_per_epoch}): an epoch has at least 1 step.")
        self._get_batch = get_batch
        self._steps_per_epoch = steps_per_epoch or ENDLESS
        super().__init__(batch, seed, self._steps_per_epoch * batch.size, options)

    @property
    def steps_per_epoch(self) -> int:
        return self._steps_per_epoch

    def _own_generators(self) -> list[str]:
        return own_generators(self._get_batch, _name(self._get_batch))

    def _contents(self, step: int, micro: int) -> str:
        return f"what {_name(self._get_batch)}() gives for step {step} and micro-batch {micro}"

    def _source(self) -> Dataset[Any]:
        return Drawn(self._get_batch, self.seed)

    def _hashed(self) -> int:
        return derive("function", self.steps_per_epoch) >> 16

    def _indices(self, epoch: int, positions: Tensor) -> list[int]:
        return []


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for DataLoader, or say what to give in the place of those that cannot be taken."""
    for option in options:
        if option in LoaderOptions.__annotations__:
            continue
        if option not in _INSTEAD:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        raise UsageError(f"{name} does not take DataLoader's {option}.", _INSTEAD[option])
    return dict(options)


def _checked_sampler(sampler: Sampler | None, shuffle: bool | None, dataset: Sized, batch: GlobalBatch) -> Sampler:
    if sampler is None:
        if isinstance(dataset, ShardedStream):
            return StreamOrder(dataset, batch.size, shuffle is not False)
        # An empty dataset is refused by its number of steps.
        return InOrder(len(dataset)) if shuffle is False else Shuffled(len(dataset))
    if not isinstance(sampler, Sampler) or not callable(sampler.indices):
        raise UsageError(
            f"ElasticLoader(sampler=...) is a {type(sampler).__name__}, which cannot be asked for a position.",
            "Give what has __len__ and indices(seed, epoch, positions), see el.samplers: torch's samplers give all "
            "indices one after the other, from a random state that no restart would find again.",
        )
    if shuffle is not None:
        raise UsageError(
            f"ElasticLoader(shuffle={shuffle}) has a sampler, which decides the order.", "Give one of them."
        )
    return sampler


@lru_cache(maxsize=64)
def _cached_plan(batch: GlobalBatch, world_size: int, rank: int, samples: int | None) -> BatchPlan:
    return batch.plan(world_size, rank, samples)


def _begin(init: Callable[[int], None] | None, worker: int) -> None:
    """Begin a loader's process, which the agent looks at if the training waits for it."""
    if os.environ.get(ENV_SOCKET):
        dump_stacks_on_signal()
    if init is not None:
        init(worker)


def _as_it_is(batch: Any) -> Any:
    """Return a collated micro-batch; in a loader's process, check once that it can be sent."""
    if get_worker_info() is not None and os.getpid() not in _SENDING:
        # The loader sends it in a thread, whose error nothing would wait for.
        try:
            pickle.dumps(batch)
        except Exception as error:  # noqa: BLE001 - whatever a sample's own __reduce__ raises
            raise UsageError(
                f"The samples cannot be sent from the loader's process ({type(error).__name__}: {error}).",
                "Return tensors, arrays, numbers, strings, and lists and dicts of them, or load with num_workers=0.",
            ) from None
        _SENDING.add(os.getpid())
    return batch


_SENDING: set[int] = set()  # this process, if it has sent a micro-batch


def check_loader(where: str, loader: object) -> None:
    """Check that an argument is a loader of this library."""
    remedy = (
        "Give an el.ElasticLoader of its dataset, or, if that is iterable, of an el.ShardedStream of the shards that "
        "it reads: it shares samples out over any number of ranks."
    )
    check_kind(where, loader, Loader, remedy)


def _check_batch(where: str, batch: object) -> None:
    check_kind(where, batch, GlobalBatch, "Give el.GlobalBatch(size, micro=...): its samples, and those of each pass.")
