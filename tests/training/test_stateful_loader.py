"""Loaders with a state: the place of each shard, noted from time to time, gives any micro-batch on any rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rank_threads import Messages
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.data.content import digest
from elastic_launch.training.data.loader import epochs_of
from elastic_launch.training.ranks import exchange
from elastic_launch.training.ranks.world import World

BATCH = el.GlobalBatch(8, micro=2)


class Reading:
    """A loader of micro-batches of two: number of the shard, of the pass, and of the sample in it."""

    made: ClassVar[list[int]] = []

    def __init__(self, shard: int, shards: int, length: int = 3) -> None:
        self.made.append(shard)
        self.shard, self.length, self.number, self.given, self.first = shard, length, 0, 0, 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, self.first = self.first, 0
        for place in range(first, self.length):
            self.given = place + 1
            samples = torch.tensor([[self.shard, self.number, 2 * place + i] for i in (0, 1)])
            yield {"x": samples, "noise": torch.rand(2)}

    def state_dict(self) -> dict[str, Any]:
        return {"given": torch.tensor([self.given]), "name": "reading"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = int(state["given"])


class Once(Reading):
    """A loader that is its own iterator: it has one pass."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.iterator = self.iterator if hasattr(self, "iterator") else super().__iter__()
        return self.iterator


class Sized(Reading):
    def __len__(self) -> int:
        return self.length


def drawn(loader: el.StatefulLoader, steps: range, world: World = World()) -> list[Any]:  # noqa: B008
    epochs = epochs_of(loader)
    batches = epochs.epoch_from(steps.start, world.world_size, world.rank)
    count = epochs.plan(steps.start, world.world_size, world.rank).grad_accum
    return [[next(batches) for _ in range(count)] for _ in steps]


def told(found: list[Any]) -> list[Any]:
    return [[[*batch["x"].flatten().tolist(), *batch["noise"].tolist()] for batch in step] for step in found]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Messages:
    messages = Messages()
    monkeypatch.setattr(exchange, "dist", messages)
    return messages


def undisturbed(steps: int) -> list[Any]:
    return told(drawn(el.StatefulLoader(Reading, BATCH), range(steps)))


def test_each_shard_gives_one_micro_batch_in_a_step_and_begins_anew_at_its_end() -> None:
    found = undisturbed(7)
    for step, micros in enumerate(found):
        expected = [[shard, step // 3, 2 * (step % 3) + sample] for shard in range(4) for sample in (0, 1)]
        assert [micro[i * 3 : i * 3 + 3] for micro in micros for i in (0, 1)] == expected
    assert len({tuple(micro[6:]) for micros in found for micro in micros}) == 28, "random numbers of their own"


def test_a_micro_batch_is_given_again_as_it_was() -> None:
    loader = el.StatefulLoader(Reading, BATCH)
    (first, second) = drawn(loader, range(2))
    del second[0]["noise"]
    second[1]["x"].zero_()
    Reading.made.clear()
    again = told(drawn(loader, range(1, 2)))
    assert again == undisturbed(2)[1:]
    assert Reading.made[:1] == [1], "only the one that was changed is read again"
    assert told(drawn(loader, range(1))) == told([first]) == undisturbed(1), "and one that is longer ago"


class Batch:
    def __init__(self, x: Any) -> None:
        self.x = x


@dataclass
class Pair:
    x: Any
    y: Any


def doubled_object(batch: Any) -> None:
    batch.x = batch.x * 2


def doubled_array(batch: Any) -> None:
    batch["x"] *= 2


def doubled_number(batch: Any) -> None:
    batch["meta"]["scale"] *= 2


def doubled_inference_tensor(batch: Any) -> None:
    with torch.inference_mode():
        batch["x"].mul_(2)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2)


CHANGES = [
    (lambda: Batch(torch.ones(2)), doubled_object),
    (lambda: Pair(np.ones(2), torch.ones(2)), doubled_object),
    (lambda: {"x": np.ones(2)}, doubled_array),
    (lambda: {"x": torch.ones(2), "meta": {"scale": 1.0, "name": None}}, doubled_number),
    (lambda: {"x": inference_tensor()}, doubled_inference_tensor),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_what_the_script_has_changed_in_place_is_not_given_again(make: Any, change: Any) -> None:
    class Making(Reading):
        def __iter__(self) -> Iterator[Any]:
            for _ in super().__iter__():
                yield make()

    loader = el.StatefulLoader(Making, BATCH)
    batch = drawn(loader, range(1))[0][0]
    before = digest([batch, getattr(batch, "x", None)])
    change(batch)
    assert digest([batch, getattr(batch, "x", None)]) != before
    again = drawn(loader, range(1))[0][0]
    assert digest([again, getattr(again, "x", None)]) == before


@pytest.mark.parametrize("collected", [0, 2, 3, 5])
def test_other_ranks_go_on_at_any_later_step(ranks: Messages, collected: int) -> None:
    loaders = [el.StatefulLoader(Reading, BATCH) for _ in range(3)]

    def first(rank: int) -> list[Any]:
        part, world = epochs_of(loaders[rank]).part, World(rank, 2)
        part.enter(world, 0)
        found = drawn(loaders[rank], range(collected), world)
        part.collect(collected, world)
        return told(found + drawn(loaders[rank], range(collected, 5), world))

    before = ranks.run(2, first)
    state = epochs_of(loaders[1]).part.state_dict()
    assert state["step"] == collected

    def second(rank: int) -> list[Any]:
        part, world = epochs_of(loaders[rank]).part, World(rank, 3)
        if rank == 2:  # started anew
            part.load_state_dict(state)
        part.enter(world, 5)
        part.collect(5, world)
        return told(drawn(loaders[rank], range(5, 8), world))

    after = ranks.run(3, second)
    joined = [[micro for rank in parts for micro in rank] for parts in (*zip(*before), *zip(*after))]  # noqa: B905
    # Threads share the random generators: their numbers are compared by tests with processes.
    assert [[micro[:6] for micro in step] for step in joined] == [
        [micro[:6] for micro in step] for step in undisturbed(8)
    ]


def test_ranks_that_have_noted_different_steps_take_the_newest(ranks: Messages) -> None:
    loaders = [el.StatefulLoader(Reading, BATCH) for _ in range(2)]

    def one(rank: int) -> None:
        part = epochs_of(loaders[rank]).part
        part.load_state_dict({"step": rank * 2, "shards": [[0, 2, Reading(0, 4).state_dict(), False]] * 4 * rank})
        part.enter(World(rank, 2), 2)

    ranks.run(2, one)
    assert all(epochs_of(loader).part.state_dict()["step"] == 2 for loader in loaders)


def test_a_training_from_the_beginning_forgets_the_places() -> None:
    loader = el.StatefulLoader(Reading, BATCH)
    part = epochs_of(loader).part
    part.enter(World(), 0)
    drawn(loader, range(4))
    part.collect(4, World())
    part.enter(World(), 0)
    assert told(drawn(loader, range(2))) == undisturbed(2)


def resized(ranks: Messages, kind: type[Reading], done: int, size: int = 4, **options: Any) -> list[Any]:
    """What ranks read after so many steps of two."""

    def of_two(rank: int) -> dict[str, Any]:
        loader, world = el.StatefulLoader(kind(rank, 2, 12), BATCH, **options), World(rank, 2)
        part = epochs_of(loader).part
        part.enter(world, 0)
        drawn(loader, range(done), world)
        part.collect(done, world)
        return dict(part.state_dict())

    state = ranks.run(2, of_two)[0]

    def of_more(rank: int) -> list[Any]:
        loader, world = el.StatefulLoader(kind(rank, size, 6), BATCH, **options), World(rank, size)
        part = epochs_of(loader).part
        part.load_state_dict(state)
        part.enter(world, done)
        return [micro["x"][0].tolist() for step in drawn(loader, range(done, done + 2), world) for micro in step]

    return ranks.run(size, of_more)


def test_the_loader_of_a_rank_goes_on_there(ranks: Messages) -> None:
    assert resized(ranks, Reading, 2, 2)[1] == [[1, 0, 8], [1, 0, 10], [1, 1, 0], [1, 1, 2]]


def test_at_another_world_size_it_holds(ranks: Messages) -> None:
    with pytest.raises(UsageError, match="those of 2 ranks, and here are 4"):
        resized(ranks, Reading, 2)


@pytest.mark.parametrize(
    ("kind", "done", "line"), [(Reading, 2, "pass 0 anew, and 16"), (Reading, 6, "48"), (Sized, 6, "")]
)
def test_or_repeats_and_says_how_many(
    ranks: Messages, caplog: pytest.LogCaptureFixture, kind: type[Reading], done: int, line: str
) -> None:
    with caplog.at_level(logging.WARNING):
        found = resized(ranks, kind, done, on_resize="repeat")
    assert found[3] == [[3, not line, 0], [3, not line, 2]]
    assert ("samples are repeated" in caplog.text, line in caplog.text) == (bool(line), True)


def test_or_gives_what_the_script_makes_of_the_places(ranks: Messages) -> None:
    def reshard(states: list[Any], world_size: int) -> list[Any]:
        given = sum(int(state["given"]) for state in states)
        return [{"given": given // world_size}] * world_size

    assert resized(ranks, Reading, 2, reshard=reshard)[2] == [[2, 0, 4], [2, 0, 6]]
    assert resized(ranks, Reading, 2, reshard="any", size=1)[0][:2] == [[0, 0, 8], [0, 0, 10]]
    with pytest.raises(UsageError, match="returned 2 states for 4"):
        resized(ranks, Reading, 2, reshard=lambda states, world_size: states)


def test_a_rank_has_a_loader_for_its_own_micro_batches_only(ranks: Messages) -> None:
    loader = el.StatefulLoader(Reading(0, 2), BATCH)
    with pytest.raises(UsageError, match="no loader for it"):
        drawn(loader, range(1))
    with pytest.raises(UsageError, match="fewer micro-batches than there are ranks to take them, 5"):
        ranks.run(5, lambda rank: epochs_of(el.StatefulLoader(Reading(rank, 5), BATCH)).part.enter(World(rank, 5), 0))


class Rows(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.given < 8:
            self.given += 1
            yield torch.tensor([0, 0, self.given - 1])
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_a_torch_loader_has_the_state_of_its_dataset() -> None:
    def loader() -> el.StatefulLoader:
        return el.StatefulLoader(lambda shard, shards: DataLoader(Rows(), batch_size=2), BATCH)

    one, two = loader(), loader()
    epochs_of(one).part.enter(World(), 0)
    drawn(one, range(3))
    epochs_of(one).part.collect(3, World())
    epochs_of(two).part.load_state_dict(epochs_of(one).part.state_dict())
    batches = epochs_of(two).epoch_from(3, 1, 0)
    assert next(batches).tolist() == [[0, 0, 6], [0, 0, 7]]


def test_an_evaluation_of_the_data_that_train_leaves_the_training_where_it_is(tmp_path: Path) -> None:
    loader = el.StatefulLoader(Reading, BATCH, steps_per_epoch=3)
    seen: list[Any] = []

    def measure(batch: Any) -> dict[str, float]:
        seen.append(batch)
        return {"loss": 1.0}

    model, trained = torch.nn.Linear(2, 1), list[Any]()
    saving = {"evaluator": el.Evaluator(loader, measure, every="2ba"), "checkpoint": el.Checkpoint(tmp_path, every=1)}
    with el.session() as run:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in run.steps(loader, model, optimizer, until="4ba", exact=True, **saving):
            trained.append([])
            for batch in step:
                trained[-1].append(batch)
                step.backward(model(batch["noise"]))
            step.update()
    assert told(trained) == undisturbed(4)
    assert told([seen[:12], seen[12:]]) == [[micro for step in undisturbed(3) for micro in step]] * 2


def test_the_loader_of_a_rank_cannot_evaluate() -> None:
    loader = el.StatefulLoader(Reading(0, 1), BATCH, steps_per_epoch=3)
    with pytest.raises(UsageError, match=r"Evaluator\(loader=...\): .* has one place, which is that of a training"):
        el.Evaluator(loader, lambda batch: {"loss": 1.0})


def test_epochs_count_steps() -> None:
    loader = el.StatefulLoader(Reading, BATCH, steps_per_epoch=3)
    assert (loader.steps_per_epoch, epochs_of(loader).position(7).epoch) == (3, 2)
    assert told(drawn(loader, range(2, 3))) == undisturbed(3)[2:]


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("loader", "options", "error"),
    [
        (Rows(), {}, "Rows is a dataset"),
        (DataLoader(Plain()), {}, "DataLoader has no state_dict"),
        (DataLoader(Rows(), num_workers=2), {}, "2 processes"),
        (3, {}, "int has no state_dict"),
        (Reading, {"batch": el.GlobalBatch(8, micro=3)}, "size a multiple"),
        (Reading, {"batch": el.GlobalBatch(8, micro="auto")}, "size a multiple"),
        (Reading, {"steps_per_epoch": 0}, "at least 1 step"),
        (Reading, {"on_resize": "wait"}, "on_resize='wait'"),
        (Reading, {"reshard": 3}, "reshard=3"),
        (Reading, {"reshard": "any"}, "for the loader of a rank"),
        (Reading, {"on_resize": "repeat"}, "for the loader of a rank"),
    ],
)
def test_what_cannot_work_is_refused(loader: Any, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError) as raised:
        el.StatefulLoader(loader, **{"batch": BATCH, **options})
    assert error in str(raised.value)


def test_a_loader_that_does_not_begin_anew_after_its_pass_is_told_so() -> None:
    loader = el.StatefulLoader(Once, BATCH)
    assert told(drawn(loader, range(3))) == undisturbed(3)
    with pytest.raises(UsageError) as raised:
        drawn(el.StatefulLoader(Once, BATCH), range(4))
    text = str(raised.value)
    assert "shard 0 has ended after 3 micro-batches of its pass 0, and then iter(loader) gave none" in text
    assert "Have its __iter__ start with the first sample again" in text


def test_what_cannot_be_read_is_an_error() -> None:
    with pytest.raises(UsageError, match="shard 0 gave no micro-batch in its pass 0"):
        drawn(el.StatefulLoader(partial(Reading, length=0), BATCH), range(1))
    with pytest.raises(UsageError, match=r"The loader gave tensors of the shapes \(2, 3\)"):
        drawn(el.StatefulLoader(Reading, el.GlobalBatch(20, micro=5)), range(1))
    with pytest.raises(UsageError, match="Plain is a dataset"):
        drawn(el.StatefulLoader(lambda shard, shards: Plain(), BATCH), range(1))


def test_a_short_micro_batch_is_noticed_although_another_dimension_has_its_size() -> None:
    class Passes:
        """Its last micro-batch of a pass is short; samples have as many features as a micro-batch has samples."""

        def __init__(self, shard: int) -> None:
            self.shard = shard

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.ones(10, 8).split(8)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def train() -> None:
        model = torch.nn.Linear(8, 1)
        loader = el.StatefulLoader(lambda shard, shards: Passes(shard), el.GlobalBatch(16, 8))
        with el.session() as run:
            for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="2ba"):
                for x in step:
                    step.backward(step.model(x).mean())
                step.update()

    with pytest.raises(UsageError, match=r"tensors of the shapes \(2, 8\) for a micro-batch of 8 samples"):
        train()
