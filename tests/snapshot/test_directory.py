"""Checkpoints in a directory: order, completeness, pruning, several writers and readers at once."""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_helpers import refuse, same, state_of

from elastic_launch.contract import Best
from elastic_launch.errors import UsageError
from elastic_launch.snapshot import (
    CheckpointGoneError,
    CheckpointInfo,
    find,
    inspect,
    load,
    newest,
    prune,
    withdraw,
    write,
)
from elastic_launch.snapshot.format.manifest import directory_name, parse_name
from elastic_launch.snapshot.storage import directory as drafts
from elastic_launch.snapshot.storage import listing, saving
from elastic_launch.snapshot.storage.directory import Directory, check_writable


def numbers(infos: list[CheckpointInfo]) -> list[tuple[int, int]]:
    return [(info.round, info.step) for info in infos]


def write_some(directory: Path, *pairs: tuple[int, int]) -> list[CheckpointInfo]:
    return [write(directory, state_of(step, round), step=step, round=round) for round, step in pairs]


def test_what_is_written_is_found_and_loaded(tmp_path: Path) -> None:
    meta = {"G": 64, "micro": 8, "seed": 3, "lr": 0.1, "betas": (0.9, 0.999), "none": None, 1: float("inf")}
    directory = tmp_path / "runs" / "a"
    info = write(directory, state_of(7), step=7, round=2, meta=meta)
    assert info.path.parent == directory
    assert parse_name(info.path.name) == (7, 2)
    assert find(str(directory), refuse) == [info] == [inspect(info.path)]
    loaded = newest(directory, refuse)
    assert loaded is not None
    assert (loaded.info.step, loaded.info.round, loaded.info) == (7, 2, info)
    assert same(loaded.state, state_of(7))
    assert same(loaded.info.meta, meta)
    assert sorted(os.listdir(info.path)) == ["manifest.json", "state.json", "tensors.safetensors"]
    assert info.bytes == sum((info.path / name).stat().st_size for name in ("state.json", "tensors.safetensors"))


def test_an_empty_directory_has_no_checkpoints(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        assert find(directory, refuse) == []
        assert newest(directory, refuse) is None
        assert prune(directory, 1, 0) == []
    assert os.listdir(tmp_path) == []


def test_the_round_counts_before_the_step(tmp_path: Path) -> None:
    write_some(tmp_path, (2, 9), (10, 3), (2, 10), (10, 1), (0, 100))
    assert numbers(find(tmp_path)) == [(10, 3), (10, 1), (2, 10), (2, 9), (0, 100)]
    loaded = newest(tmp_path)
    assert loaded is not None
    assert same(loaded.state, state_of(3, 10))


def test_the_digest_depends_on_content_not_on_place(tmp_path: Path) -> None:
    one, other = write_some(tmp_path / "a", (1, 5)) + write_some(tmp_path / "b", (1, 5))
    assert one.path.name != other.path.name
    assert one.digest == other.digest
    assert len(one.digest) == 64
    copy = shutil.copytree(one.path, tmp_path / "best")
    assert inspect(copy).digest == one.digest
    assert same(load(inspect(copy)).state, state_of(5, 1))
    different = [
        write(tmp_path, state_of(6, 1), step=5, round=1),
        write(tmp_path, state_of(5, 1), step=6, round=1),
        write(tmp_path, state_of(5, 1), step=5, round=2),
        write(tmp_path, state_of(5, 1), step=5, round=1, meta={"a": 1}),
    ]
    assert len({one.digest, *(info.digest for info in different)}) == 5


def test_two_of_one_step_and_round_live_side_by_side(tmp_path: Path) -> None:
    first, second = write_some(tmp_path, (1, 5), (1, 5))
    assert first.path != second.path
    assert find(tmp_path) == sorted([first, second], key=lambda info: info.path.name, reverse=True)


@pytest.mark.parametrize(("step", "round"), [(-1, 0), (0, -1), (True, 0), (1.0, 0), (10**18, 0), ("1", 0)])
def test_step_and_round_are_checked(step: int, round: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 or more"):
        write(tmp_path, {}, step=step, round=round)


def test_entries_with_other_names_are_ignored(tmp_path: Path) -> None:
    (info,) = write_some(tmp_path, (1, 5))
    nonce = "0123456789abcdef"
    names = ["latest", "step-5", "step-05.r1." + nonce, "step-5.r1." + nonce + "\n", "step-\u0665.r1." + nonce, ".git"]
    names += [f"step--5.r1.{nonce}", f"Step-5.r1.{nonce}", f"step-5.r1.{nonce.upper()}", "..hidden"]
    for name in names:
        (tmp_path / name).mkdir()
        assert parse_name(name) is None
    assert find(tmp_path, refuse) == [info]
    prune(tmp_path, 1, 9)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, info.path.name])
    assert parse_name(directory_name(10**18 - 1, 0, nonce)) == (10**18 - 1, 0)


def test_prune_keeps_the_newest_and_later_rounds(tmp_path: Path) -> None:
    write_some(tmp_path, (1, 1), (1, 2), (1, 3), (2, 2), (3, 1), (4, 1))
    assert numbers(prune(tmp_path, 1, 2)) == [(1, 3), (1, 2), (1, 1)], "later ones do not count"
    assert numbers(find(tmp_path)) == [(4, 1), (3, 1), (2, 2)]
    assert prune(tmp_path, 5, 9) == []
    assert numbers(prune(tmp_path, 1, 9)) == [(3, 1), (2, 2)]
    assert prune(tmp_path, 1, 9) == []
    assert len(os.listdir(tmp_path)) == 1
    with pytest.raises(UsageError, match="keep=0"):
        prune(tmp_path, 0, 9)


def test_prune_spares_milestones(tmp_path: Path) -> None:
    """The first at or after each multiple: with an interval in minutes, steps are not multiples of anything."""
    write_some(tmp_path, (1, 40), (1, 90), (1, 110), (1, 190), (2, 205), (2, 290), (2, 400), (2, 450), (9, 401))
    removed = prune(tmp_path, 1, 2, every=100)
    assert numbers(removed) == [(2, 290), (1, 190), (1, 90), (1, 40)]
    assert prune(tmp_path, 1, 2, every=100) == []
    assert numbers(find(tmp_path)) == [(9, 401), (2, 450), (2, 400), (2, 205), (1, 110)]


def test_prune_spares_the_last_state_that_a_verified_step_has_checked(tmp_path: Path) -> None:
    write_some(tmp_path, *((1, step) for step in range(1, 8)))
    assert numbers(prune(tmp_path, 2, 1, meta={"agreed": 4})) == [(1, 5), (1, 4), (1, 2), (1, 1)]
    assert numbers(prune(tmp_path, 2, 1, meta={"agreed": None})) == [(1, 3)]


def test_what_a_run_has_saved_since_a_step_is_withdrawn(tmp_path: Path) -> None:
    mine, others = ({"branch": {"run": run, "since": 1, "epoch": 1}} for run in ("mine", "another"))
    for step in (10, 20, 30):
        write(tmp_path, state_of(step, 1), step=step, round=1, meta=mine)
    write(tmp_path, state_of(40, 1), step=40, round=1, meta=others)
    assert numbers(withdraw(tmp_path, 15, mine)) == [(1, 30), (1, 20)]
    assert numbers(find(tmp_path)) == [(1, 40), (1, 10)]
    assert withdraw(tmp_path / "missing", 15, mine) == []


def test_prune_spares_the_best(tmp_path: Path) -> None:
    nan = float("nan")
    values: list[Any] = [0.5, 0.9, None, 0.7, nan, 0.9, "1.0", True, 0.1, 0.2]
    for step, value in enumerate(values):
        metrics = {} if value is None else {"metrics": {"accuracy": value, "loss": 1.0}}
        write(tmp_path, state_of(step), step=step, round=1, meta=metrics)
    write(tmp_path, state_of(10), step=10, round=1, meta={"metrics": "none"})
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    prune(f"file://{copy}", 1, 1, best=Best("accuracy", "max", 3))
    assert numbers(find(copy)) == [(1, 10), (1, 5), (1, 3), (1, 1)]
    prune(copy, 2, 1, best=Best("accuracy", "max", 2))
    assert numbers(find(copy)) == [(1, 10), (1, 5), (1, 1)]
    prune(tmp_path, 2, 1, every=6, best=Best("accuracy"))
    assert numbers(find(tmp_path)) == [(1, 10), (1, 9), (1, 8), (1, 6)]


@given(
    positions=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.none() | st.floats()), max_size=12),
    keep=st.integers(1, 3),
    round=st.integers(1, 4),
    every=st.integers(0, 5),
    count=st.integers(1, 3),
)
def test_whatever_is_spared_the_newest_of_the_present_branch_stay(
    positions: list[tuple[int, int, float | None]], keep: int, round: int, every: int, count: int
) -> None:
    infos = [
        CheckpointInfo(Path(f"{at}"), step, number, "", 0, {} if value is None else {"metrics": {"loss": value}})
        for at, (number, step, value) in enumerate(positions)
    ]
    infos.sort(key=lambda info: (info.round, info.step), reverse=True)
    left = saving.left_over(infos, keep, round, every, Best("loss", "min", count))
    mine = [info for info in infos if info.round <= round]
    assert all(info in mine[keep:] for info in left)
    best = [info.meta["metrics"]["loss"] for info in mine if info.meta and not math.isnan(info.meta["metrics"]["loss"])]
    kept = [info.meta["metrics"]["loss"] for info in mine if info not in left and info.meta]
    assert set(sorted(best)[:count]) <= set(kept)


def test_prune_counts_and_removes_only_complete_ones(tmp_path: Path) -> None:
    infos = write_some(tmp_path, (1, 1), (1, 2), (1, 3), (1, 4))
    (infos[3].path / "manifest.json").unlink()
    (infos[0].path / "state.json").write_text("")
    assert numbers(prune(tmp_path, 1, 1)) == [(1, 2)]
    assert {parse_name(name) for name in os.listdir(tmp_path)} == {(1, 1), (3, 1), (4, 1)}


def test_prune_follows_no_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    directory = tmp_path / "run"
    old, _ = write_some(directory, (1, 1), (1, 2))
    (old.path / "more").mkdir()
    (old.path / "more" / "link").symlink_to(outside)
    for name in (".writing-link", ".removing-link", "step-1.r0.0123456789abcdef"):
        (directory / name).symlink_to(outside)
    (directory / ".writing-fedcba9876543210").mkdir()
    (directory / ".writing-fedcba9876543210" / "tensors.safetensors").symlink_to(outside / "precious")
    prune(directory, 1, 1)
    assert not old.path.exists()
    assert (directory / ".writing-fedcba9876543210").exists(), "nothing is known about what is no draft of ours"
    assert (outside / "precious").exists()


def test_a_draft_is_left_alone_while_its_writer_lives(tmp_path: Path) -> None:
    with Directory(tmp_path).draft(1, 1) as alive:
        prune(tmp_path, 1, 9)
        assert alive.path.is_dir()
        left = shutil.copytree(alive.path, tmp_path / ".writing-0123456789abcdef")
        half = tmp_path / ".removing-0123456789abcdef"
        half.mkdir()
        (half / "state.json").touch()
        (tmp_path / ".writing-fedcba9876543210").mkdir()
        prune(tmp_path, 1, 9)
        assert os.listdir(tmp_path) == [alive.path.name], "what has no writer is gone"
        assert not left.exists()
    prune(tmp_path, 1, 9)
    assert os.listdir(tmp_path) == []


def test_without_locks_no_draft_counts_as_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(drafts.fcntl, "flock", unsupported)
    (tmp_path / ".writing-0123456789abcdef").mkdir()
    (tmp_path / ".writing-0123456789abcdef" / "tensors.safetensors").touch()
    write_some(tmp_path, (1, 1), (1, 2))
    prune(tmp_path, 1, 9)
    assert numbers(find(tmp_path)) == [(1, 2)]
    assert (tmp_path / ".writing-0123456789abcdef").exists()


@pytest.mark.parametrize("moment", ["mkdir", "create", "_lock"])
def test_a_sweeper_that_comes_while_a_draft_is_made(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after each call that creates a draft, another process sweeps, once."""
    owner = drafts.os if moment == "mkdir" else drafts
    original = getattr(owner, moment)
    swept = []

    def then_sweep(*arguments: object) -> object:
        result = original(*arguments)
        if not swept:
            swept.append(moment)
            drafts.remove_abandoned(tmp_path)
        return result

    monkeypatch.setattr(owner, moment, then_sweep)
    write(tmp_path, state_of(1), step=1, round=0)
    assert swept == [moment]
    monkeypatch.undo()
    loaded = newest(tmp_path, refuse)
    assert loaded is not None
    assert same(loaded.state, state_of(1))
    assert len(os.listdir(tmp_path)) == 1


def test_a_sweeper_that_holds_the_lock_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has locked the new file before its writer did; the writer starts again."""
    original, taken = drafts.create, []

    def create_and_lose(path: Path) -> int:
        descriptor = original(path)
        if not taken:
            taken.append(os.open(path, os.O_RDWR))
            drafts.fcntl.flock(taken[0], drafts.fcntl.LOCK_EX)
        return descriptor

    monkeypatch.setattr(drafts, "create", create_and_lose)
    write(tmp_path, state_of(1), step=1, round=0)
    assert numbers(find(tmp_path, refuse)) == [(0, 1)]
    os.close(taken[0])
    prune(tmp_path, 1, 0)
    assert len(os.listdir(tmp_path)) == 1


def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path: Path) -> None:
    (info,) = write_some(tmp_path, (1, 1))
    write_some(tmp_path, (1, 2))
    prune(tmp_path, 1, 1)
    for read in (lambda: load(info), lambda: inspect(info.path)):
        with pytest.raises(CheckpointGoneError, match="was removed"):
            read()


def test_what_changes_while_it_is_listed_is_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_some(tmp_path, (1, 1))
    original, calls = listing.inspect, []

    def replaced_meanwhile(path: Path) -> CheckpointInfo:
        calls.append(path)
        if len(calls) == 1:
            write_some(tmp_path, (1, 2))
            prune(tmp_path, 1, 1)
        return original(path)

    monkeypatch.setattr(listing, "inspect", replaced_meanwhile)
    assert numbers(find(tmp_path, refuse)) == [(1, 2)]
    monkeypatch.undo()

    listings = [[]]  # As a listing can be in which one was not yet and the other no longer.
    listdir = os.listdir
    monkeypatch.setattr(listing.os, "listdir", lambda path: listings.pop() if listings else listdir(path))
    assert numbers(find(tmp_path, refuse)) == [(1, 2)]


def test_a_directory_that_never_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes checkpoints faster than a reader reads: reading ends, but not with `there is nothing`."""
    (info,) = write_some(tmp_path, (1, 1))
    looks = []

    def gone(path: Path) -> CheckpointInfo:
        looks.append(path)
        raise CheckpointGoneError(path)

    monkeypatch.setattr(listing, "inspect", gone)
    for read in (find, newest):
        with pytest.raises(CheckpointGoneError, match="was removed"):
            read(tmp_path)
    assert set(looks) == {info.path}


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_concurrent_readers_and_writers_that_prune(tmp_path: Path) -> None:
    """Each newest checkpoint that is read is complete, none is older than the previous one, and writers do no harm."""
    ended = threading.Event()
    write_some(tmp_path, (0, 0))

    def writer(first: int) -> None:
        for step in range(first, first + 40, 2):
            write(tmp_path, state_of(step, 1), step=step, round=1)
            prune(tmp_path, 1, 1)

    def writers() -> None:
        try:
            in_threads(lambda: writer(2), lambda: writer(3))
        finally:
            ended.set()

    def reader() -> None:
        last, reads = (0, 0), 0
        while not ended.is_set() or reads < 20:
            loaded = newest(tmp_path, refuse)
            assert loaded is not None
            assert same(loaded.state, state_of(loaded.info.step, loaded.info.round))
            assert last <= (loaded.info.round, loaded.info.step)
            last, reads = (loaded.info.round, loaded.info.step), reads + 1

    in_threads(writers, reader, reader)
    assert len(os.listdir(tmp_path)) <= 2
    assert numbers(find(tmp_path, refuse))[0] == (1, 41)


def test_a_directory_that_can_be_written_to_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("where", ["/proc/elastic-launch-test", "/sys/elastic-launch-test", "file", "file/a/b", "link"])
def test_a_directory_that_cannot_be_written_to_is_a_wrong_argument(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/sys/elastic-launch-test")
    with pytest.raises(UsageError, match=f"Checkpoints cannot be saved to {tmp_path / where} on host .*: "):
        check_writable(tmp_path / where)


def test_a_directory_that_is_full_when_the_run_begins_may_have_room_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Directory, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Directory, "put", full)
    check_writable(tmp_path)
