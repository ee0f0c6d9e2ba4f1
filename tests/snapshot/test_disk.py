"""Directories that are full, read-only or missing: one error that names place and reason; nothing is left or lost."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from snapshot_helpers import refuse, same, state_of

from elastic_launch.errors import ElasticLaunchError, ExitCode
from elastic_launch.snapshot import CheckpointReadError, CheckpointWriteError, find, newest, prune, write
from elastic_launch.snapshot.format import files

BIG = {"w": torch.zeros(1_000_000)}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], bool]]:
    """Mounts 1 MiB of memory at tmp_path/disk, or changes its options; False where that is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)]
        try:
            return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
        except FileNotFoundError:
            return False

    yield mount
    if os.path.ismount(disk):
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def check_refused(error: ElasticLaunchError, directory: Path, cause: str, hint: str) -> None:
    assert isinstance(error, CheckpointWriteError)
    assert error.exit_code == ExitCode.TRAINING_FAILED
    assert f"Could not write a checkpoint in {directory}: {cause}" in error.message
    assert hint in error.hint


def check_unharmed(directory: Path) -> None:
    """The earlier checkpoint still exists, and the failed write has left nothing."""
    loaded = newest(directory, refuse)
    assert loaded is not None
    assert same(loaded.state, state_of(1))
    assert len(os.listdir(directory)) == 1


@contextmanager
def short_files() -> Iterator[None]:
    """Files of this process can have 1 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(tmp_path: Path, mounted: Callable[[str], bool]) -> None:
    """A real one where mounting is allowed, else a limit on the size of files."""
    directory = tmp_path / "disk"
    full = mounted("size=1m")
    write(directory, state_of(1), step=1, round=0)
    with nullcontext() if full else short_files(), pytest.raises(CheckpointWriteError) as raised:
        write(directory, BIG, step=2, round=0)
    check_refused(raised.value, directory, "No space left on device" if full else "File too large", "keep fewer")
    check_unharmed(directory)
    write(directory, state_of(3), step=3, round=0)
    assert [info.step for info in find(directory, refuse)] == [3, 1]


def test_a_file_too_large(tmp_path: Path) -> None:
    write(tmp_path, state_of(1), step=1, round=0)
    with short_files(), pytest.raises(CheckpointWriteError) as raised:
        write(tmp_path, BIG, step=2, round=0)
    check_refused(raised.value, tmp_path, "File too large", "keep fewer")
    check_unharmed(tmp_path)


def test_a_read_only_directory(tmp_path: Path, mounted: Callable[[str], bool]) -> None:
    directory = tmp_path / "disk"
    mount = mounted("size=1m")
    write(directory, state_of(1), step=1, round=0)
    write(directory, state_of(2), step=2, round=0)
    if mount:
        assert mounted("remount,ro")
    elif os.getuid() == 0:
        pytest.skip("needs leave to mount, or a user whom modes hold")
    else:
        directory.chmod(0o555)
    with pytest.raises(CheckpointWriteError) as raised:
        write(directory, {}, step=3, round=0)
    check_refused(raised.value, directory, os.strerror(errno.EROFS if mount else errno.EACCES), "can read and write")
    with pytest.raises(CheckpointWriteError, match=f"Could not remove old checkpoints in {directory}"):
        prune(directory, 1, 0)
    assert [info.step for info in find(directory, refuse)] == [2, 1], "what is there can still be read"
    if not mount:
        directory.chmod(0o755)


@pytest.mark.parametrize("below", ["file", "file/a/b", "link"])
def test_a_path_that_is_not_a_directory(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    directory = tmp_path / below
    with pytest.raises(CheckpointWriteError) as raised:
        write(directory, {}, step=1, round=0)
    check_refused(raised.value, directory, "", "Choose a path that is a directory")
    for read in (find, newest):
        with pytest.raises(CheckpointReadError, match="Not a directory"):
            read(directory)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "mkdir", "rename"])
def test_any_call_that_fails_at_any_time(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, second, ... of these calls fails, until none does: an error each time, and nothing is left."""
    original = getattr(os, call)
    write(tmp_path, state_of(1), step=1, round=0)
    at, failed = 0, True
    while failed:
        at, seen, failed = at + 1, 0, False

        def fails(*arguments: object, at: int = at, **options: object) -> object:
            nonlocal seen, failed
            seen += 1
            if seen == at:
                failed = True
                raise OSError(errno.EIO, "Input/output error", "the path")
            return original(*arguments, **options)

        monkeypatch.setattr(files.os, call, fails)
        try:
            info = write(tmp_path, state_of(2), step=2, round=0)
        except CheckpointWriteError as error:
            assert failed
            check_refused(error, tmp_path, "Input/output error (the path)", "Check the file system")
            monkeypatch.undo()
            # Only the last sync comes after the checkpoint has appeared: it is whole, but may not survive the power.
            names = sorted(os.listdir(tmp_path))
            assert all(name.startswith("step-") for name in names), names
            loaded = newest(tmp_path, refuse)
            assert loaded is not None
            assert same(loaded.state, state_of(loaded.info.step))
        else:
            monkeypatch.undo()
            assert not failed
            assert info in find(tmp_path, refuse)
    assert at > 1


def test_nothing_is_visible_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State after a power loss: all writes are synced before the rename, and the rename before the end."""
    events: list[tuple[str, str]] = []

    def recorded(name: str) -> None:
        original = getattr(os, name)

        def call(target: object, *arguments: object, **options: object) -> object:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            events.append((name, os.path.basename(path)))
            return original(target, *arguments, **options)

        monkeypatch.setattr(files.os, name, call)

    for name in ("write", "fsync", "rename"):
        recorded(name)
    info = write(tmp_path / "new", state_of(1), step=1, round=0)
    monkeypatch.undo()
    draft = f".writing-{info.path.name[-16:]}"
    expected = [("fsync", tmp_path.name)]
    for name in ("tensors.safetensors", "state.json", "manifest.json"):
        expected += [("write", name), ("fsync", name)]
    expected += [("fsync", draft), ("rename", draft), ("fsync", "new")]
    assert [event for at, event in enumerate(events) if at == 0 or event != events[at - 1]] == expected
