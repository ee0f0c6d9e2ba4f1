"""What a loader's processes draw: it depends on its place alone, or is refused in exact mode."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.data.loader import epochs_of
from elastic_launch.training.ranks.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("torchdata") is None, reason="torchdata is not installed: pip install '.[frameworks]'"
    ),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]

BATCH = el.GlobalBatch(4, micro=2)


def noise() -> Tensor:
    return torch.stack([torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())])


class Rows(Dataset[Tensor]):
    """Four micro-batches of samples that draw from all global generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.tensor([index]), noise()])


class Flow(IterableDataset[Tensor]):
    """As many samples in an order drawn as a pass begins, in each process; it knows its place or is read again."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(8).tolist():
            yield torch.cat([torch.tensor([index]), noise() if self.draws else torch.zeros(3)])


class StatefulFlow(Flow):
    given = first = 0

    def __iter__(self) -> Iterator[Tensor]:
        first, self.first = self.first, 0
        for self.given, sample in enumerate(super().__iter__(), 1):
            if self.given > first:
                yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["given"]


def loader(dataset: Any, **options: Any) -> el.StatefulLoader:
    def make(shard: int, shards: int) -> Any:
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader(
            dataset, batch_size=2, **{"num_workers": 1, **options}
        )

    made = el.StatefulLoader(make, BATCH)
    epochs_of(made).check_exact()
    return made


def drawn(loader: el.StatefulLoader, steps: range) -> list[Any]:
    batches = epochs_of(loader).epoch_from(steps.start, 1, 0)
    return [[next(batches).tolist() for _ in range(2)] for _ in steps]


def close(*loaders: el.StatefulLoader) -> None:
    """End their processes."""
    for each in loaders:
        epochs_of(each).part._readers.clear()
    gc.collect()  # an error may hold some
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(10)


@pytest.mark.parametrize(
    ("dataset", "options", "collected"),
    [
        (Rows(), {}, 2),
        (Rows(), {"num_workers": 2, "shuffle": True, "snapshot_every_n_steps": 2}, 3),
        (Rows(), {"persistent_workers": True, "worker_init_fn": torch.manual_seed}, 5),
        (Flow(draws=True), {}, 2),
        (Flow(draws=True), {"persistent_workers": True}, 5),
        (StatefulFlow(draws=False), {"num_workers": 2}, 2),
    ],
)
def test_processes_draw_the_same_from_any_place_on(dataset: Any, options: dict[str, Any], collected: int) -> None:
    one, two = loader(dataset, **options), loader(dataset, **options)
    part, other = epochs_of(one).part, epochs_of(two).part
    part.enter(World(), 0)
    before = drawn(one, range(collected))
    part.collect(collected, World())
    after = drawn(one, range(collected, 6))
    other.load_state_dict(part.state_dict())
    other.enter(World(), collected)
    again = drawn(two, range(collected, 6))
    close(one, two)
    assert again == after
    samples = [tuple(sample) for step in before + after for micro in step for sample in micro]
    if not isinstance(dataset, StatefulFlow):
        assert len({*samples}) == len(samples), "each sample of each pass and shard has random numbers of its own"


def test_samples_drawn_by_an_iterable_that_knows_its_place_are_refused_in_exact_mode() -> None:
    read = loader(StatefulFlow(draws=True))
    drawn(read, range(1))
    said = r"(?s)StatefulFlow draws from the global random generators in a process of the loader.*num_workers=0"
    with pytest.raises(UsageError, match=said):
        drawn(read, range(1, 2))
    close(read)


def test_without_exact_mode_they_are_not() -> None:
    made = loader(StatefulFlow(draws=True))
    epochs_of(made).part.exact = False
    assert len(drawn(made, range(3))) == 3
    close(made)


def test_what_the_script_reads_from_the_loader_later_is_its_own() -> None:
    given: list[Any] = []
    stateful = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    made = el.StatefulLoader(
        lambda shard, shards: given.append(stateful(Rows(), batch_size=2, num_workers=1)) or given[-1], BATCH
    )
    epochs_of(made).part.enter(World(), 0)
    drawn(made, range(1))
    mine = given[0]
    close(made)
    assert mine.worker_init_fn is None
    passes = [[batch.tolist() for batch in mine] for _ in range(2)]
    assert passes[0] != passes[1]
    del mine, given[:]
    close()
