"""Drafts: directories that become checkpoints. Also removes the remains of dead writers.

A writer holds a lock (flock) on the tensor file of its ``.writing-`` directory until the directory has its final name.
The kernel, or the server of a network file system, releases the lock when the writer dies, so no process id needs a
meaning on another host. A process that gets the lock may therefore remove the directory. It may get it after a writer
has made its directory and before that writer has locked the file: the writer then finds the file locked, or gone, and
starts again. A writer may rename the file to the name of a share; the lock stays with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_launch.snapshot.format.files import create, remove_tree
from elastic_launch.snapshot.format.manifest import REMOVING, TENSORS, WRITING, new_nonce, parse_share

_ATTEMPTS = 10
"""Maximum number of attempts. An attempt fails only if a sweeper comes between the writer's first two calls."""

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint directory that is being written."""

    path: Path
    nonce: str
    tensors: int  # descriptor of its tensor file, empty, open for writing, locked


@contextmanager
def draft(directory: Path) -> Iterator[Draft]:
    """Make a draft; it is removed if an exception is raised before it is renamed."""
    made = _make(directory)
    try:
        yield made
    except BaseException:
        # The lock is still held, so no other process removes it at the same time.
        with suppress(OSError):
            bury(made.path)
        raise
    finally:
        os.close(made.tensors)


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


def remove_shares(directory: Path, newest: tuple[int, int]) -> None:
    """Remove shares of checkpoints that are not newer than the newest complete one; they are not needed any more.

    If a committer does need one, it only has to write that share itself.

    Args:
        newest: round and step of the newest complete checkpoint.
    """
    for name in os.listdir(directory):
        step, round = parse_share(name) or (0, 0)
        if parse_share(name) is not None and (round, step) <= newest:
            bury(directory / name)


def bury(path: Path) -> None:
    """Remove a directory, which need not exist, so that it never appears half-removed under its own name."""
    grave = path.with_name(f"{REMOVING}{new_nonce()}")
    with suppress(FileNotFoundError):
        os.rename(path, grave)
        remove_tree(grave)


def _make(directory: Path) -> Draft:
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
                return Draft(path, nonce, tensors)
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


def _locked(path: Path) -> Path:
    """Return the path of the file that a draft's writer locks; it may not exist."""
    shares = path.glob("tensors-00001-of-*.safetensors")
    return path / TENSORS if (path / TENSORS).exists() else next(shares, path / TENSORS)


def _remove_if_abandoned(path: Path) -> None:
    try:
        descriptor = os.open(_locked(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
