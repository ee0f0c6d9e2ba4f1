"""Hashes of samples: what they tell apart, what may differ between nodes, and what reading leaves unchanged."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import elastic_launch as el
from elastic_launch.training.data import content, epochs
from elastic_launch.training.data.content import digest
from elastic_launch.training.data.loader import epochs_of
from elastic_launch.training.live.rehearsal import randomness_kept
from elastic_launch.training.ranks.same_arguments import LONGEST, NOT_COMPARED, SAMPLE, told, told_apart


@dataclass
class Sample:
    label: int
    text: str = ""


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


class Of(Dataset[Any]):
    """A dataset of what a function returns for an index."""

    def __init__(self, read: Callable[[int], Any], length: int = 64) -> None:
        self.read, self.length = read, length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.read(index)


def alike(one: Any, other: Any) -> bool:
    first, second = told_apart([digest(one), digest(other)])
    return first == second


RECORDS = np.zeros(3, dtype=np.dtype([("a", "u1"), ("b", "f8"), ("c", "U5")], align=True))
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8)
WAVES = np.sin(np.arange(4 * 500.0)).reshape(4, 500) * np.arange(1, 5)[:, None]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (True, 1),
        (None, 0),
        (1.5, 3.0),
        ("cat", "dog"),
        (b"cat", b"dog"),
        ((1, 2), (2, 1)),
        ([1], [1, 1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (Sample(1), Sample(2)),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]])),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
        (torch.tensor([0.2, 0.9]), torch.tensor([0.9, 0.2])),
        (np.arange(9), np.arange(9) + 1),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array([None, 1], dtype=object), np.array([None, 2], dtype=object)),
        (RECORDS, np.concatenate([RECORDS[:2], np.array([(0, 0, "x")], RECORDS.dtype)])),
        (np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
        (WAVES[0], WAVES[1]),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])),
        (Image.fromarray(PIXELS[0]), Image.fromarray(PIXELS[0] // 2)),
        (PIXELS[0], np.concatenate([PIXELS[0, :8], 255 - PIXELS[0, 8:] // 4])),
        ("/data/1.jpg", "/data/2.jpg"),
        ("<p>one</p>\n<p>", "<p>two</p>\n<p>"),
    ],
)
def test_what_is_another_sample(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert not alike(one, other)
    assert not alike({"x": [one]}, {"x": [other]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/local/node3/x.jpg", "/local/node4/x.jpg"),
        (Path("/a/x.jpg"), Path("/b/x.jpg")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Opaque(1), Opaque(2)),
        (WAVES[0], WAVES[0] * (1 + 1e-7)),
        (torch.tensor([1.0, 1e-17]), torch.tensor([1.0, -3e-16])),
        (np.full(4, 1e-17), np.full(4, 3e-16)),
        (PIXELS[0], PIXELS[0] ^ 1),
        (np.arange(6)[::2], np.array([0, 2, 4])),
    ],
)
def test_what_may_differ_between_nodes(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


def test_pictures_of_two_decoders_are_the_same_and_others_are_not() -> None:
    """Their numbers differ by up to 0.3 on average, in each part of a picture otherwise."""
    draw = np.random.default_rng(0)

    pictures = [
        np.kron(draw.normal(size=(3, 6, 6)), np.ones((8, 8))) * draw.uniform(15, 60)
        + draw.uniform(60, 200)
        + draw.normal(size=(3, 48, 48)) * 8
        for _ in range(500)
    ]
    biases = [np.repeat(draw.uniform(-0.3, 0.3, 8), 864).reshape(3, 48, 48) for _ in pictures]
    first = [np.clip(np.round(each), 0, 255).astype("u1") for each in pictures]
    second = [np.clip(np.round(each + bias), 0, 255).astype("u1") for each, bias in zip(pictures, biases, strict=True)]
    assert sum(not alike({"x": a}, {"x": b}) for a, b in zip(first, second, strict=True)) <= 1
    assert sum(alike({"x": a}, {"x": b}) for a, b in pairwise(first)) <= 15


@pytest.mark.parametrize(
    "make", [list, lambda arrays: {f"x{i}": each for i, each in enumerate(arrays)}], ids=["list", "dict"]
)
def test_samples_of_several_pictures_of_two_decoders_are_the_same(make: Callable[[list[Any]], Any]) -> None:
    """Each is compared alone: each of the borders is near to some of 16."""
    draw = np.random.default_rng(1)
    wrong = accepted = 0
    for _ in range(100):
        first = [np.kron(draw.normal(size=(6, 6)), np.ones((8, 8))) * 30 + draw.uniform(60, 200) for _ in range(16)]
        second = [each + np.repeat(draw.uniform(-0.3, 0.3, 8), 288).reshape(48, 48) for each in first]
        other = [*second[:15], np.kron(draw.normal(size=(6, 6)), np.ones((8, 8))) * 30 + draw.uniform(60, 200)]
        of = [make([np.clip(np.round(x), 0, 255).astype("u1") for x in each]) for each in (first, second, other)]
        wrong += not alike(of[0], of[1])
        accepted += alike(of[0], of[2])
    assert wrong <= 2
    assert accepted <= 10, "one of 16 is another picture"


def test_all_that_a_sample_may_be_has_a_digest() -> None:
    odd = [float("inf"), 10**400, "\ud800", object(), range(3), torch.eye(3).to_sparse(), torch.zeros(0, 3), 1j]
    odd += [torch.zeros(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.bfloat16), torch.tensor([1j]).conj()]
    odd += [np.zeros((0, 2)), np.array(3), np.longdouble(3), np.array([1j]), np.float32(1), PurePosixPath("a"), {}]
    found = [digest(each) for each in odd]
    assert len({*found}) == len(odd)


def compared(data: Dataset[Any], seed: int = 0, **options: Any) -> dict[str, str]:
    loader = el.ElasticLoader(data, el.GlobalBatch(1, 1), seed=seed, **options)
    with randomness_kept():
        return epochs_of(loader).content()


@pytest.mark.parametrize(("length", "indices"), [(1, [0]), (2, [0, 1]), (64, [0, 5, 63])])
def test_which_samples_are_read(length: int, indices: list[int]) -> None:
    data = Of(lambda index: index, length)
    found = compared(data, seed=5 + 64)
    assert [*found] == [f"sample {index} (as a hash; see compare_samples)" for index in indices]
    assert len({*found.values()}) == len(indices)
    assert {*data.asked} == {*indices}
    assert all(2 <= data.asked.count(index) <= content.ROUNDS for index in indices)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_listing_in_another_order_is_noticed(tmp_path: Path, num_workers: int) -> None:
    for name in range(64):
        (tmp_path / f"{name}.txt").write_text(str(name))
    names = sorted(os.listdir(tmp_path))
    found = [
        compared(Of(lambda index, order=order: (tmp_path / order[index]).read_text()), num_workers=num_workers)
        for order in (names, names, names[::-1])
    ]
    assert found[0] == found[1]
    assert all(found[0][name] != found[2][name] for name in found[0])


def test_parts_of_datasets_and_shards_are_read() -> None:
    whole = ConcatDataset([TensorDataset(torch.arange(9)), TensorDataset(torch.arange(9) + 9)])
    assert len({*compared(Subset(whole, [17, 4, 2]), seed=1).values()}) == 3
    stream = el.ShardedStream(["a", "b"], open=lambda shard: iter([f"{shard}{i}" for i in range(9)]), lengths=[9, 9])
    assert [name.split()[1] for name in compared(stream)] == ["0", "9"], "no other sample is read from a shard"


DRAWS = {
    "torch": lambda index: torch.rand(3) + index,
    "numpy": lambda index: np.random.normal(size=3) + index,
    "random": lambda index: random.random() + index,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_augmented_samples_are_the_same_on_all_ranks_and_no_generator_changes(kind: str) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        np.random.normal()  # the second of two is kept
        before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
        found.append(compared(Of(DRAWS[kind])))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (str(np.random.get_state()), random.getstate())
    assert found[0] == found[1]
    assert NOT_COMPARED not in found[0].values()


def fails(index: int) -> Any:
    raise OSError("no such file")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["random", "fails", "off"])
def test_what_is_not_compared(kind: str, num_workers: int) -> None:
    read = {"random": lambda index: os.urandom(1)[0] % 2, "fails": fails, "off": lambda index: index}[kind]
    data = Of(read)
    found = compared(data, compare_samples=kind != "off", num_workers=num_workers)
    assert [*found.values()] == [NOT_COMPARED] * len(found)
    assert found
    if num_workers or kind == "off":
        assert data.asked == [], "read in the process that reads in the training"


def test_a_dataset_with_a_generator_is_not_read() -> None:
    data = Of(lambda index: 0)
    data.generator = random.Random(0)  # type: ignore[attr-defined]
    assert {*compared(data).values()} == {NOT_COMPARED}
    assert data.asked == []


def test_slow_data_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "LONGEST", 0.05)
    data = Of(lambda index: time.sleep(0.03))
    assert {*compared(data).values()} == {NOT_COMPARED}
    assert len(data.asked) < 6


@pytest.mark.parametrize("context", ["spawn", multiprocessing.get_context("spawn")])
def test_no_process_is_started_that_takes_seconds(context: Any) -> None:
    found = compared(Of(lambda index: index), num_workers=1, multiprocessing_context=context)
    assert {*found.values()} == {NOT_COMPARED}


def test_a_process_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "WAITS", 1)
    assert {*compared(Of(lambda index: time.sleep(3600)), num_workers=1).values()} == {NOT_COMPARED}


@pytest.mark.parametrize("length", [1, LONGEST])
def test_arguments_are_told_without_samples(length: int) -> None:
    given = {"metrics": "x" * length}
    assert told({**given, f"{SAMPLE}1": "a"}) == told(given) != told({"metrics": "y"})


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4) + np.random.normal() + random.random(), torch.tensor(index % 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_training_is_the_same(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an agent would have it: without one, and with one process, nothing is compared."""
    read = []
    monkeypatch.setattr(epochs, "Content", lambda *given: read.append(given) or content.Content(*given))

    def hashed(*, compare: bool) -> str:
        with el.session() as run:
            monkeypatch.setattr(run._engine.rounds.link, "present", True)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
            batch = el.GlobalBatch(8, 4)
            loader = el.ElasticLoader(Noisy(), batch, compare_samples=compare, num_workers=num_workers)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in run.steps(loader, model, optimizer, until="6ba", exact=True):
                for x, y in step:
                    step.backward(nn.functional.cross_entropy(model(x), y))
                step.update()
            drawn = f"{torch.rand(())} {random.random()} {np.random.normal()}"
        state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        return hashlib.sha256(state).hexdigest() + drawn

    assert hashed(compare=True) == hashed(compare=False)
    assert len(read) == 1
