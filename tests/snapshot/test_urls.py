"""Checkpoints behind URLs: a real S3 server, file:// and memory://."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
import s3fs
import torch
from s3_server import BUCKET, S3Server, s3_server
from snapshot_helpers import refuse, same, start_threads_of_fsspec, state_of

from elastic_launch import snapshot
from elastic_launch.cli import doctor_storage
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.location import Url, place
from elastic_launch.snapshot.storage import owner, saving
from elastic_launch.snapshot.storage.url_storage import try_out
from elastic_launch.system.findings import Level
from elastic_launch.training.checkpoints.checkpoint import Checkpoint


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[S3Server]:
    start_threads_of_fsspec()
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket, and the environment for it; connections are closed afterwards."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    server.remove_bucket()
    server.make_bucket()
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    for used in s3fs.S3FileSystem._cache.values():
        if used._s3 is not None:
            s3fs.S3FileSystem.close_session(used.loop, used._s3)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["s3", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/runs/a"
    if request.param == "file":
        return f"file://{tmp_path}/runs/a"
    return f"memory://{uuid.uuid4()}/a"


def files(url: str) -> list[str]:
    """All objects below a URL, by relative path."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(path.removeprefix(root).strip("/") for path in fs.find(root))


def steps(url: str) -> list[int]:
    return [info.step for info in snapshot.find(url, refuse)]


def remove(url: Any) -> None:
    fs, path = fsspec.core.url_to_fs(str(url))
    fs.rm_file(path)


def put(url: Any, data: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(str(url))
    fs.pipe_file(path, data)


def test_what_was_written_is_found_and_loaded_to_the_bit(url: str) -> None:
    assert snapshot.newest(url, refuse) is None
    written = snapshot.write(url, state_of(3, 1), step=3, round=1, meta={"a": [1, 2]})
    (found,) = snapshot.find(url, refuse)
    assert found == written
    assert str(found.path).startswith(f"{url}/step-3.r1.")
    loaded = snapshot.newest(url, refuse)
    assert loaded is not None
    assert same(loaded.state, state_of(3, 1))
    assert (loaded.info.step, loaded.info.round, loaded.info.meta) == (3, 1, {"a": [1, 2]})


def test_a_checkpoint_is_the_same_in_a_directory_and_behind_a_url(url: str, tmp_path: Path) -> None:
    here = snapshot.write(tmp_path / "here", state_of(3), step=3, round=0)
    there = snapshot.write(url, state_of(3), step=3, round=0)
    assert (there.digest, there.bytes) == (here.digest, here.bytes)


def test_the_newest_is_that_of_the_highest_round_and_old_ones_are_removed(url: str) -> None:
    for round, step in ((1, 1), (1, 9), (2, 5), (3, 6)):
        snapshot.write(url, state_of(step, round), step=step, round=round)
    assert steps(url) == [6, 5, 9, 1]
    removed = snapshot.prune(url, 1, up_to_round=1)
    assert [info.step for info in removed] == [1], "what later rounds wrote stays, and does not count"
    assert steps(url) == [6, 5, 9]
    assert len(files(url)) == 9


def test_one_without_its_manifest_does_not_count_and_causes_no_warning(url: str) -> None:
    snapshot.write(url, state_of(1), step=1, round=0)
    half = snapshot.write(url, state_of(2), step=2, round=0)
    remove(half.path / "manifest.json")
    assert steps(url) == [1]
    loaded = snapshot.newest(url, refuse)
    assert loaded is not None
    assert loaded.info.step == 1


def test_a_half_written_one_stays_until_a_newer_one_is_complete(url: str) -> None:
    snapshot.write(url, state_of(1), step=1, round=0)
    half = snapshot.write(url, state_of(2), step=2, round=0)
    remove(half.path / "manifest.json")
    snapshot.prune(url, 1, 9)
    assert len(files(url)) == 5, "its writer may live"
    whole = snapshot.write(url, state_of(3), step=3, round=0)
    snapshot.prune(url, 1, 9)
    assert {name.split("/")[0] for name in files(url)} == {whole.path.name}


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_one_is_skipped_and_reported(url: str, name: str) -> None:
    snapshot.write(url, state_of(1), step=1, round=0)
    damaged = snapshot.write(url, state_of(2), step=2, round=0)
    fs, path = fsspec.core.url_to_fs(str(damaged.path))
    data = bytearray(fs.cat_file(f"{path}/{name}"))
    data[-20] ^= 1
    put(damaged.path / name, bytes(data))
    told: list[snapshot.CheckpointReadError] = []
    loaded = snapshot.newest(url, told.append)
    assert loaded is not None
    assert loaded.info.step == 1
    assert [error.path for error in told] == [damaged.path]
    assert str(damaged.path) in str(told[0])


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_one_that_lacks_a_file_is_damaged(url: str, name: str) -> None:
    info = snapshot.write(url, state_of(2), step=2, round=0)
    remove(info.path / name)
    with pytest.raises(snapshot.DamagedCheckpointError):
        snapshot.load(info)


def test_one_that_is_removed_while_it_is_read_is_gone_and_not_damaged(url: str) -> None:
    info = snapshot.write(url, state_of(2), step=2, round=0)
    snapshot.write(url, state_of(3), step=3, round=0)
    snapshot.prune(url, 1, 9)
    with pytest.raises(snapshot.CheckpointGoneError):
        snapshot.load(info)


def test_a_large_file_is_uploaded_in_parts_and_read_back(s3: S3Server) -> None:
    url = f"s3://{BUCKET}/large"
    state = {"x": torch.arange(7_000_000, dtype=torch.int64)}
    snapshot.write(url, state, step=1, round=0)
    loaded = snapshot.newest(url, refuse)
    assert loaded is not None
    assert torch.equal(loaded.state["x"], state["x"])


def _write(url: str, **options: Any) -> snapshot.CheckpointInfo:
    return saving.write_parts(url, [b"tensors"], b"{}", {}, step=1, round=1, **options)


def test_what_may_not_be_committed_leaves_nothing(url: str) -> None:
    with pytest.raises(snapshot.CheckpointError, match="not committed"):
        _write(url, may_commit=lambda: False)
    assert files(url) == []


def test_a_writer_asks_whether_it_may_before_the_manifest_is_there(url: str) -> None:
    seen: list[list[str]] = []

    def may_commit() -> bool:
        seen.append([name.rpartition("/")[2] for name in files(url)])
        return True

    _write(url, may_commit=may_commit)
    assert seen == [["state.json", "tensors.safetensors"]]


def test_of_two_runs_the_earlier_one_is_refused(url: str) -> None:
    where = place(url)
    assert isinstance(where, Url)
    first, second = owner.owned_by("a1", "first"), owner.owned_by("b2", "second")
    owner.claim(where, first)
    kept = _write(url, owner=first)
    owner.claim(where, second)
    with pytest.raises(snapshot.CheckpointWriteError, match=r"Two runs write to one directory: .* by run 'second'"):
        _write(url, owner=first)
    assert [info.path for info in snapshot.find(url)] == [kept.path]
    _write(url, owner=second)
    assert len(snapshot.find(url)) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 100_000, b'{"format": "another"}'])
def test_an_invalid_mark_does_not_count(url: str, content: bytes) -> None:
    where = place(url)
    assert isinstance(where, Url)
    mine = owner.owned_by("a1", "mine")
    owner.claim(where, mine)
    put(where / owner.OWNER, content)
    _write(url, owner=mine)
    assert (mark := owner.look(where)) is not None
    assert mark.token == "a1"


def test_a_bucket_that_is_not_there_is_an_error_and_is_never_made(s3: S3Server) -> None:
    s3.remove_bucket()
    where = place(f"s3://{BUCKET}/runs/a")
    assert isinstance(where, Url)
    with pytest.raises(snapshot.CheckpointWriteError, match=f"Could not write to {where}.*bucket does not exist"):
        try_out(where)
    with pytest.raises(snapshot.CheckpointWriteError, match=f"Could not write a checkpoint in {where}"):
        snapshot.write(where, state_of(1), step=1, round=0)
    s3.make_bucket()
    assert s3.objects() == []
    try_out(where)
    assert s3.objects() == [], "nor does a probe leave anything"


def test_credentials_that_are_missing_are_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(snapshot.CheckpointReadError, match=r"s3://bucket/a: NoCredentialsError.*") as caught:
        try_out(Url("s3://bucket/a"))
    assert "credentials" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("gs://bucket/a", "need a driver that is not installed", "pip install gcsfs"),
        ("nothing://bucket/a", "fsspec knows no nothing://", ""),
        ("ftp://me:secret@host/a", "ftp:// URL for checkpoints holds a password", "FSSPEC_FTP_PASSWORD"),
        ("simplecache::s3://bucket/a", "chain of file systems", ""),
        (Path("s3://bucket/a"), "'s3:/bucket/a' looks like a URL that lost a slash", "as strings"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_what_to_do(given: str | Path, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Checkpoint(given)
    assert hint in caught.value.hint
    assert "secret" not in str(caught.value)


def test_plain_paths_need_no_fsspec_and_copies_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from elastic_launch.snapshot.storage.saving import write_parts, prune; "
        f"write_parts({str(tmp_path)!r}, [b''], b'{{}}', {{}}, step=1, round=1); prune({str(tmp_path)!r}, 1, 1); "
        "print([name for name in ('fsspec', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_doctor_examines_the_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/runs/a"

    def found() -> list[tuple[Level, str, str]]:
        return [(x.level, x.text, x.remedy) for x in doctor_storage.checkpoints(url)]

    monkeypatch.setattr(doctor_storage, "SLOW", math.inf)  # a busy machine writes slowly
    tried, seen, clock = found()
    assert {x[0] for x in (tried, seen, clock)} == {Level.GOOD}
    assert tried[1].startswith(f"{url} can be listed, written, read and cleared: 1 MiB was written in ")
    assert seen[1] == f"0 checkpoints can be seen in {url}"
    assert clock[1].startswith("this host's clock is within ")
    assert s3.objects() == [], "what was written is removed"
    monkeypatch.setattr(doctor_storage.time, "time", lambda: 60.0)
    assert "behind that of s3" in found()[2][1]
    s3.remove_bucket()
    ((level, text, remedy),) = found()
    assert (level, remedy) == (Level.ERROR, "Check the URL: the bucket must exist, since none is ever created.")
    assert text.startswith(f"Could not write to {url}: FileNotFoundError: ")
