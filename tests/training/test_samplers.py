"""Orders other than a shuffled dataset: the same at every world size and after every restart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler, SubsetRandomSampler

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.data.loader import epochs_of


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Curriculum:
    """The easiest samples first; all of them from step `full` on."""

    def __init__(self, difficulty: Tensor, batch: el.GlobalBatch, full: int) -> None:
        self.easiest_first = difficulty.argsort(stable=True)
        self.batch, self.full = batch, full

    def __len__(self) -> int:
        return len(self.easiest_first)

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        step = (epoch * len(self) + positions) // self.batch.size
        allowed = len(self) * (0.1 + 0.9 * step / self.full).clamp(max=1)
        return self.easiest_first[(el.samplers.uniform(positions, seed, epoch) * allowed).long()]


LENGTHS = torch.randint(1, 500, (203,), generator=torch.Generator().manual_seed(1))
BATCH = el.GlobalBatch(12, 4)
SAMPLERS = {
    "weighted": el.samplers.Weighted(torch.arange(203.0), length=150),
    "by length": el.samplers.ByLength(LENGTHS, group=4),
    "curriculum": Curriculum(LENGTHS, BATCH, 10),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_world_that_resumes_anywhere_loads_the_same(name: str) -> None:
    sampler = SAMPLERS[name]
    loader = el.ElasticLoader(Numbers(203), BATCH, sampler=sampler, seed=3)
    assert loader.length == len(sampler)
    steps = loader.steps_per_epoch
    whole = [[micro.tolist() for micro in epochs_of(loader).epoch_from(epoch * steps, 1, 0)] for epoch in range(2)]
    assert whole[0] != whole[1]
    for epoch, step, world in ((0, 0, 3), (1, steps + 2, 2), (1, 2 * steps - 1, 5), (0, 7, 4)):
        ranks = [[micro.tolist() for micro in epochs_of(loader).epoch_from(step, world, rank)] for rank in range(world)]
        together = []
        for number in range(step, (epoch + 1) * steps):
            for rank in range(world):
                count = epochs_of(loader).plan(number, world, rank).grad_accum
                together += ranks[rank][:count]
                del ranks[rank][:count]
        done = sum(epochs_of(loader).plan(number, 1, 0).grad_accum for number in range(epoch * steps, step))
        assert together == whole[epoch][done:]


def test_weighted_samples_are_as_frequent_as_their_weights_say() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    drawn = el.samplers.Weighted(weights, length=8000).indices(0, 0, torch.arange(8000)).bincount(minlength=6)
    assert drawn[weights == 0].tolist() == [0, 0, 0]
    assert torch.allclose(drawn / 1000, weights, atol=0.15)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [1.0, float("nan")], [0.0], [], [float("inf")]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="weight"):
        el.samplers.Weighted(weights)


def test_by_length_each_sample_comes_once_among_others_of_its_length() -> None:
    sampler = el.samplers.ByLength(LENGTHS, group=4)
    epochs = [sampler.indices(0, epoch, torch.arange(203)) for epoch in range(2)]
    assert [epoch.sort().values.tolist() for epoch in epochs] == [list(range(203))] * 2
    groups = [{tuple(sorted(group)) for group in epoch[:200].view(50, 4).tolist()} for epoch in epochs]
    assert len(groups[0] & groups[1]) < 5
    lengths = LENGTHS[epochs[0][:200]].view(50, 4)
    spread = (lengths.amax(1) - lengths.amin(1)).float().mean()
    assert spread < 60  # of 500
    means = lengths.float().mean(1)
    assert means.argsort().tolist() not in (list(range(50)), list(range(49, -1, -1)))


def test_a_curriculum_begins_with_what_is_easy() -> None:
    curriculum = SAMPLERS["curriculum"]
    ranks = LENGTHS.argsort(stable=True).argsort()[curriculum.indices(0, 0, torch.arange(203))]  # type: ignore[index]
    assert int(ranks[:12].max()) < 21
    assert int(ranks[-60:].max()) > 150


class Wrong:
    def __init__(self, result: Any) -> None:
        self.result = result

    def __len__(self) -> int:
        return 16

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Any:
        return self.result(positions)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda positions: positions + 1, r"Wrong.indices\(\) returned 16; the dataset has the samples 0 to 15"),
        (lambda positions: positions - 1, r"Wrong.indices\(\) returned -1"),
        (lambda positions: positions[:1], r"returned torch.int64 of shape \(1,\) for 16 positions"),
        (lambda positions: positions / 2, r"returned torch.float32"),
    ],
)
def test_indices_that_cannot_be_are_refused(result: Any, said: str) -> None:
    loader = el.ElasticLoader(Numbers(16), el.GlobalBatch(16, 4), sampler=Wrong(result))
    with pytest.raises(UsageError, match=said):
        list(epochs_of(loader).epoch_from(0, 1, 0))


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([1, 2]), RandomSampler(range(3)), range(3)])
def test_a_sampler_without_access_by_position_is_refused(sampler: Any) -> None:
    with pytest.raises(UsageError, match=f"is a {type(sampler).__name__}, which cannot be asked") as caught:
        el.ElasticLoader(Numbers(3), el.GlobalBatch(1, 1), sampler=sampler)
    assert "indices(seed, epoch, positions)" in caught.value.hint


def test_a_sampler_and_shuffle_are_too_much() -> None:
    with pytest.raises(UsageError, match=r"shuffle=True\) has a sampler"):
        el.ElasticLoader(Numbers(3), el.GlobalBatch(1, 1), sampler=el.samplers.InOrder(3), shuffle=True)


def test_a_list_of_integers_will_do() -> None:
    loader = el.ElasticLoader(Numbers(16), el.GlobalBatch(16, 16), sampler=Wrong(lambda p: [15 - int(x) for x in p]))
    assert [micro.tolist() for micro in epochs_of(loader).epoch_from(0, 1, 0)] == [list(range(15, -1, -1))]
    assert Counter(loader.order(0)) == Counter(range(16))
