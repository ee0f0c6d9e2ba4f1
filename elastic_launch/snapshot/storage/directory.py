"""Checkpoints in a directory of a file system.

A writer works in a draft, a ``.writing-`` directory that a rename turns into a checkpoint. It holds a lock (flock) on
the draft's tensor file until then. The kernel, or the server of a network file system, releases the lock when the
writer dies, so no process id needs a meaning on another host. A process that gets the lock may therefore remove the
draft. It may get it after a writer has made its directory and before that writer has locked the file: the writer then
finds the file locked, or gone, and starts again. A writer may rename the file to the name of a share; the lock stays
with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.format.files import (
    FileSum,
    check_size,
    check_sum,
    create,
    open_regular,
    read_chunks,
    read_in_parts,
    remove_tree,
    sum_of,
    sync_directory,
    write_all,
)
from elastic_launch.snapshot.format.manifest import (
    DATA,
    MANIFEST,
    REMOVING,
    TENSORS,
    WRITING,
    directory_name,
    new_nonce,
    parse_name,
    parse_share,
    share_directory,
    share_file,
)
from elastic_launch.snapshot.storage.shares import MAX_SUM_BYTES, pack_sum, parse_sum

_SUM = "sum.json"
"""Name of the file with the size and checksum of a share that waits to be committed."""

_FIRST_SHARE = "tensors-00001-of-"

_ATTEMPTS = 10
"""Maximum number of attempts. An attempt fails only if a sweeper comes between the writer's first two calls."""

_LASTING = {
    *(errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG),
}
"""Errors of a path that stay until a user changes something; others, such as a full disk, may pass by themselves."""

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


def check_writable(path: Path) -> None:
    """Make a directory of checkpoints if it does not exist, and in it a file, which is removed.

    Raises:
        UsageError: if that fails, and would fail again.
    """
    file = f"probe-{new_nonce()}"
    try:
        Directory(path).put(file, b"")
        (path / file).unlink(missing_ok=True)
    except OSError as error:
        if error.errno in _LASTING:
            where = error.filename if error.filename in map(str, (path, *path.parents)) else path
            raise UsageError(
                f"Checkpoints cannot be saved to {path} on host {socket.gethostname()}: {os.strerror(error.errno)} "
                f"({where}).",
                "Give Checkpoint() a directory that exists, or can be made, and that this user can write to.",
            ) from error


class Directory:
    """A directory of checkpoints, which need not exist, or of one; names are relative to it. Methods raise OSErrors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the names in it."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def candidates(self) -> list[str]:
        """Return the names that are those of checkpoints."""
        return [name for name in self.names() if parse_name(name) is not None]

    def is_gone(self) -> bool:
        """Whether this checkpoint was removed."""
        return not os.path.lexists(self.path)

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a small file; raise a MalformedError if it is larger than ``limit``, or irregular."""
        return read_in_parts(self.path / name, limit)

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading, which need not be written by this package."""
        with open_regular(self.path / name) as descriptor, open(descriptor, "rb", closefd=False) as file:
            yield file

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes of some files."""
        return {name: _size(self.path / name) for name in names}

    @contextmanager
    def verified(self, name: str, expected: FileSum) -> Iterator[int]:
        """Open a file, and verify its size and checksum."""
        with open_regular(self.path / name) as descriptor:
            check_size(name, os.fstat(descriptor).st_size, expected)
            check_sum(name, sum_of(read_chunks(descriptor)), expected)
            yield descriptor

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it, atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        new = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            with open(create(new), "wb") as file:
                file.write(data)
            os.rename(new, self.path / name)
        finally:
            new.unlink(missing_ok=True)

    @contextmanager
    def draft(self, step: int, round: int, nonce: str = "") -> Iterator[DirectoryDraft]:
        """Make a draft of a checkpoint, with a random nonce unless one is given; it is removed if it is not
        published.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        if missing:
            os.makedirs(self.path, exist_ok=True)
        for path in missing:
            sync_directory(path.parent)
        made, own, tensors = _make(self.path)
        draft = DirectoryDraft(made, tensors, directory_name(step, round, nonce or own))
        try:
            yield draft
        finally:
            # The lock is still held, so no other process removes it at the same time.
            if not draft.published:
                with suppress(OSError):
                    bury(made)
            os.close(tensors)

    def write_share(
        self, step: int, round: int, nonce: str, share: tuple[int, int], parts: Iterable[bytes | memoryview]
    ) -> None:
        """Write a share of a checkpoint that another node commits; ``share`` is its index, and their number."""
        with self.draft(step, round, nonce) as draft:
            draft.write(_SUM, [pack_sum(draft.write(TENSORS, parts))])
            sync_directory(draft.path)
            if not (self.path / draft.name).exists():  # else the committer has not waited
                draft.rename(share_directory(draft.name, *share))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, so that a half-removed one is never mistaken for a complete one."""
        bury(self.path / name)

    def remove_remains(self, newest: tuple[int, int]) -> None:
        """Remove the remains of dead writers and sweepers, and shares that are not needed any more.

        These are of checkpoints up to ``newest``, the round and step of the newest complete one. If a committer does
        need a share, it only has to write that itself.
        """
        if not self.path.is_dir():
            return
        remove_abandoned(self.path)
        for name in os.listdir(self.path):
            step, round = parse_share(name) or (0, 0)
            if parse_share(name) is not None and (round, step) <= newest:
                bury(self.path / name)


class DirectoryDraft:
    """A checkpoint that is being written; ``name`` is the checkpoint's."""

    def __init__(self, path: Path, tensors: int, name: str) -> None:
        self.path = path
        self.name = name
        self.published = False
        self._tensors = tensors  # descriptor of its first tensor file, empty, open for writing, locked

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileSum:
        """Write a file."""
        if first := name == DATA or name.startswith(_FIRST_SHARE):
            os.rename(self.path / TENSORS, self.path / name)
        if first or name == TENSORS:
            return write_all(self._tensors, parts)
        descriptor = create(self.path / name)
        try:
            return write_all(descriptor, parts)
        finally:
            os.close(descriptor)

    def look(self, indices: Collection[int], count: int) -> dict[int, FileSum | None]:
        """Return, of these shares, those that exist, with what their nodes report; None if a report is invalid."""
        # A network file system's client may cache for long that a name was absent, unless it has changed the
        # directory itself in the meantime.
        mark = self.path.with_name(f"{REMOVING}{new_nonce()}")  # prune removes it if this process dies here
        with suppress(OSError):
            mark.mkdir()
            mark.rmdir()
        places = {index: self._share(index, count) for index in indices}
        return {index: _reported(place) for index, place in places.items() if place.exists()}

    def take(self, index: int, count: int, size: int) -> bool:
        """Move a share into this draft, if it exists with its size."""
        share, file = self._share(index, count), self.path / share_file(index, count)
        try:
            os.rename(share / TENSORS, file)
        except OSError:
            return False  # it was removed, or belongs to another user
        try:
            whole = _size(file) == size
        except MalformedError:
            whole = False
        if not whole:
            os.unlink(file)
        bury(share)
        return whole

    def replacement(self, index: int, count: int) -> str:
        """Return the name of the file that is written in place of a share of another node."""
        return share_file(index, count)

    def finish(self, manifest: bytes) -> None:
        """Write the manifest."""
        self.write(MANIFEST, [manifest])
        # The rename must not reach the disk before the file names in the directory.
        sync_directory(self.path)

    def publish(self) -> Path:
        """Make the checkpoint appear, and return its path."""
        self.rename(self.name)
        sync_directory(self.path.parent)
        return self.final

    @property
    def final(self) -> Path:
        """Where the checkpoint appears."""
        return self.path.parent / self.name

    def rename(self, name: str) -> None:
        """Give the draft's directory its final name."""
        os.rename(self.path, self.path.parent / name)
        self.published = True

    def _share(self, index: int, count: int) -> Path:
        return self.path.parent / share_directory(self.name, index, count)


def _size(file: Path) -> int:
    with open_regular(file) as descriptor:
        return os.fstat(descriptor).st_size


def _reported(share: Path) -> FileSum | None:
    try:
        return parse_sum(read_in_parts(share / _SUM, MAX_SUM_BYTES))
    except (OSError, MalformedError):
        return None


def remove_abandoned(directory: Path) -> None:
    """Remove the remains of dead writers and sweepers, and nothing of running ones.

    On a file system without locks, drafts are kept, since it is unknown whether their writers are running.
    """
    with os.scandir(directory) as entries:
        found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    for entry in found:
        if entry.name.startswith(REMOVING):
            remove_tree(Path(entry.path))
        elif entry.name.startswith(WRITING):
            _remove_if_abandoned(Path(entry.path))


def bury(path: Path) -> None:
    """Remove a directory, which need not exist, so that it never appears half-removed under its own name."""
    grave = path.with_name(f"{REMOVING}{new_nonce()}")
    with suppress(FileNotFoundError):
        os.rename(path, grave)
        remove_tree(grave)


def _make(directory: Path) -> tuple[Path, str, int]:
    """Make a draft; return its path, its nonce, and the descriptor of its tensor file, which is locked."""
    for _ in range(_ATTEMPTS):
        nonce = new_nonce()
        path = directory / f"{WRITING}{nonce}"
        os.mkdir(path)
        try:
            tensors = create(path / TENSORS)
        except FileNotFoundError:
            continue
        except OSError:
            with suppress(OSError):
                os.rmdir(path)
            raise
        try:
            if _lock(tensors) is not False and os.fstat(tensors).st_nlink:
                return path, nonce, tensors
        except OSError:
            os.close(tensors)
            with suppress(OSError):
                bury(path)
            raise
        os.close(tensors)
    raise OSError(errno.EBUSY, "other processes keep removing new directories", os.fspath(directory))


def _lock(descriptor: int) -> bool | None:
    """Return whether this descriptor now holds the lock; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _remove_if_abandoned(path: Path) -> None:
    others = chain(path.glob(DATA), path.glob(f"{_FIRST_SHARE}*"))
    locked = path / TENSORS if (path / TENSORS).exists() else next(others, path / TENSORS)
    try:
        descriptor = os.open(locked, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        # The writer is between its first two calls, or died there; if it is running, it starts again.
        with suppress(OSError):
            os.rmdir(path)
        return
    except OSError:
        # A link, or another user's file: its writer is unknown.
        return
    try:
        if _lock(descriptor):
            bury(path)
    finally:
        os.close(descriptor)
