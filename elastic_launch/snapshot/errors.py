"""Exceptions of reading and writing checkpoints.

::

    CheckpointError                    1
    ├── UnsupportedStateError              the state has a value that the format cannot hold
    ├── TornSnapshotError                  the state changed while it was being copied into memory
    ├── NotCommittedError                  the writer may no longer be a member of the run
    ├── CheckpointWriteError               the directory is read-only, full or not a directory
    │   └── TakenError                         another run writes there
    └── CheckpointReadError                it exists but cannot be read, or the storage does not respond
        ├── DamagedCheckpointError             half-written, truncated or altered
        ├── ForeignCheckpointError             another format, or another version of this one
        └── CheckpointGoneError                removed while it was being read
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from elastic_launch.errors import ElasticLaunchError
from elastic_launch.snapshot.location import Place, Url

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_DIRECTORY = {errno.ENOTDIR, errno.EEXIST}


class MalformedError(Exception):
    """Internal: content that this package did not write. The message says what is wrong; the caller adds the file."""


class UnknownFormatError(MalformedError):
    """Internal: content of another format, or of another version of this one."""


class CheckpointError(ElasticLaunchError):
    """A checkpoint could not be written or read."""


class NotCommittedError(CheckpointError):
    """A checkpoint was written but not committed, because its node may no longer be a member of the run, or the state
    was dropped meanwhile."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"The checkpoint of step {step} was not committed: this node is no longer a member of the run or is cut "
            "off from it, its agent does not answer, or the state has been dropped.",
        )


class UnsupportedStateError(CheckpointError):
    """The state has a value that the format cannot hold; the message names its type and its place in the state."""

    final = True


class TornSnapshotError(CheckpointError):
    """A state changed while it was being copied into memory, and the copy was given up."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written, or old ones could not be removed; the message has the path and the cause."""


class TakenError(CheckpointWriteError):
    """Another run has taken the directory in the meantime; retrying does not help."""


class CheckpointReadError(CheckpointError):
    """A checkpoint, or the location of checkpoints, in ``path`` exists but cannot be read."""

    def __init__(self, path: Place, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.path = path


class DamagedCheckpointError(CheckpointReadError):
    """A checkpoint differs from what its writer wrote: it is half-written, truncated or altered."""

    def __init__(self, path: Place, found: str) -> None:
        super().__init__(
            path,
            f"The checkpoint {path} is damaged: {found}.",
            "Use an older one. Remove this directory if nothing is still copying into it.",
        )


class ForeignCheckpointError(CheckpointReadError):
    """A directory has a format that this version cannot read."""

    def __init__(self, path: Place, found: str) -> None:
        super().__init__(
            path,
            f"The checkpoint {path} cannot be read: {found}.",
            "Use the version of elastic-launch that wrote it, or another checkpoint directory.",
        )


class CheckpointGoneError(CheckpointReadError):
    """A checkpoint was removed, for example by a pruning writer, while it was being read."""

    def __init__(self, path: Place) -> None:
        super().__init__(
            path, f"The checkpoint {path} was removed before it was read.", "Look for the newest checkpoint again."
        )


def writing(where: Place, what: str) -> AbstractContextManager[None]:
    """Turn an error of the file system, or of a URL's driver, into one that says what could not be done and why.

    Args:
        what: completes "Could not ...", for example "write a checkpoint in".

    Raises:
        CheckpointWriteError: for an OSError; behind a URL for any error, since each driver has its own.
    """
    return _explained(where, what, CheckpointWriteError)


def reading(where: Place, what: str = "read") -> AbstractContextManager[None]:
    """Turn an error into a CheckpointReadError, like :func:`writing`."""
    return _explained(where, what, partial(CheckpointReadError, where))


@contextmanager
def _explained(where: Place, what: str, explained: Callable[[str, str], CheckpointError]) -> Iterator[None]:
    try:
        yield
    except (ElasticLaunchError, MalformedError):
        raise
    except Exception as error:
        if isinstance(where, Url):
            text = " ".join(str(error).split()).rstrip(".") or "no details"
            cause, hint = f"{type(error).__name__}: {text}", _hint_of_driver(error)
        elif isinstance(error, OSError):
            cause = os.strerror(error.errno) if error.errno else str(error)
            cause += f" ({error.filename})" if error.filename else ""
            hint = _hint(error)
        else:
            raise
        raise explained(f"Could not {what} {where}: {cause}.", hint) from error


def _hint(error: OSError) -> str:
    if error.errno in _NO_ROOM:
        return "Free space there, keep fewer checkpoints, or choose another checkpoint directory."
    if error.errno in _NOT_ALLOWED:
        return "Choose a checkpoint directory that this user can read and write."
    if error.errno in _NO_DIRECTORY:
        return "Choose a path that is a directory, or that can become one."
    return "Check the file system that holds it."


def _hint_of_driver(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "Free space there, or where temporary files are: TMPDIR names another place for these."
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return "Check the credentials, and what they allow: to list, read, write and delete."
    if isinstance(error, FileNotFoundError):
        return "Check the URL: the bucket must exist, since none is ever created."
    return "Check that this host reaches the storage."
