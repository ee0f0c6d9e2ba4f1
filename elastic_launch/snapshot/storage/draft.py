"""Directories that become checkpoints, and what dead writers leave.

A writer holds a lock (flock) on the tensor file of its ``.writing-`` directory until the directory has its final name.
The kernel, or the server of a network file system, drops the lock when the writer dies, and no process id has to mean
anything on another host. Whoever gets the lock may therefore remove the directory. It can come between a writer's
making its directory and its locking the file: then the writer finds the file locked, or gone, and starts again. A
writer may rename the file to a share's; the lock goes with it.
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

__all__ = ["Draft", "bury", "draft", "remove_abandoned", "remove_shares"]

_ATTEMPTS = 10  # A sweeper has to come at one moment each time.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Draft:
    """A directory that is being filled.

    Attributes:
        tensors: descriptor of its tensor file, empty, open for writing, locked.
    """

    path: Path
    nonce: str
    tensors: int


@contextmanager
def draft(directory: Path) -> Iterator[Draft]:
    """Make a draft; it is removed if an exception comes before it was renamed.

    Raises:
        OSError: if the directory cannot be written.
    """
    made = _make(directory)
    try:
        yield made
    except BaseException:
        # The lock is still held: nobody else removes it at the same time.
        with suppress(OSError):
            bury(made.path)
        raise
    finally:
        os.close(made.tensors)


def remove_abandoned(directory: Path) -> None:
    """Remove what writers and sweepers that died have left, and nothing of those that live.

    Where the file system has no locks, nothing can be known about a draft and it stays.

    Raises:
        OSError: if something cannot be removed.
    """
    with os.scandir(directory) as entries:
        found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    for entry in found:
        if entry.name.startswith(REMOVING):
            remove_tree(Path(entry.path))
        elif entry.name.startswith(WRITING):
            _remove_if_abandoned(Path(entry.path))


def remove_shares(directory: Path, newest: tuple[int, int]) -> None:
    """Remove shares that wait for a checkpoint no newer than a complete one: nobody takes them any more.

    If somebody did, he would have to write them himself, and no more.

    Args:
        newest: round and step of the newest complete checkpoint.

    Raises:
        OSError: if something cannot be removed.
    """
    for name in os.listdir(directory):
        step, round = parse_share(name) or (0, 0)
        if parse_share(name) is not None and (round, step) <= newest:
            bury(directory / name)


def bury(path: Path) -> None:
    """Remove a directory so that half of it is never seen under its own name; it need not be there.

    Raises:
        OSError: if it cannot be removed.
    """
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
    """Return whether this descriptor now holds the lock; None where there are no locks."""
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
    """Return the file of a draft that its writer has locked, whether it is there or not."""
    shares = path.glob("tensors-00001-of-*.safetensors")
    return path / TENSORS if (path / TENSORS).exists() else next(shares, path / TENSORS)


def _remove_if_abandoned(path: Path) -> None:
    try:
        descriptor = os.open(_locked(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        # The writer is, or died, between its first two calls; if it lives, it starts again.
        with suppress(OSError):
            os.rmdir(path)
        return
    except OSError:
        # A link, or another user's: whose it is cannot be known.
        return
    try:
        if _lock(descriptor):
            bury(path)
    finally:
        os.close(descriptor)
