"""Shards as one dataset: which sample is where is arithmetic, and what is on disk must agree with it."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.data import streams
from elastic_launch.training.data.epochs import LIST_OF_SHARDS
from elastic_launch.training.data.loader import epochs_of
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run


class Opener:
    """Opens shards of numbers, named by their place: to be iterated, or to be read at any place."""

    def __init__(self, lengths: list[int], seek: bool = False) -> None:
        self.lengths, self.seek = lengths, seek
        self.opened: Counter[str] = Counter()
        self.read: Counter[int] = Counter()

    def __call__(self, name: str) -> Any:
        self.opened[name] += 1
        first = sum(self.lengths[: int(name)])
        numbers = range(first, first + self.lengths[int(name)])
        return numbers if self.seek else self._each(numbers)

    def _each(self, numbers: range) -> Iterator[int]:
        for number in numbers:
            self.read[number] += 1
            yield number


def stream(lengths: list[int], *, seek: bool = False, **options: Any) -> el.ShardedStream:
    return el.ShardedStream(
        [str(place) for place in range(len(lengths))], open=Opener(lengths, seek), lengths=lengths, **options
    )


def _step(loader: el.ElasticLoader, step: int, world: int) -> list[list[int]]:
    return [micro for rank in range(world) for micro in loader.indices(step, world, rank)]


@st.composite
def loaders(draw: st.DrawFn) -> el.ElasticLoader:
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
    lanes = draw(st.integers(1, 4))
    size = lanes * draw(st.integers(1, 16))
    given = stream(lengths, seek=draw(st.booleans()), buffer=draw(st.sampled_from([1, 3, 10, 1000])), lanes=lanes)
    options = {"seed": draw(st.integers(0, 3)), "shuffle": draw(st.booleans())}
    return el.ElasticLoader(given, el.GlobalBatch(size, draw(st.integers(1, size))), **options)


@settings(max_examples=25)
@given(loaders(), st.lists(st.integers(1, 9), min_size=1, max_size=50))
def test_each_sample_once_per_epoch_in_an_order_that_no_world_changes(
    loader: el.ElasticLoader, worlds: list[int]
) -> None:
    orders = []
    for epoch in range(2):
        steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
        seen = []
        for step in steps:
            micros = _step(loader, step, worlds[step % len(worlds)])
            assert micros == _step(loader, step, 1)
            seen += [number for micro in micros for number in micro]
        assert sorted(seen) == list(range(loader.length))
        orders.append(seen)
    assert orders[0] == loader.order(0)


@settings(max_examples=15)
@given(loaders(), st.data())
def test_any_world_reads_on_from_any_step(loader: el.ElasticLoader, data: st.DataObject) -> None:
    """The samples themselves, by the readers that an earlier world has left open."""
    for _ in range(4):
        world = data.draw(st.integers(1, 5))
        step = data.draw(st.integers(0, 2 * loader.steps_per_epoch - 1))
        end = (step // loader.steps_per_epoch + 1) * loader.steps_per_epoch
        for rank in range(world):
            loaded = [micro.tolist() for micro in epochs_of(loader).epoch_from(step, world, rank)]
            assert loaded == [micro for s in range(step, end) for micro in loader.indices(s, world, rank)]


def test_shards_and_buffers_are_shuffled_anew_in_each_epoch() -> None:
    loader = el.ElasticLoader(stream([10] * 10, buffer=20), el.GlobalBatch(20, 5), seed=4)
    first, second = loader.order(0), loader.order(1)
    assert first != second
    for order in (first, second):
        for buffer in range(0, 100, 20):
            shards = {number // 10 for number in order[buffer : buffer + 20]}
            assert len(shards) == 2, "a buffer has the samples of two successive shards"
            assert order[buffer : buffer + 20] != sorted(order[buffer : buffer + 20])
    assert loader.order(0) == el.ElasticLoader(stream([10] * 10, buffer=20), el.GlobalBatch(20, 2), seed=4).order(0)
    assert first != el.ElasticLoader(stream([10] * 10, buffer=20), el.GlobalBatch(20, 5), seed=5).order(0)
    in_order = el.ElasticLoader(stream([10] * 10), el.GlobalBatch(20, 5), shuffle=False)
    assert in_order.order(3) == list(range(100))


def test_a_rank_reads_only_the_shards_in_its_lanes() -> None:
    lengths = [10] * 8
    loader = el.ElasticLoader(stream(lengths, buffer=5, lanes=4), el.GlobalBatch(8, 2), seed=1)
    seen = []
    for rank in range(4):
        opener = Opener(lengths)
        mine = el.ShardedStream([*"01234567"], open=opener, lengths=lengths, buffer=5, lanes=4)
        other = el.ElasticLoader(mine, el.GlobalBatch(8, 2), seed=1)
        seen += [int(number) for micro in epochs_of(other).epoch_from(0, 4, rank) for number in micro]
        assert sum(opener.opened.values()) == 2, "two of eight shards"
        assert set(opener.read.values()) == {1}
    assert sorted(seen) == list(range(80))
    assert loader.length == 80
    with pytest.raises(UsageError, match=r"lanes=4\): a global batch of 10 samples cannot take the same number"):
        el.ElasticLoader(stream(lengths, lanes=4), el.GlobalBatch(10, 2))


@pytest.mark.parametrize(
    ("lengths", "lanes"), [([400], 1), ([40] * 10, 1), ([40] * 10, 4), ([1] * 400, 4), ([7, 0, 0, 193, 0, 200], 1)]
)
def test_a_process_reads_each_sample_once_and_keeps_few_shards_open(lengths: list[int], lanes: int) -> None:
    opener = Opener(lengths)
    names = [str(place) for place in range(len(lengths))]
    given = el.ShardedStream(names, open=opener, lengths=lengths, buffer=20, lanes=lanes)
    loader = el.ElasticLoader(given, el.GlobalBatch(20, 5), seed=2)
    for _ in epochs_of(loader).epoch_from(0, 1, 0):
        assert sum(reader.is_open for reader in given._readers.values()) <= 4 * lanes
        assert sum(reader.kept for reader in given._readers.values()) <= 4 * 20 * lanes
    assert sum(opener.opened.values()) <= len(lengths) + lanes - 1, "a shard in which a lane ends is read by two"
    assert len(opener.read) == sum(lengths)


def test_shards_that_seek_are_read_by_place_and_few_are_open() -> None:
    class Numbers(list[int]):
        closed = 0

        def close(self) -> None:
            Numbers.closed += 1

    given = el.ShardedStream([str(n) for n in range(200)], open=lambda name: Numbers([int(name)]), lengths=[1] * 200)
    assert given.__getitems__([5, 3, 5]) == [5, 3, 5]
    assert [given[number] for number in range(200)] == list(range(200))
    assert (len(given._readers), Numbers.closed) == (streams.OPEN, 200 - streams.OPEN)
    assert streams.described(given, 7) == "7[0]"


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_processes_of_a_loader_read_the_same(options: dict[str, Any]) -> None:
    lengths = [20, 0, 31, 9]
    given = stream(lengths, buffer=8, decode=_noisy)
    alone = el.ElasticLoader(given, el.GlobalBatch(12, 4), seed=3)
    expected = [torch.stack(micro).tolist() for micro in epochs_of(alone).epoch_from(1, 1, 0)]
    assert given._readers, "this process has open shards"
    sent = pickle.loads(pickle.dumps(given))
    assert not sent._readers, "open files cannot be pickled"
    assert len(sent[25]) == 3
    loader = el.ElasticLoader(given, el.GlobalBatch(12, 4), seed=3, num_workers=2, **options)
    for _ in range(2):
        assert [torch.stack(micro).tolist() for micro in epochs_of(loader).epoch_from(1, 1, 0)] == expected


def _noisy(number: int) -> tuple[float, float, float]:
    return number + torch.rand(()).item(), random.random(), float(np.random.rand())


def test_a_forked_process_opens_files_of_its_own(tmp_path: Path) -> None:
    """Processes that share an open file would move each other's place in it."""
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{line}\n" for line in range(3000)))

    def lines(path: Path) -> Iterator[str]:
        with path.open() as file:
            yield from (line.strip() for line in file)

    given = el.ShardedStream([tmp_path / "a", tmp_path / "b"], open=lines, lengths=[3000, 3000], buffer=10)
    loader = el.ElasticLoader(given, el.GlobalBatch(10, 5), shuffle=False, num_workers=2, collate_fn=list)
    given[5]
    loaded = [line for micro in epochs_of(loader).epoch_from(0, 1, 0) for line in micro]
    assert loaded == [f"{name}{line}" for name in "ab" for line in range(3000)]
    assert given[2999] == "a2999"
    del loader, given
    gc.collect()


def _failure(loader: el.ElasticLoader) -> Exception:
    """The error of an epoch, without its traceback, which would keep the loader's processes."""
    try:
        list(epochs_of(loader).epoch_from(0, 1, 0))
    except Exception as error:  # noqa: BLE001 - the tests compare it
        found = error.with_traceback(None)
        found.__context__ = None
    else:
        raise AssertionError("it was read")
    gc.collect()
    return found


@pytest.mark.parametrize("seek", [False, True])
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([5, 4, 5], "shard '1' has (5|more) samples(, and| than the 4)"),
        ([5, 6, 5], "shard '1' has 5 samples, and lengths= says 6"),
        ([5, 5, 0], "shard '2' has (5|more) samples(, and| than the 0)"),
        ([0, 5, 5], "shard '0' has (5|more) samples(, and| than the 0)"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_of_another_length_is_named(told: list[int], said: str, seek: bool, workers: int) -> None:
    names = ["d/0", "d/1", "d/2"]
    opener = Opener([5, 5, 5], seek)
    given = el.ShardedStream(names, open=lambda name: opener(name[2:]), lengths=told)
    loader = el.ElasticLoader(given, el.GlobalBatch(4, 2), shuffle=False, num_workers=workers)
    error = _failure(loader)
    assert isinstance(error, UsageError)
    assert re.search(said, str(error)), error
    assert "Restore it, or correct lengths=" in str(error)


def test_a_shard_that_is_missing_or_fails_in_the_middle_is_named(tmp_path: Path) -> None:
    given = el.ShardedStream([tmp_path / "gone"], open=lambda path: path.open(), lengths=[3])
    with pytest.raises(FileNotFoundError) as caught:
        given[1]
    assert "sample 1 of shard 'gone'" in caught.value.__notes__[0]

    class Failing:
        times = 0

        def __call__(self, name: str) -> Iterator[int]:
            self.times += 1
            yield 0
            if self.times == 1:
                raise OSError("the disk")
            yield 1

    once = el.ShardedStream(["x"], open=Failing(), lengths=[2], buffer=1)
    with pytest.raises(OSError, match="the disk"):
        once[1]
    assert once[1] == 1, "read anew, and not taken for a shard that ends"


def test_random_numbers_while_reading_are_refused() -> None:
    for draw in (random.random, lambda: torch.rand(()), np.random.rand):

        def noisy(name: str, draw: Callable[[], Any] = draw) -> Iterator[Any]:
            for _ in range(3):
                draw()
                yield 1

        with pytest.raises(UsageError, match=r"open\(\) draws random numbers when it reads 'x'"):
            el.ShardedStream(["x"], open=noisy, lengths=[3])[0]


def test_samples_that_cannot_be_sent_are_an_error_and_no_hang() -> None:
    given = stream([8], decode=lambda number: threading.Lock())
    loader = el.ElasticLoader(given, el.GlobalBatch(4, 2), num_workers=1, collate_fn=list)
    error = _failure(loader)
    assert isinstance(error, UsageError)
    assert re.search(r"cannot be sent from the loader's process .*lock", str(error)), error
    loader = el.ElasticLoader(given, el.GlobalBatch(4, 2), collate_fn=list)
    assert len(list(epochs_of(loader).epoch_from(0, 1, 0))) == 4


def test_a_killed_process_of_a_loader_is_an_error() -> None:
    def deadly(number: int) -> int:
        if number == 5:
            assert get_worker_info() is not None
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    loader = el.ElasticLoader(stream([8], decode=deadly), el.GlobalBatch(4, 2), num_workers=1)
    error = _failure(loader)
    assert isinstance(error, RuntimeError)
    assert re.search(r"is killed by signal|exited unexpectedly", str(error)), error


class Counted(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def test_a_shard_may_be_a_dataset() -> None:
    for kind in (Counted, range):
        given = el.ShardedStream(["3", "4"], open=lambda name, kind=kind: kind(int(name)), lengths=[3, 4])
        assert given.__getitems__([6, 0, 2, 3]) == [3, 0, 2, 0]


def test_an_iterable_dataset_and_a_torch_loader_are_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="Counted is an iterable dataset") as caught:
        el.ElasticLoader(Counted(3), el.GlobalBatch(1, 1))
    assert "el.ShardedStream(shards, open=..., lengths=...)" in caught.value.hint
    model = torch.nn.Linear(1, 1)
    run = Run(Engine(World(), torch.device("cpu")))
    with pytest.raises(UsageError, match="DataLoader") as caught:
        run.steps(DataLoader(Counted(3)), model, torch.optim.SGD(model.parameters()), until="1ba")  # type: ignore[arg-type]
    assert "el.ShardedStream" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": None}, r"how many samples each shard has is not known without lengths="),
        ({"lengths": [1]}, "1 lengths were given for 2 shards"),
        ({"lengths": [1, -1]}, "the length of 'b' is -1"),
        ({"lengths": [1, 1.5]}, "the length of 'b' is 1.5"),
        ({"lengths": "nowhere/shards.json"}, "there is no such file"),
        ({"shards": []}, "the list of shards is empty"),
        ({"shards": "data/*.tar"}, "is not a list"),
        ({"shards": [1, 2]}, "a shard is a int"),
        ({"buffer": 0}, r"buffer=0\)"),
        ({"lanes": 1.0}, r"lanes=1.0\)"),
        ({"open": None}, "open and decode are functions"),
        ({"decode": 3}, "open and decode are functions"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        el.ShardedStream(**{"shards": ["x/a", "x/b"], "open": list, "lengths": [1, 1], **options})


def test_what_open_returns_must_be_samples() -> None:
    with pytest.raises(UsageError, match=r"open\(\) returned a int"):
        el.ShardedStream(["a"], open=lambda name: 3, lengths=[1])[0]
    with pytest.raises(IndexError):
        stream([2, 1])[3]


def test_a_stream_without_samples_is_refused_and_one_with_few_is_not() -> None:
    with pytest.raises(UsageError, match="a dataset of 0 samples holds no global batch of 4"):
        el.ElasticLoader(stream([0, 0]), el.GlobalBatch(4, 2))
    loader = el.ElasticLoader(stream([3], lanes=2), el.GlobalBatch(8, 2))
    seen = [int(number) for rank in range(3) for micro in epochs_of(loader).epoch_from(5, 3, rank) for number in micro]
    assert sorted(seen) == [0, 1, 2]


def test_the_fingerprint_has_names_order_and_lengths_but_no_directory() -> None:
    def identity(shards: list[str], lengths: list[int]) -> int:
        given = el.ShardedStream(shards, open=list, lengths=lengths)
        return epochs_of(el.ElasticLoader(given, el.GlobalBatch(1, 1))).identity[LIST_OF_SHARDS]

    one = identity(["/data/a/0", "/data/b/0"], [5, 5])
    assert identity(["s3://bucket/a/0", "s3://bucket/b/0"], [5, 5]) == one
    assert identity(["/data/b/0", "/data/a/0"], [5, 5]) != one
    assert identity(["/data/a/0", "/data/b/0"], [4, 6]) != one
    assert identity(["/data/a/0", "/data/b/1"], [5, 5]) != one
    assert el.ShardedStream(["/data/0.tar"], open=list, lengths=[1]).names == ["0.tar"]


def _train(directory: Path, shards: list[str], until: str, **options: Any) -> str:
    torch.manual_seed(0)
    run, model = Run(Engine(World(), torch.device("cpu"))), torch.nn.Linear(1, 1)
    given = el.ShardedStream(shards, open=lambda name: range(6), lengths=[6] * len(shards), decode=_features)
    loader = el.ElasticLoader(given, el.GlobalBatch(4, 2), seed=1)
    checkpoint = el.Checkpoint(directory, every=100, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in run.steps(loader, model, optimizer, until=until, exact=True, checkpoint=checkpoint):
        for numbers in step:
            step.backward(model(numbers).pow(2).mean())
        step.update()
    return el.weights_sha256(model)


def _features(number: int) -> torch.Tensor:
    return torch.tensor([number + torch.rand(()).item()])


def test_a_resume_continues_at_the_sample_and_refuses_another_list(tmp_path: Path) -> None:
    undisturbed = _train(tmp_path / "one", ["d/a", "d/b", "d/c"], "11ba")
    _train(tmp_path / "two", ["d/a", "d/b", "d/c"], "4ba")
    assert _train(tmp_path / "two", ["moved/a", "moved/b", "moved/c"], "11ba") == undisturbed
    for changed in (["d/b", "d/a", "d/c"], ["d/a", "d/b", "d/x"]):
        with pytest.raises(UsageError, match=r"was made with list of shards \(as a hash\) \d+, this training has \d+"):
            _train(tmp_path / "two", changed, "12ba")
    with pytest.raises(UsageError, match=r"was made with (dataset length 18|list of shards)"):
        _train(tmp_path / "two", ["d/a", "d/b"], "12ba")
    with pytest.raises(UsageError, match=r"allow=\['list of shards'\]"):
        _train(tmp_path / "three", ["d/b", "d/a", "d/c"], "12ba", start_from=tmp_path / "one")
    _train(tmp_path / "three", ["d/b", "d/a", "d/c"], "12ba", start_from=tmp_path / "one", allow=["list of shards"])


def _lines(path: Path) -> Iterator[str]:
    with path.open() as file:
        yield from file


def test_shards_are_counted_once(tmp_path: Path) -> None:
    shards = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, path in enumerate(shards):
        path.write_text("x\n" * number)
    counted: list[Path] = []

    def lines(path: Path) -> Iterator[str]:
        counted.append(path)
        return _lines(path)

    file = tmp_path / "shards.json"
    assert el.count_shards(shards, lines, file) == [0, 1, 2]
    assert el.count_shards(shards, lines, file) == [0, 1, 2]
    assert counted == shards
    shards.append(tmp_path / "3.txt")
    shards[3].write_text("x\n")
    shards[1].write_text("x\nx\n")
    assert el.count_shards(shards, lines, file) == [0, 2, 2, 1]
    assert counted == [*shards[:3], shards[1], shards[3]]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    given = el.ShardedStream(shards[::-1], open=_lines, lengths=file)
    assert given.lengths == [1, 2, 2, 0]
    with pytest.raises(UsageError, match=r"shard 'other' was not counted for .*shards.json \(1 of 5\)") as caught:
        el.ShardedStream([*shards, tmp_path / "other"], open=_lines, lengths=file)
    assert f"el.count_shards(shards, open, {str(file)!r})" in caught.value.hint
    with pytest.raises(
        UsageError, match=r"shard '2.txt' was counted for .*, and is not in the list \(1 of 4\)"
    ) as caught:
        el.ShardedStream([*shards[:2], shards[3]], open=_lines, lengths=file)
    assert f"el.count_shards(shards, open, {str(file)!r})" in caught.value.hint
    shards[2].write_text("x\n")
    with pytest.raises(UsageError, match=r"shard '2.txt' has 2 bytes, and had 4 when its samples were counted"):
        given[1]
    assert el.count_shards(["a", "b"], range_of, tmp_path / "names.json") == [7, 7]
    assert json.loads((tmp_path / "names.json").read_text())["a"] == {"samples": 7, "bytes": None}
    for wrong in ("[]", '{"a": 5}', "{", '{"a": {"samples": "x", "bytes": 1}}'):
        file.write_text(wrong)
        with pytest.raises(UsageError, match=r"is not a file that el.count_shards\(\) has written|'a' was not counted"):
            el.ShardedStream(["a"], open=_lines, lengths=file)


def range_of(name: str) -> range:
    return range(7)
