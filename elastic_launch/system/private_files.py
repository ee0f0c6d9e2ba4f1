"""Directories and files that other users of the host can neither read nor have prepared.

In a world-writable directory such as /tmp, any user can create a name before this process does: as a directory of
theirs, or as a symbolic link to another user's file. Existing files and directories are checked before use; new ones
are accessible only to this user, whatever the umask.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def make_private(path: Path) -> None:
    """Create a directory and its missing parents, with mode 0700; an existing directory is left unchanged.

    Raises:
        OSError: if that fails.
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
    """Open a file as :func:`os.open` does; a file that this creates has mode 0600. Symbolic links are not followed.

    Raises:
        OSError: if that fails.
    """
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def read_bounded(path: Path | str, limit: int) -> bytes:
    """Return the content of a file, which may be a pipe or a device.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it has more than ``limit`` bytes.
    """
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it holds more than {limit} bytes")
    return data


def read_small(path: Path, limit: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a regular file, or has more than ``limit`` bytes.
    """
    # Opening a pipe may block forever, and a terminal may become that of this process.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if found.st_size > limit:
            raise ValueError(f"{path} holds more than {limit} bytes")
        return file.read(found.st_size)


def untrusted(path: Path, *, exclusive: bool) -> str:
    """Return why another user may control what is at a path, or an empty string if none may. The path need not exist.

    Args:
        exclusive: whether a directory there must also be writable only by this user (or root), and not be a link.
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
    """Whether something belongs to this user or root."""
    if found.st_uid in (0, os.geteuid()):
        return True
    # NFS may map root to another user (root_squash): a file created there shows which.
    import tempfile

    with contextlib.suppress(OSError):
        made = tempfile.mkdtemp(prefix=".elastic-launch-", dir=path if stat.S_ISDIR(found.st_mode) else path.parent)
        try:
            return os.lstat(made).st_uid == found.st_uid
        finally:
            os.rmdir(made)
    return False
