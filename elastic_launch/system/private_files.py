"""Directories and files that other users of the host cannot read or have prepared.

In a directory that everybody can write to, as /tmp is, any user can make a name before this one does: as a directory of
theirs, or as a symbolic link to a file of somebody else's. What is there already is checked before it is used; what is
made here is for this user alone, whatever the umask.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["make_private", "open_private", "read_small", "untrusted"]


def make_private(path: Path) -> None:
    """Make a directory and its missing parents, with mode 0700; one that is there stays as it is.

    Raises:
        OSError: if that is impossible.
    """
    missing = []
    for each in (path, *path.parents):
        if each.is_dir():
            break
        missing.append(each)
    for each in reversed(missing):
        try:
            each.mkdir(0o700)
        except FileExistsError:
            if not each.is_dir():
                raise


def open_private(path: Path | str, flags: int) -> int:
    """Open a file, as :func:`os.open` does; if it is made by this, its mode is 0600. A symbolic link is not followed.

    Raises:
        OSError: if that is impossible.
    """
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def read_small(path: Path, limit: int) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is something else, or holds more than ``limit`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has an end that may never open
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} holds more than {limit} bytes")
    return data


def untrusted(path: Path, *, exclusive: bool) -> str:
    """Return why another user may control what is at a path, or an empty string. The path need not exist.

    Args:
        exclusive: whether a directory there must also be writable for this user (or root) alone, and no link.
    """
    if exclusive and (found := _lstat(path)) is not None:
        if not stat.S_ISDIR(found.st_mode):
            return f"{path} is not a directory"
        if not _own(path, found):
            return f"{path} belongs to another user (uid {found.st_uid})"
        if found.st_uid != 0 and found.st_mode & 0o022:
            return f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):03o})"
    chain = (path, *path.parents)
    resolved = Path(os.path.realpath(path))
    for each in chain if resolved == path else (*chain, resolved, *resolved.parents):
        parent, found = _lstat(each.parent, follow=True), _lstat(each)
        if parent is None or found is None or not parent.st_mode & stat.S_IWOTH or each.parent == each:
            continue
        if not _own(each, found):
            return f"{each} belongs to another user (uid {found.st_uid}), in a directory that all can write to"
    return ""


def _lstat(path: Path, *, follow: bool = False) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError:
        return None


def _own(path: Path, found: os.stat_result) -> bool:
    """Whether something is this user's, or root's."""
    if found.st_uid in (0, os.geteuid()):
        return True
    # NFS may give root's files to another user (root_squash): what is made there tells.
    import tempfile

    with contextlib.suppress(OSError):
        made = tempfile.mkdtemp(prefix=".elastic-launch-", dir=path if stat.S_ISDIR(found.st_mode) else path.parent)
        try:
            return os.lstat(made).st_uid == found.st_uid
        finally:
            os.rmdir(made)
    return False
