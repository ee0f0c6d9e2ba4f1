"""Random numbers in the processes of a torch ``DataLoader``: they depend on what is read, not on what was read before.

torch seeds a process once, and its generators run on. One that begins at a later place would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import fetch

from elastic_launch.errors import UsageError
from elastic_launch.training.randomness import derive, random_state, seed_all

_KNOWN: WeakKeyDictionary[DataLoader[Any], LoaderProcesses] = WeakKeyDictionary()
"""By loader: its processes may outlive a pass."""


class LoaderProcesses:
    """Begins each process of a loader, as its ``worker_init_fn``; from then on the process seeds what it fetches.

    The numbers drawn for a batch of a map-style dataset derive from the pass and the batch's indices. An iterable
    dataset has none: the numbers derive from the pass, and run on. If it finds its place by a state, it must not draw.

    Args:
        key: the seed, and what else tells the loader apart.
        exact: whether to refuse numbers that would be others after a restart.
    """

    def __init__(self, key: str, *, exact: bool) -> None:
        self._init: Callable[[int], None] | None = None
        self._key, self._exact = key, exact
        # Shared with processes that outlive a pass.
        self._pass = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, loader: DataLoader[Any], key: str, *, exact: bool) -> LoaderProcesses:
        """Return those of a loader, which may have been opened before."""
        found = _KNOWN.get(loader)
        if found is None or (found._key, found._exact) != (key, exact):
            found = _KNOWN[loader] = cls(key, exact=exact)
        return found

    @contextmanager
    def attached(self, loader: DataLoader[Any]) -> Iterator[None]:
        """The context in which the loader starts its processes; what the script does with it later is its own."""
        self._init = loader.worker_init_fn
        loader.worker_init_fn = self
        try:
            yield
        finally:
            loader.worker_init_fn = self._init

    def begin_pass(self, number: int) -> None:
        """Note the number of the pass, before its iterator is made."""
        self._pass.fill_(number)

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        processes, given = self, info.dataset
        if self._init is not None:
            self._init(worker)

        # Datasets may have loaders of their own, which read in this process.
        class OfMap(fetch._MapDatasetFetcher):
            def fetch(self, index: Any) -> Any:
                if self.dataset is given:
                    processes._seed(repr(index))
                return super().fetch(index)  # type: ignore[no-untyped-call]

        class OfIterable(fetch._IterableDatasetFetcher):
            def __init__(self, dataset: Any, *args: Any) -> None:
                if dataset is given:
                    processes._seed("begin", worker)
                super().__init__(dataset, *args)
                stateful = hasattr(dataset, "state_dict") or hasattr(self.dataset_iter, "state_dict")
                self._checks = processes._exact and stateful and dataset is given
                self._first = True

            def fetch(self, index: Any) -> Any:
                # The first one may draw the order of a pass, as it does from any place on; without a state, what was
                # read is read again.
                before = random_state() if self._checks and not self._first else None
                self._first = False
                fetched = super().fetch(index)  # type: ignore[no-untyped-call]
                if before is not None and before != random_state():
                    raise UsageError(
                        f"exact=True: {type(given).__name__} draws from the global random generators in a process of "
                        "the loader, and these are not a part of its state: after a fault it would draw other numbers.",
                        "Load with num_workers=0; or draw from random.Random(place), made for each sample; or use a "
                        "map-style dataset.",
                    )
                return fetched

        fetch._MapDatasetFetcher = OfMap  # type: ignore[misc]
        fetch._IterableDatasetFetcher = OfIterable  # type: ignore[misc, assignment]

    def _seed(self, *what: int | str) -> None:
        seed_all(derive("process", self._key, int(self._pass), *what), devices=False)
