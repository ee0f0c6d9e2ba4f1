"""The same samples, in the same order and micro-batches, at every world size and through any restart."""

from __future__ import annotations

import os
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from elastic_agents.workers.processes import catches
from elastic_launch.batch import GlobalBatch
from elastic_launch.contract import ENV_SOCKET
from elastic_launch.errors import UsageError
from elastic_launch.stack_dump import SIGNAL
from elastic_launch.training.data.loader import ElasticLoader, FunctionLoader, epochs_of
from elastic_launch.training.randomness import seeded


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Items that are random in all ways a dataset may be."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), torch.rand(()).item()], dtype=torch.float64)


@st.composite
def loaders(draw: st.DrawFn) -> ElasticLoader:
    size = draw(st.integers(1, 64))
    micro = draw(st.integers(1, min(16, size)))
    length = draw(st.integers(1, min(150, 12 * size)))
    return ElasticLoader(Numbers(length), GlobalBatch(size, micro), seed=draw(st.integers(0, 3)))


def _step(loader: ElasticLoader, step: int, world: int) -> list[list[int]]:
    """All micro-batches of a step, of all ranks in rank order."""
    return [micro for rank in range(world) for micro in loader.indices(step, world, rank)]


@settings(deadline=None, max_examples=15)
@given(loaders(), st.integers(1, 9), st.integers(0, 2))
def test_a_step_is_the_same_at_every_world_size(loader: ElasticLoader, world: int, epoch: int) -> None:
    for step in range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch):
        assert _step(loader, step, world) == _step(loader, step, 1)


@settings(deadline=None, max_examples=15)
@given(loaders(), st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_each_sample_once_per_epoch_through_any_restart(loader: ElasticLoader, worlds: list[int]) -> None:
    """The world may change at every step."""
    for epoch in range(2):
        steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
        seen = [i for step in steps for micro in _step(loader, step, worlds[step % len(worlds)]) for i in micro]
        assert sorted(seen) == list(range(loader.length))


@settings(deadline=None, max_examples=20)
@given(loaders(), st.integers(1, 4), st.data())
def test_the_loaded_samples_are_those_planned_from_any_step_on(
    loader: ElasticLoader, world: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, loader.steps_per_epoch - 1))
    for rank in range(world):
        loaded = [micro.tolist() for micro in epochs_of(loader).epoch_from(step, world, rank)]
        planned = [m for s in range(step, loader.steps_per_epoch) for m in loader.indices(s, world, rank)]
        assert loaded == planned


@pytest.mark.parametrize("workers", [0, 2])
def test_what_samples_draw_is_the_same_at_every_world_size(workers: int) -> None:
    def load(world: int, workers: int) -> torch.Tensor:
        loader = ElasticLoader(Noisy(20), GlobalBatch(8, 2), seed=5, num_workers=workers)
        batches = [batch for rank in range(world) for batch in epochs_of(loader).epoch_from(0, world, rank)]
        together = torch.cat(batches)
        return together[together[:, 0].argsort()]

    assert torch.equal(load(1, 0), load(3, workers))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    loader = ElasticLoader(Numbers(100), GlobalBatch(10, 5))
    other = ElasticLoader(Numbers(100), GlobalBatch(10, 5), seed=1)
    assert loader.order(0) != loader.order(1)
    assert loader.order(0) != other.order(0)
    assert ElasticLoader(Numbers(3), GlobalBatch(1, 1), shuffle=False).order(7) == [0, 1, 2]


def test_loading_leaves_the_random_state_alone() -> None:
    loader = ElasticLoader(Noisy(8), GlobalBatch(4, 2))
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    list(epochs_of(loader).epoch_from(0, 1, 0))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_a_short_last_batch_is_kept_or_dropped() -> None:
    kept = ElasticLoader(Numbers(10), GlobalBatch(4, 2))
    dropped = ElasticLoader(Numbers(10), GlobalBatch(4, 2), drop_last=True)
    assert (kept.steps_per_epoch, dropped.steps_per_epoch) == (3, 2)
    assert (epochs_of(kept).samples_in(2), epochs_of(kept).samples_in(3)) == (2, 4)


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(UsageError, match="iterable dataset") as caught:
        ElasticLoader(Stream(), GlobalBatch(1, 1))
    assert "map-style" in caught.value.hint


@pytest.mark.parametrize(("length", "drop_last"), [(0, False), (3, True)])
def test_a_dataset_without_a_batch_is_refused(length: int, drop_last: bool) -> None:
    with pytest.raises(UsageError, match=f"a dataset of {length} samples holds no global batch of 4"):
        ElasticLoader(Numbers(length), GlobalBatch(4, 2), drop_last=drop_last)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_what_any_other_world_loads_on_resuming_is_the_rest_of_the_epoch(data: st.DataObject) -> None:
    """At every step of a later epoch, also in a short last batch: the loading itself, not only the plans."""
    size = data.draw(st.integers(1, 64), label="size")
    micro = data.draw(st.integers(1, min(16, size)), label="micro")
    whole = data.draw(st.integers(0, 2), label="whole batches")
    rest = data.draw(st.integers(0 if whole else 1, size - 1 if whole else size), label="rest")
    dataset = TensorDataset(torch.arange(whole * size + rest))
    loader = ElasticLoader(dataset, GlobalBatch(size, micro), seed=3)
    epoch = data.draw(st.integers(0, 2), label="epoch")
    for step in range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch):
        world = data.draw(st.integers(1, 9), label="world")
        found = [
            int(i)
            for rank in range(world)
            for (micro,) in epochs_of(loader).epoch_from(step, world, rank)
            for i in micro
        ]
        done = (step - epoch * loader.steps_per_epoch) * size
        assert sorted(found) == sorted(loader.order(epoch)[done:])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collating_draws_is_the_same_at_every_world_size(workers: int) -> None:
    def collate(samples: list[int]) -> list[float]:
        return [float(torch.rand(())), random.random()]

    def drawn(world: int) -> list[list[float]]:
        loader = ElasticLoader(Numbers(10), GlobalBatch(8, 2), collate_fn=collate, num_workers=workers)
        per_rank = [list(epochs_of(loader).epoch_from(0, world, rank)) for rank in range(world)]
        counts = [[epochs_of(loader).plan(step, world, rank).grad_accum for rank in range(world)] for step in (0, 1)]
        return [per_rank[rank].pop(0) for row in counts for rank in range(world) for _ in range(row[rank])]

    one = drawn(1)
    assert len({tuple(values) for values in one}) == 5
    assert drawn(2) == one


def test_numpys_random_state_is_given_back() -> None:
    np.random.seed(1)
    expected = np.random.rand(3).tolist()
    np.random.seed(1)
    with seeded(5, devices=False):
        inner = np.random.rand(2).tolist()
        with seeded(5, devices=False):
            assert np.random.rand(2).tolist() == inner
            np.random.rand()
        with seeded(6, devices=False):
            assert np.random.rand(2).tolist() != inner
        after = float(np.random.rand())
    assert np.random.rand(3).tolist() == expected
    np.random.seed(5)
    assert [*inner, after] == np.random.rand(3).tolist()


def test_a_thousand_million_samples_start_at_once() -> None:
    dataset = Numbers(10**9)
    began = time.process_time()
    loader = ElasticLoader(dataset, GlobalBatch(64, 8), seed=1)
    batches = [next(epochs_of(loader).epoch_from(loader.steps_per_epoch // 2, 4, rank)) for rank in (0, 2)]
    assert epochs_of(loader).identity
    assert time.process_time() - began < 1
    assert len({int(index) for batch in batches for index in batch}) == 16


class Tens(Numbers):
    """Gives all samples of a micro-batch at once, with one random number for all."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return [(torch.tensor([10 * index, *drawn], dtype=torch.float64)) for index in indices]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_dataset_that_gives_many_samples_at_once_is_asked_so(options: Any) -> None:
    def load(world: int, **options: Any) -> list[list[float]]:
        loader = ElasticLoader(Tens(10), GlobalBatch(6, 2), **options)
        batches = [
            list(epochs_of(loader).epoch_from(2 * epoch, world, rank)) for epoch in range(2) for rank in range(world)
        ]
        return sorted(torch.cat([row for batch in batches for row in batch]).tolist())

    one = load(1)
    assert {row[0] for row in one} == {10 * index for index in range(10)}
    assert len({row[1] for row in one}) == 10  # five micro-batches in each of two epochs
    assert load(2, **options) == one


def test_too_few_samples_at_once_are_noticed() -> None:
    class Few(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with pytest.raises(UsageError, match=r"Few.__getitems__\(\) returned 3 samples, 4 were asked for"):
        next(epochs_of(ElasticLoader(Few(8), GlobalBatch(8, 4))).epoch_from(0, 1, 0))


class Pids(Numbers):
    started = 0

    def __getitem__(self, index: int) -> int:
        assert self.started == 1000 + get_worker_info().id
        return os.getpid()


def _mark(worker: int) -> None:
    get_worker_info().dataset.started = 1000 + worker


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_initialised_and_may_outlive_an_epoch(persistent: bool) -> None:
    loader = ElasticLoader(
        Pids(8), GlobalBatch(4, 2), num_workers=2, worker_init_fn=_mark, persistent_workers=persistent, timeout=100
    )
    first = {int(pid) for micro in epochs_of(loader).epoch_from(0, 1, 0) for pid in micro}
    # An epoch that is left in the middle, and the next: nothing of the former may come in the latter.
    with closing(epochs_of(loader).epoch_from(2, 1, 0)) as batches:
        next(batches)
    then = [int(pid) for micro in epochs_of(loader).epoch_from(4, 1, 0) for pid in micro]
    assert (len(first), len(then)) == (2, 8)
    assert (set(then) == first) is persistent


class Function:
    def __call__(self, step: int, micro: Any) -> list[int]:
        return [self.started] * len(micro)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["dataset", "function"])
def test_worker_init_fn_gets_what_the_script_has_given(kind: str) -> None:
    options: Any = {"num_workers": 1, "worker_init_fn": _mark, "timeout": 100}
    loader: Any = ElasticLoader(Pids(4), GlobalBatch(4, 4), **options)
    if kind == "function":
        loader = FunctionLoader(Function(), GlobalBatch(4, 4), steps_per_epoch=1, **options)
    (found,) = epochs_of(loader).epoch_from(0, 1, 0)
    assert len(found) == 4
    assert kind == "dataset" or found == [1000] * 4


class Signals(Numbers):
    def __getitem__(self, index: int) -> bool:
        return catches(os.getpid(), SIGNAL)


@pytest.mark.parametrize("watched", [False, True])
def test_workers_write_their_stacks_for_an_agent(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv(ENV_SOCKET, "/socket" if watched else "")
    loader = ElasticLoader(Signals(8), GlobalBatch(4, 2), num_workers=1, timeout=100)
    assert {bool(found) for micro in epochs_of(loader).epoch_from(0, 1, 0) for found in micro} == {watched}


@pytest.mark.parametrize("workers", [0, 2])
def test_two_epochs_at_once_are_kept_apart_or_refused(workers: int) -> None:
    loader = ElasticLoader(Numbers(8), GlobalBatch(4, 2), num_workers=workers, persistent_workers=bool(workers))
    batches = epochs_of(loader).epoch_from(0, 1, 0)
    first = next(batches).tolist()
    assert next(epochs_of(loader).epoch_from(2, 1, 0)).tolist() == loader.order(1)[:2]
    if workers:
        with pytest.raises(UsageError, match=r"persistent_workers=True\) was asked for an epoch in the middle"):
            next(batches)
    else:
        assert first + [int(index) for micro in batches for index in micro] == loader.order(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 4}, "does not take DataLoader's batch_size"),
        ({"batch_sampler": [[0]]}, "does not take DataLoader's batch_sampler"),
        ({"generator": torch.Generator()}, "does not take DataLoader's generator"),
        ({"in_order": False}, "does not take DataLoader's in_order"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "multiprocessing_context"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_options_that_cannot_be_taken_are_named(options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        ElasticLoader(Numbers(8), GlobalBatch(4, 2), **options)
    assert caught.value.hint
    with pytest.raises(UsageError, match=said):
        FunctionLoader(lambda step, micro: 0, GlobalBatch(4, 2), **options)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'shufle'"):
        ElasticLoader(Numbers(8), GlobalBatch(4, 2), shufle=True)  # type: ignore[call-arg]


def test_a_seed_is_a_whole_number_of_any_type() -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(8)), GlobalBatch(4, 2), seed=np.int64(3))  # type: ignore[arg-type]
    assert type(loader.seed) is int
    seed: Any
    for seed in (None, "a", 0.5, torch.tensor(0.5)):
        with pytest.raises(UsageError) as raised:
            ElasticLoader(TensorDataset(torch.arange(8)), GlobalBatch(4, 2), seed=seed)
        assert f"seed={seed!r} is not a whole number.\n  Give one, such as seed=0." in str(raised.value)
