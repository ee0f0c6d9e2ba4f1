"""The epochs of a loader: which samples each step has, and this rank's micro-batches of them.

Epoch e visits the dataset in an order that derives from (seed, e). This order is cut into global batches, these into
micro-batches, and each rank loads its own slice of each global batch. On a resume, the loader starts at the first
micro-batch that remains, at any world size. No state is held for a whole epoch: neither memory nor startup time depends
on its length.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby, islice
from multiprocessing import get_all_start_methods, get_start_method
from multiprocessing.context import BaseContext
from typing import Any, Self, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from elastic_launch.batch import BatchPlan, GlobalBatch
from elastic_launch.contract import ENV_SOCKET
from elastic_launch.errors import UsageError
from elastic_launch.stack_dump import dump_stacks_on_signal
from elastic_launch.training.data.batches import (
    Batches,
    BatchSource,
    Drawn,
    Feed,
    GetBatch,
    MicroBatchRequest,
    check_length,
    name_of,
)
from elastic_launch.training.data.content import Content, chosen, compared
from elastic_launch.training.data.generators import own_generators, refuse_generators
from elastic_launch.training.data.samplers import SAMPLE_ORDER, Sampler
from elastic_launch.training.data.streams import ShardedStream, described, shards_hash
from elastic_launch.training.randomness import derive
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

AT_A_TIME = 16384
"""Number of positions requested from a sampler at a time; a request for few would take as long."""

WAITS = 10.0
"""Seconds to wait for the samples that ranks compare, if they are read in a process."""

Beside = Callable[[int], int | None]
"""``step -> micro``: see :meth:`Epochs.epoch_from`."""

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


class Epochs(ABC):
    """What the library needs of a loader.

    Attributes:
        batch: the global batch.
        seed: all randomness in the data derives from it.
        length: number of samples in an epoch.
        steps_per_epoch: optimizer steps in an epoch.
    """

    loader: str  # name of the class that the user has made, for errors
    part: Any = None  # what the data have of the training's state, if anything
    _exact = False  # whether the data must be the same after a restart
    bound = ""  # why a process cannot go on with them in another round; empty if it can

    def __init__(
        self, batch: GlobalBatch, seed: int, length: int, steps_per_epoch: int, options: Mapping[str, Any]
    ) -> None:
        self.batch = batch
        try:
            seed = operator.index(seed)  # a checkpoint cannot hold NumPy's
        except TypeError:
            raise UsageError(f"seed={seed!r} is not a whole number.", "Give one, such as seed=0.") from None
        self.seed = seed
        self.length = length
        self.steps_per_epoch = steps_per_epoch
        self._options = _checked(self.loader, options)
        self._feed = Feed()
        # Without a generator, DataLoader would draw from the global one once per epoch and restart.
        self._generator = torch.Generator()
        self._data_loader = self._made()

    @abstractmethod
    def contents(self, step: int, micro: int) -> str:
        """Describe the samples of a step's micro-batch, for errors."""

    @abstractmethod
    def check_lengths(self) -> None:
        """Check, where an epoch begins, that the data have the length with which the loader was made."""

    @property
    @abstractmethod
    def given(self) -> Any:
        """What the script has given to read from: a dataset or a function."""

    @abstractmethod
    def _source(self) -> BatchSource:
        """Return the dataset that fetches the micro-batch of a request."""

    @abstractmethod
    def at(self, epoch: int, positions: Tensor) -> list[int]:
        """Return the dataset's index at each position of an epoch."""

    @abstractmethod
    def _hashes(self) -> dict[str, int]:
        """Return what identifies the data and the order of samples."""

    @abstractmethod
    def _own_generators(self) -> list[str]:
        """Return the names of the random generators that the data holds."""

    def enter(self, world: World, step: int) -> None:
        """Take part in a round that begins after so many steps; called by all ranks."""
        if self.part is not None:
            self.part.enter(world, step)

    def apart(self) -> Self:
        """Return the epochs of the same data, whose processes, if there are any, end with their iterators."""
        other = copy.copy(self)
        other._options = {**self._options, "persistent_workers": False}
        other._feed, other._generator = Feed(), torch.Generator()
        other._data_loader = other._made()
        return other

    def evaluated(self) -> Self:
        """Return the epochs from which an evaluation reads: it begins with step 0, wherever a training is."""
        return self

    def spare(self, step: int, micro: int = 0) -> Any:
        """Return a micro-batch of a step's global batch, by its index there, on any rank."""
        with closing(self.apart().epoch_from(step, 1, 0)) as batches:
            return next(islice(batches, micro, None))

    def check_exact(self) -> None:
        """Check, as far as possible, that the data will be the same after a restart."""
        refuse_generators(self._own_generators())
        self._exact = True  # each process that reads looks again

    def content(self) -> dict[str, str]:
        """Return what identifies the content of the data, by the names used in errors; random generators change."""
        return {}

    def position(self, step: int) -> Position:
        """Return the position of a step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Position(step, epoch, within)

    def samples_in(self, step: int) -> int:
        """Return the number of samples in a step's global batch."""
        start = step % self.steps_per_epoch * self.batch.size
        return min(self.batch.size, self.length - start)

    def plan(self, step: int, world_size: int, rank: int) -> BatchPlan:
        """Return a rank's share of a step's global batch."""
        return _cached_plan(self.batch, world_size, rank, self.samples_in(step))

    def indices(self, step: int, world_size: int, rank: int) -> list[list[int]]:
        """Return the dataset's indices of a rank's samples in a step, as one list per micro-batch."""
        return [request.indices for request in self._requests(range(step, step + 1), world_size, rank)]

    @property
    def identity(self) -> dict[str, int]:
        """What must be the same when a training resumes from a checkpoint."""
        identity = {"global batch": self.batch.size, "seed": self.seed, **self._of_data}
        if self.batch.micro != "auto":
            identity["micro-batch"] = self.batch.micro
        return identity

    @cached_property
    def _of_data(self) -> dict[str, int]:
        return self._hashes()

    def go_on(self, identity: Mapping[str, int]) -> None:
        """Continue the training of a checkpoint with this identity: take its micro-batch size if there is none here."""
        if self.batch.micro == "auto" and "micro-batch" in identity:
            self.batch = GlobalBatch(self.batch.size, identity["micro-batch"])

    def epoch_from(self, step: int, world_size: int, rank: int, beside: Beside | None = None) -> Generator[Any]:
        """Yield a rank's collated micro-batches one by one, from a step to the end of its epoch.

        Args:
            beside: returns the index of the micro-batch of a step that follows the rank's own; None: none does.
        """
        first = self.position(step)
        steps = range(step, step + self.steps_per_epoch - first.step_in_epoch)
        requests = self._requests(steps, world_size, rank)
        self._feed.requests = requests = requests if beside is None else self._with_others(requests, beside)
        self._generator.manual_seed(derive("loader", self.seed, first.epoch))
        for batch in self._data_loader:
            yield batch
            if self._data_loader.persistent_workers and self._feed.requests is not requests:
                raise UsageError(
                    f"{self.loader}(persistent_workers=True) was asked for an epoch in the middle of another.",
                    "Give evaluation a loader of its own, or leave out persistent_workers.",
                )

    def _made(
        self, source: Dataset[Any] | None = None, sampler: Iterable[Any] | None = None, **changed: Any
    ) -> DataLoader[Any]:
        begin = partial(_begin, self._options.get("worker_init_fn"), self.given)
        try:
            return DataLoader(
                source or self._source(),
                batch_size=None,
                sampler=sampler or self._feed,
                collate_fn=_as_it_is,
                generator=self._generator,
                **{**self._options, "worker_init_fn": begin, **changed},
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self.loader}: {error}", "These options go on to torch's DataLoader.") from None

    def _with_others(self, requests: Iterator[MicroBatchRequest], beside: Beside) -> Iterator[MicroBatchRequest]:
        for step, own in groupby(requests, operator.attrgetter("step")):
            yield from own
            if (micro := beside(step)) is not None:
                yield from islice(self._requests(range(step, step + 1), 1, 0), micro, micro + 1)

    def _requests(self, steps: range, world_size: int, rank: int) -> Iterator[MicroBatchRequest]:
        """Yield a rank's requests for some steps of one epoch."""
        size, start = self.batch.size, steps.start
        first = self.position(start)
        in_full = _cached_plan(self.batch, world_size, rank, None).micro_batches
        share = in_full[-1].stop - in_full[0].start if in_full else 0
        exact = self._exact
        while start < steps.stop:
            plan = self.plan(start, world_size, rank)
            within = first.step_in_epoch + start - steps.start
            # As many full global batches as one request to the sampler covers; the last global batch may be short.
            full = min(steps.stop, self.length // size - within + start) - start
            count = max(1, min(full, AT_A_TIME // share if share else full))
            micros = plan.micro_batches
            if micros:
                starts = torch.arange(within, within + count, device="cpu").mul_(size)
                shares = torch.arange(micros[0].start, micros[-1].stop, device="cpu")
                indices = self.at(first.epoch, (starts.unsqueeze(1) + shares).flatten())
                done = 0
                for step in range(start, start + count):
                    for micro in micros:
                        place = (within + step - start) * size + micro.start
                        yield MicroBatchRequest(
                            step, first.epoch, place, micro, indices[done : done + len(micro)], exact
                        )
                        done += len(micro)
            start += count


class DatasetEpochs(Epochs):
    """Epochs of a map-style dataset, in the order of a sampler; for the arguments see ``ElasticLoader``."""

    loader = "ElasticLoader"

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Sampler,
        collate: Callable[[Any], Any],
        batch: GlobalBatch,
        seed: int,
        options: Mapping[str, Any],
        *,
        drop_last: bool,
        compare_samples: bool,
    ) -> None:
        assert isinstance(dataset, Sized)
        self._dataset = dataset
        self._compares = compare_samples
        self._samples = len(dataset)
        self._sampler = sampler
        self._collate = collate
        length = len(sampler)
        super().__init__(batch, seed, length, length // batch.size if drop_last else -(-length // batch.size), options)

    @property
    def given(self) -> Any:
        return self._dataset

    def contents(self, step: int, micro: int) -> str:
        items, data = self.indices(step, 1, 0)[micro], self._dataset
        names = [described(data, item) if isinstance(data, ShardedStream) else str(item) for item in items[:8]]
        return f"the dataset's items {', '.join(names)}{', ...' if len(items) > 8 else ''}"

    def check_lengths(self) -> None:
        assert isinstance(self._dataset, Sized)
        check_length("dataset", self._dataset, self._samples)
        check_length("sampler", self._sampler, self.length)

    def content(self) -> dict[str, str]:
        indices, found = chosen(self._samples, self.seed), dict[int, str]()
        if isinstance(self._dataset, ShardedStream):  # others may be far from where their shard begins
            indices = self._dataset.firsts(indices)
        # Not in this process if the training reads in others: what a dataset opens may not be for several. Another than
        # a forked one takes seconds to start, and a script that asks for it may be one that must not be forked.
        workers = min(self._options.get("num_workers", 0), 1)
        given = self._options.get("multiprocessing_context")
        method = given.get_start_method() if isinstance(given, BaseContext) else given
        method = method or get_start_method(allow_none=True) or get_all_start_methods()[0]  # the default
        forks = method == "fork"
        alone: dict[str, Any] = {"num_workers": workers, "persistent_workers": False, "pin_memory": False}
        alone |= {"timeout": WAITS, "multiprocessing_context": "fork"} if workers else {"timeout": 0}
        try:
            if self._compares and (forks or not workers) and not own_generators(self._dataset, ""):  # they would change
                source = Content(Batches(self._dataset, self._samples, _as_it_is, self.seed), indices)
                found = next(iter(self._made(source, [0], **alone)))
        except Exception as error:  # noqa: BLE001 - of the script's dataset; its training will show it
            _log.info("samples are not compared between ranks: %s: %s", type(error).__name__, error)
            error.__traceback__ = error.__context__ = error.__cause__ = None  # they may hold the loader's processes
        return compared(indices, found)

    def _own_generators(self) -> list[str]:
        return self._source().own_generators() + own_generators(self._sampler, type(self._sampler).__name__)

    def _source(self) -> BatchSource:
        return Batches(self._dataset, self._samples, self._collate, self.seed)

    def _hashes(self) -> dict[str, int]:
        places = {place * (self.length - 1) // 31 for place in range(32)} | set(range(min(self.length, 32)))
        positions = torch.tensor(sorted(places), device="cpu")
        indices = self.at(0, positions)
        if indices != self.at(0, positions):
            name = type(self._sampler).__name__
            raise UsageError(
                f"{name}.indices() returned other samples for the same seed, epoch and positions.",
                "Compute them from its arguments alone, by el.samplers.Permutation or el.samplers.uniform for example.",
            )
        of_data = {"dataset length": self._samples}
        if isinstance(self._dataset, ShardedStream):
            of_data[LIST_OF_SHARDS] = shards_hash(self._dataset)
        return of_data | {SAMPLE_ORDER: derive("order", self.steps_per_epoch, *indices) >> 16}

    def at(self, epoch: int, positions: Tensor) -> list[int]:
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


class FunctionEpochs(Epochs):
    """Epochs of what a function makes; for the arguments see ``FunctionLoader``."""

    loader = "FunctionLoader"

    def __init__(
        self, get_batch: GetBatch, batch: GlobalBatch, seed: int, steps_per_epoch: int, options: Mapping[str, Any]
    ) -> None:
        self._get_batch = get_batch
        super().__init__(batch, seed, steps_per_epoch * batch.size, steps_per_epoch, options)

    @property
    def given(self) -> Any:
        return self._get_batch

    def contents(self, step: int, micro: int) -> str:
        return f"what {name_of(self._get_batch)}() gives for step {step} and micro-batch {micro}"

    def check_lengths(self) -> None:
        """There is nothing to check: a function has no length."""

    def _own_generators(self) -> list[str]:
        return self._source().own_generators()

    def _source(self) -> BatchSource:
        hint = "Make len(micro) samples: the last micro-batch of a step may have fewer than the others."
        return Drawn(self._get_batch, self.seed, f"{name_of(self._get_batch)}()", hint)

    def _hashes(self) -> dict[str, int]:
        return {SAMPLE_ORDER: derive("function", self.steps_per_epoch) >> 16}

    def at(self, epoch: int, positions: Tensor) -> list[int]:
        return []


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for DataLoader, or say what to give in the place of those that cannot be taken."""
    for option in options:
        if option in LoaderOptions.__annotations__:
            continue
        if option not in _INSTEAD:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        raise UsageError(f"{name} does not take DataLoader's {option}.", _INSTEAD[option])
    return dict(options)


@lru_cache(maxsize=64)
def _cached_plan(batch: GlobalBatch, world_size: int, rank: int, samples: int | None) -> BatchPlan:
    return batch.plan(world_size, rank, samples)


def _begin(init: Callable[[int], None] | None, given: Any, worker: int) -> None:
    """Begin a loader's process, which the agent looks at if the training waits for it."""
    if os.environ.get(ENV_SOCKET):
        dump_stacks_on_signal()
    # It was sent together with what fetches from it, so that both have the same copy.
    object.__setattr__(get_worker_info(), "dataset", given)
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
