"""Checkpoints that several nodes write together: whatever the others do, the content is the first node's."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import pytest
import s3fs
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from s3_server import BUCKET, s3_server
from safetensors.torch import load_file
from snapshot_helpers import (
    NONCE,
    commit,
    division_of,
    refuse,
    same,
    share,
    start_threads_of_fsspec,
    state_of,
    together,
)

from elastic_launch import snapshot
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.manifest import MAX_SHARES, share_directory
from elastic_launch.snapshot.storage import saving, shares
from elastic_launch.snapshot.storage.shares import OwnShare, cuts
from elastic_launch.snapshot.storage.url_storage import UrlStorage

NAME = f"step-3.r1.{NONCE}"
NUMBERS = {"step": 3, "round": 1}


def layers(value: float) -> dict[str, Any]:
    """A state that three nodes can share evenly."""
    return {**state_of(3, 1), "layers": [torch.full((100,), value) for _ in range(6)]}


STATE = layers(3.0)


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    start_threads_of_fsspec()
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        server.make_bucket()
        yield
        for used in s3fs.S3FileSystem._cache.values():
            if used._s3 is not None:
                s3fs.S3FileSystem.close_session(used.loop, used._s3)
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["directory", "s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    prefix = {"directory": "", "s3": f"s3://{BUCKET}", "file": "file://"}
    return f"{prefix[request.param]}{tmp_path}/checkpoints"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (shares.Division, shares.OwnShare):
        monkeypatch.setattr(kind, "patience", -1e9)


def files(place: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(place)
    fs.invalidate_cache()
    return sorted(path.removeprefix(root).strip("/") for path in fs.find(root)) if fs.exists(root) else []


def names(*shares: str) -> list[str]:
    """All files of a checkpoint with these tensor files."""
    return sorted(f"{NAME}/{name}" for name in ("manifest.json", "state.json", *shares))


def usual(count: int) -> list[str]:
    return [f"tensors-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]


def check_loads(place: str) -> None:
    loaded = snapshot.newest(place, refuse)
    assert loaded is not None
    assert same(loaded.state, STATE)


# How a state is divided.


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 10))
@example([], 3)
@example([0, 0], 2)
@example([10**15, 1, 1], 4)
def test_the_largest_share_is_as_small_as_it_can_be(sizes: list[int], count: int) -> None:
    found = cuts(sizes, count)
    runs = [sizes[begin:end] for begin, end in pairwise(found)]
    assert [size for run in runs for size in run] == sizes
    assert len(runs) <= count
    assert all(sum(run) for run in runs) or len(runs) == 1
    best = {0: 0}  # the largest run of the first so many, divided into the runs allowed so far
    for _ in range(count):
        best = {
            end: min(max(best[begin], sum(sizes[begin:end])) for begin in best if begin <= end)
            for end in range(len(sizes) + 1)
        }
    assert max(map(sum, runs)) == best[len(sizes)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 100])
def test_shares_are_files_of_their_own_with_all_tensors_between_them(tmp_path: Path, count: int) -> None:
    """In the order of the undivided file, each tensor aligned to its elements; also tensors without elements."""
    state = {
        **{f"float{index}": torch.full((index,), index, dtype=torch.float64) for index in range(5)},
        **{f"byte{index}": torch.full((7 * index,), index, dtype=torch.uint8) for index in range(5)},
    }
    division, _ = division_of(state, count)
    assert len(division) <= min(count, 8), "no more than there are tensors with bytes"
    found: dict[str, torch.Tensor] = {}
    for index in range(len(division)):
        path = tmp_path / f"{index}.safetensors"
        data = b"".join(division.parts(index))
        path.write_bytes(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert all(entry["data_offsets"][0] % 8 == 0 for name, entry in header.items() if "float" in name)
        more = load_file(path)
        assert not found.keys() & more.keys()
        found.update(more)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_one_huge_tensor_is_one_share() -> None:
    division, _ = division_of({"a": torch.zeros(1), "huge": torch.zeros(1000), "z": torch.zeros(1)}, 8)
    assert [len(b"".join(division.parts(index))) > 4000 for index in range(len(division))] == [False, True, False]


def test_no_more_files_than_a_manifest_has_room_for() -> None:
    state = {str(index): torch.tensor(index) for index in range(2 * MAX_SHARES)}
    division, _ = division_of(state, 10_000)
    assert len(division) == MAX_SHARES


@pytest.mark.slow
def test_as_many_files_as_a_manifest_has_room_for(tmp_path: Path) -> None:
    state = {str(index): torch.tensor(index) for index in range(2 * MAX_SHARES)}
    together(tmp_path, state, MAX_SHARES, step=1)
    loaded = snapshot.newest(tmp_path, refuse)
    assert loaded is not None
    assert same(loaded.state, state)


# How shares are combined.


def test_what_several_nodes_write_is_one_checkpoint(place: str) -> None:
    whole = snapshot.write(f"{place}-whole", STATE, step=3, round=1)
    info = together(place, STATE, 3, step=3, round=1)
    assert info == snapshot.find(place, refuse)[0]
    assert info.bytes > whole.bytes, "each share has a header"
    assert [name for name in files(place) if not name.endswith(".sum")] == names(*usual(3))
    check_loads(place)


def test_the_first_node_waits_for_the_others_while_it_may(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write at the same time, each into the same place."""
    monkeypatch.setattr(shares.Division, "patience", 60.0)  # on a busy machine the others may be late
    nodes = [threading.Thread(target=share, args=(place, STATE, 3, index), kwargs=NUMBERS) for index in (1, 2)]
    first = threading.Thread(target=commit, args=(place, STATE, 3), kwargs=NUMBERS)
    for thread in (first, *nodes):
        thread.start()
    for thread in (first, *nodes):
        thread.join(60)
    assert [name for name in files(place) if not name.endswith(".sum")] == names(*usual(3))
    check_loads(place)


def test_a_sum_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage may show an object before it has its content."""
    place = f"file://{tmp_path}/checkpoints"
    looked, twice = threading.Event(), threading.Event()
    sizes_of = UrlStorage.sizes

    def look(*given: Any, **more: Any) -> dict[str, int]:
        if looked.is_set():
            twice.set()
        found = sizes_of(*given, **more)
        if any(name.endswith(".sum") for name in found):
            looked.set()
        return found

    monkeypatch.setattr(UrlStorage, "sizes", look)
    monkeypatch.setattr(shares.Division, "patience", 60.0)
    share(place, STATE, 2, 1, **NUMBERS)
    (complete,) = tmp_path.glob("checkpoints/*/*.sum")
    content = complete.read_bytes()
    complete.write_bytes(b"")
    first = threading.Thread(target=commit, args=(place, STATE, 2), kwargs=NUMBERS)
    first.start()
    assert twice.wait(60)
    complete.write_bytes(content)
    first.join(60)
    assert not list(tmp_path.glob("checkpoints/*/*.again.*"))
    check_loads(place)


@pytest.mark.usefixtures("impatient")
def test_a_share_that_does_not_come_is_written_by_the_first_node(place: str) -> None:
    share(place, STATE, 3, 2, **NUMBERS)
    commit(place, STATE, 3, **NUMBERS)
    check_loads(place)
    before = files(place)
    missing = usual(3)[1] if "://" not in place else usual(3)[1].replace(".safetensors", ".again.safetensors")
    written = [usual(3)[0], missing, usual(3)[2]]
    assert [name for name in before if not name.endswith(".sum")] == names(*written)
    share(place, STATE, 3, 1, **NUMBERS)
    assert files(place) == before, "one that comes too late leaves nothing"
    check_loads(place)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("wrong", ["another state", "cut", "nonsense", "sum of another", "too large a sum"])
def test_a_share_that_is_not_what_the_first_node_has_is_not_taken(place: str, wrong: str) -> None:
    share(place, layers(4.0) if wrong == "another state" else STATE, 2, 1, **NUMBERS)
    fs, root = fsspec.core.url_to_fs(place)
    (tensors,) = [name for name in fs.find(root) if name.endswith(".safetensors")]
    (about,) = [name for name in fs.find(root) if name.endswith((".sum", "sum.json"))]
    if wrong == "cut":
        fs.pipe_file(tensors, fs.cat_file(tensors)[:-1])
    elif wrong == "nonsense":
        fs.pipe_file(about, b'{"bytes": []}')
    elif wrong == "too large a sum":
        fs.pipe_file(about, fs.cat_file(about) + b" " * 2000)
    elif wrong == "sum of another":
        fs.pipe_file(about, b'{"bytes": 1, "sha256": ""}')
    commit(place, STATE, 2, **NUMBERS)
    check_loads(place)


@pytest.mark.usefixtures("impatient")
def test_a_link_in_the_place_of_a_share_leads_nowhere(tmp_path: Path) -> None:
    share(tmp_path, STATE, 2, 1, **NUMBERS)
    waiting = tmp_path / share_directory(NAME, 1, 2)
    os.rename(waiting / "tensors.safetensors", tmp_path / "elsewhere")
    (waiting / "tensors.safetensors").symlink_to(tmp_path / "elsewhere")
    commit(tmp_path, STATE, 2, **NUMBERS)
    check_loads(str(tmp_path))
    assert not waiting.exists()


@pytest.mark.usefixtures("impatient")
def test_what_may_not_be_committed_is_not_there_and_is_done_again_under_another_name(place: str) -> None:
    share(place, STATE, 2, 1, **NUMBERS)
    with pytest.raises(snapshot.CheckpointError, match="not committed"):
        commit(place, STATE, 2, **NUMBERS, may_commit=lambda: False)
    assert files(place) == []
    share(place, STATE, 2, 1, **NUMBERS)  # it cannot know
    info = snapshot.write(place, STATE, **NUMBERS)
    assert [found.path for found in snapshot.find(place, refuse)] == [info.path]


def test_unused_shares_are_removed_with_old_checkpoints(place: str) -> None:
    share(place, STATE, 3, 1, step=2, round=1)
    share(place, STATE, 3, 1, step=4, round=1)
    info = together(place, STATE, 3, **NUMBERS, nonce="fedcba9876543210")
    snapshot.prune(place, 1, up_to_round=1)
    left = {name.partition("/")[0] for name in files(place)} - {info.path.name}
    assert [name.removeprefix(".share-")[:9] for name in left] == ["step-4.r1"], "that is still to be taken"
    snapshot.write(place, STATE, step=5, round=1)
    snapshot.prune(place, 1, up_to_round=1)
    assert len(snapshot.find(place)) == 1
    assert {name.partition("/")[0][:9] for name in files(place)} == {"step-5.r1"}


def test_old_checkpoints_of_several_files_are_removed_whole(place: str) -> None:
    together(place, STATE, 3, **NUMBERS)
    snapshot.write(place, STATE, step=4, round=1)
    snapshot.prune(place, 1, up_to_round=1)
    assert len(files(place)) == 3


@pytest.mark.parametrize("name", [*usual(3), "state.json"])
def test_a_damaged_or_missing_share_is_a_damaged_checkpoint(place: str, name: str) -> None:
    snapshot.write(place, STATE, step=2, round=1)
    for step, damage in ((3, b"cut"), (4, b""), (5, None)):
        info = together(place, layers(9.0), 3, step=step, round=1)
        fs, path = fsspec.core.url_to_fs(f"{info.path}/{name}")
        whole = fs.cat_file(path)
        if damage is None:
            fs.rm_file(path)
        else:
            fs.pipe_file(path, whole[:-1] if damage else whole[:-1] + bytes([whole[-1] ^ 1]))
    told: list[Any] = []
    loaded = snapshot.newest(place, told.append)
    assert loaded is not None
    assert same(loaded.state, STATE)
    assert [type(error) for error in told] == [snapshot.DamagedCheckpointError] * 3
    assert loaded.info.step == 2


def own(index: int) -> OwnShare:
    """Return what a node of three writes of STATE, if each has some of its tensors."""
    tensors, rest = tree.encode(STATE)
    mine = {name: tensor for number, (name, tensor) in enumerate(sorted(tensors.items())) if number % 3 == index}
    return OwnShare(index, 3, NONCE, mine, rest if index == 0 else None)


def write_own(place: str, index: int, **more: Any) -> snapshot.CheckpointInfo | None:
    return saving.write_own(place, own(index), **NUMBERS, **more)


def test_nodes_that_each_have_some_tensors_write_one_checkpoint(place: str) -> None:
    """They write at the same time, each into the same place; the first one knows what the others' shares are."""
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(partial(write_own, place, meta={"a": 1}), range(3))
    assert others == [None, None]
    assert first is not None
    loaded = snapshot.newest(place)
    assert loaded is not None
    assert (loaded.info.digest, loaded.info.meta) == (first.digest, {"a": 1})
    assert same(loaded.state, STATE)
    assert [name for name in files(place) if not name.endswith(".sum")] == names(*usual(3))


@pytest.mark.usefixtures("impatient")
def test_a_checkpoint_that_lacks_the_share_of_another_node_is_not_committed(place: str) -> None:
    write_own(place, 1)
    with pytest.raises(snapshot.CheckpointWriteError, match="Share 3 of 3 did not come, and only its node has it"):
        write_own(place, 0)
    assert snapshot.find(place) == []
    assert snapshot.newest(place) is None


@pytest.mark.usefixtures("impatient")
def test_a_checkpoint_with_a_share_whose_report_is_not_valid_is_not_committed(tmp_path: Path) -> None:
    write_own(str(tmp_path), 1)
    write_own(str(tmp_path), 2)
    (report,) = tmp_path.glob(".share-*-00002-*/sum.json")
    report.write_text("{}")
    with pytest.raises(snapshot.CheckpointWriteError, match="Share 2 of 3 is not what it must be"):
        write_own(str(tmp_path), 0)
    assert snapshot.find(tmp_path) == []


def test_threads_that_reckon_checksums_end_with_what_fails() -> None:
    division, _ = division_of(STATE, 3)
    with contextlib.suppress(ZeroDivisionError), division.sums() as expected:
        assert expected(2) == division.sum(2)
        raise ZeroDivisionError
    assert shares.Division.patience > 0
