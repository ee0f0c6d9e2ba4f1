"""Loaders that yield the same samples in the same micro-batches at every world size and after every restart."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from elastic_launch.batch import GlobalBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.data.batches import GetBatch
from elastic_launch.training.data.epochs import DatasetEpochs, Epochs, FunctionEpochs, LoaderOptions
from elastic_launch.training.data.samplers import InOrder, Sampler, Shuffled
from elastic_launch.training.data.streams import ShardedStream, StreamOrder
from elastic_launch.training.durations import ENDLESS
from elastic_launch.training.kinds import check_kind


class Loader:
    """Base class of :class:`ElasticLoader` and :class:`FunctionLoader`, which load micro-batches."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    @property
    def batch(self) -> GlobalBatch:
        """The global batch."""
        return self._epochs.batch

    @batch.setter
    def batch(self, batch: GlobalBatch) -> None:
        self._epochs.batch = batch

    @property
    def seed(self) -> int:
        """All randomness in the data derives from it."""
        return self._epochs.seed

    @property
    def length(self) -> int:
        """Number of samples in an epoch."""
        return self._epochs.length

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same at every world size."""
        return self._epochs.steps_per_epoch

    def indices(self, step: int, world_size: int, rank: int) -> list[list[int]]:
        """Return the dataset's indices of a rank's samples in a step, as one list per micro-batch."""
        return self._epochs.indices(step, world_size, rank)


def epochs_of(loader: Loader) -> Epochs:
    """Return what the library needs of a loader."""
    return loader._epochs


class ElasticLoader(Loader):
    """Loads the micro-batches of a map-style dataset.

    Args:
        dataset: a map-style dataset with ``__len__`` and ``__getitem__``, or with ``__getitems__``, which returns all
            samples of a micro-batch at once; or a :class:`elastic_launch.ShardedStream`. Random numbers that it draws
            from the global generators of torch, ``random`` or NumPy are the same in any process: they derive from the
            seed, the epoch and the micro-batch's place in the epoch. A generator of its own is an error with
            ``exact=True``: the attributes of the dataset, its transforms, ``collate_fn`` and sampler are searched, and
            the closures and global names that their methods use; again in each process that has read a micro-batch.
        batch: the global batch.
        seed: seed of the order of samples and of all randomness in them.
        shuffle: whether each epoch has its own random order; False: the dataset's order. The default is to shuffle.
        sampler: gives another order, see :class:`elastic_launch.samplers.Sampler`; leave out ``shuffle`` then.
        drop_last: whether to drop samples that do not fill a global batch; otherwise they make a short last one.
        collate_fn: as in ``torch.utils.data.DataLoader``. It may draw random numbers as the dataset does.
        compare_samples: whether all ranks read the same three samples before a training's first step, each at least
            twice, and end with an error if they have other content. These are the first, the last, and one that the
            seed chooses; of a stream, the first samples of their shards. They are read where the loader will read, in a
            forked process unless ``num_workers`` is 0, with random generators that are seeded alike. What may differ
            between nodes does not count: the directory in a path (of a text of one line with a ``/``, only the part
            after the last one counts), the last bits of floats and pixels, and objects of unknown classes. It takes 0.1
            s, or six times as long as a sample; if that is more than 2 s, if a sample cannot be read, or with
            ``multiprocessing_context`` spawn or forkserver, none is compared. Nor are data that give something else for
            the same index the second time, or that hold a random generator, and data of evaluations. If ranks differ,
            those that have not trained yet read once more, 1.1 s later: the samples may contain the time. In the forked
            process ``worker_init_fn`` is called once more than in the training. Give False if data differ between ranks
            by design or contain the time in minutes, or if reading has effects.
        options: ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, ``worker_init_fn``,
            ``multiprocessing_context`` and ``timeout``, as in ``torch.utils.data.DataLoader``. In a loader's process,
            ``get_worker_info().dataset`` is its copy of the dataset, and of a :class:`FunctionLoader` the function.

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
        compare_samples: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        checked_batch("ElasticLoader(batch=...)", batch)
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise UsageError(
                f"ElasticLoader: {type(dataset).__name__} is an iterable dataset, whose samples cannot be told apart.",
                "Give the shards that it reads, el.ShardedStream(shards, open=..., lengths=...), or a map-style "
                "dataset (__len__ and __getitem__): their samples have numbers, and can be shared out anew on a "
                "restart.",
            )
        self.dataset = dataset
        order = _checked_sampler(sampler, shuffle, dataset, batch)
        collate = collate_fn or default_collate
        how = {"drop_last": drop_last, "compare_samples": compare_samples}
        super().__init__(DatasetEpochs(dataset, order, collate, batch, seed, options, **how))
        if not self.steps_per_epoch:
            raise UsageError(
                f"ElasticLoader: a dataset of {self.length} samples holds no global batch of {batch.size}.",
                "Make the global batch smaller, or leave out drop_last.",
            )

    def order(self, epoch: int, positions: Tensor | None = None) -> list[int]:
        """Return the dataset's indices of the samples at some positions of an epoch.

        Args:
            positions: a one-dimensional int64 CPU tensor; None: the whole epoch, in the order of use, which takes
                memory for all of it.
        """
        return self._epochs.at(epoch, torch.arange(self.length, device="cpu") if positions is None else positions)


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
        checked_batch("FunctionLoader(batch=...)", batch)
        steps = steps_in_epoch("FunctionLoader", steps_per_epoch)
        super().__init__(FunctionEpochs(get_batch, batch, seed, steps, options))


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


def check_loader(where: str, loader: object) -> None:
    """Check that an argument is a loader of this library."""
    remedy = (
        "Give an el.ElasticLoader of its dataset, or, if that is iterable, of an el.ShardedStream of the shards that "
        "it reads: it shares samples out over any number of ranks."
    )
    check_kind(where, loader, Loader, remedy)


def steps_in_epoch(loader: str, given: int | None) -> int:
    """Return the number of steps that count as an epoch, if the data have no length."""
    if given is not None and (not hasattr(given, "__index__") or given < 1):
        raise UsageError(f"{loader}(steps_per_epoch={given!r}): an epoch has at least 1 step.", "Give a whole number.")
    return given or ENDLESS


def checked_batch(where: str, batch: object) -> None:
    check_kind(where, batch, GlobalBatch, "Give el.GlobalBatch(size, micro=...): its samples, and those of each pass.")
