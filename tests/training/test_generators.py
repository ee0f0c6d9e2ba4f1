"""Data with their own random number generators cannot be exact, and are refused with the generator's name."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.data.generators import own_generators

RNG = np.random.default_rng(0)
SHARED = torch.Generator()


class Data(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2)


class ByName(Data):
    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(np.array([RNG.random() for _ in range(2)]))


class ByFunction(Data):
    def __getitem__(self, index: int) -> Tensor:
        return _jitter(index)


class Slots:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(1)


class Transform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


def _jitter(index: int) -> Tensor:
    return torch.rand(2, generator=SHARED)


def _closure(generator: Any) -> Callable[[Any], Any]:
    return lambda x: x + generator.random()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (Data(rng=np.random.RandomState(1)), "Data.rng (numpy.random.RandomState)"),
        (Data(rng=np.random.default_rng(1)), "Data.rng (numpy.random.Generator)"),
        (Data(rng=random.Random(1)), "Data.rng (random.Random)"),
        (Data(transform=[None, Slots()]), "Data.transform[1].rng (random.Random)"),
        (Data(transform=nn.Sequential(Transform())), "Data.transform._modules['0'].generator (torch.Generator)"),
        (Subset(Data(g=torch.Generator()), [0]), "Subset.dataset.g (torch.Generator)"),
        (Data(draw=random.Random(1).gauss), "Data.draw.__self__ (random.Random)"),
        (Data(transform=_closure(random.Random(1))), "Data.transform: generator (random.Random)"),
        (
            Data(transform=partial(torch.rand, generator=SHARED)),
            "Data.transform.keywords['generator'] (torch.Generator)",
        ),
        (ByName(), "ByName.__getitem__: RNG (numpy.random.Generator)"),
        (ByFunction(), "ByFunction.__getitem__: _jitter: SHARED (torch.Generator)"),
    ],
)
def test_a_generator_is_found_by_name(data: Dataset[Any], name: str) -> None:
    assert own_generators(data, type(data).__name__) == [name]


class Lazy(Data):
    """Makes its generator when it first needs it."""

    rng: Any = None

    def __getitem__(self, index: int) -> Tensor:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(0 if info is None else info.id)
        return torch.zeros(2) + self.rng.random()


class LazyFunction:
    rng: Any = None

    def __call__(self, step: int, micro: Any) -> Tensor:
        self.rng = self.rng or random.Random(0)
        return torch.zeros(len(micro), 2) + self.rng.random()


def _make_global(worker: int) -> None:
    global RNG
    RNG = np.random.default_rng(worker)


@pytest.mark.parametrize(
    ("kind", "workers", "name"),
    [
        *[("attribute", workers, r"Lazy\.rng \(numpy.random.Generator\)") for workers in (0, 1)],
        *[("of a function", workers, r"LazyFunction\.rng \(random.Random\)") for workers in (0, 1)],
        ("global", 1, r"ByName\.__getitem__: RNG"),
    ],
)
def test_a_generator_made_by_the_process_that_reads_is_found(
    kind: str, workers: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "RNG", None)
    init = _make_global if kind == "global" else None
    options: Any = {"num_workers": workers, "timeout": 60 * workers, "worker_init_fn": init}
    loader: Any = el.ElasticLoader(ByName() if init else Lazy(), el.GlobalBatch(2, 1), **options)
    if kind == "of a function":
        loader = el.FunctionLoader(LazyFunction(), el.GlobalBatch(2, 1), **options)

    def train(run: Any) -> None:
        model = nn.Linear(2, 1)
        for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.1), until="1ba", exact=True):
            for sample in step:
                step.backward(step.model(sample.float()).mean())
            step.update()

    with el.session() as run, pytest.raises(UsageError, match=f"the data have a generator of their own.*: {name}"):
        train(run)
    gc.collect()  # what the error has cut off holds the loader's process


def test_what_the_library_seeds_is_not_meant() -> None:
    innocent = Data(
        torch=torch.default_generator,
        python=random.random,
        numpy=np.random.rand,
        system=random.SystemRandom(),
        itself=[],
        many=[random.Random(1)] * 1000,  # samples, not transforms
    )
    innocent.itself.append(innocent)
    assert own_generators(innocent, "Data") == []
    assert own_generators(TensorDataset(torch.zeros(3)), "TensorDataset") == []


def _loader(**options: Any) -> el.ElasticLoader:
    return el.ElasticLoader(Data(**options.pop("data", {})), el.GlobalBatch(2, 1), **options)


class Fickle:
    generator = None

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return 4

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        return positions

    def __call__(self, *whatever: Any) -> Any:
        return torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (_loader(data={"rng": random.Random(1)}), r"Data.rng \(random.Random\)"),
        (_loader(sampler=Fickle()), r"Fickle.generator \(torch.Generator\)"),
        (_loader(collate_fn=Fickle()), r"collate_fn.generator \(torch.Generator\)"),
        (el.FunctionLoader(Fickle(), el.GlobalBatch(2, 1)), r"Fickle.generator \(torch.Generator\)"),
    ],
)
def test_exact_mode_refuses_it_and_the_default_mode_does_not(loader: Any, name: str) -> None:
    with el.session() as run:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=f"exact=True: the data have a generator of their own.*: {name}"):
            run.steps(loader, model, optimizer, until="1ba", exact=True)
        for step in run.steps(loader, model, optimizer, until="1ba"):
            for sample in step:
                step.backward(step.model(sample).mean())
            step.update()
