"""File descriptors: raises this process's limit, keeps a reserve, and starts processes with the original limit.

Programs that use select(2) depend on a soft limit of 1024, so only the agent itself raises its own limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator

_log = logging.getLogger(__name__)

RESERVE = 32
"""Descriptors that are kept in reserve for when there are no others; a sixteenth of all if there are few."""

MARGIN = 128
"""Descriptors that other threads may open while a process is started with the original limit."""

PAUSE = 0.5
"""Seconds between retries of an operation that lacked a descriptor."""

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_lock = threading.Lock()
_given: tuple[int, int] | None = None
_held: list[int] = []
_told = False


def raise_limit() -> None:
    """Raise the limit to what this user may have."""
    global _given
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # more than the kernel's own bound, fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _given = (soft, hard)


@contextlib.contextmanager
def standard_numbers_taken() -> Iterator[None]:
    """While entered, no new descriptor gets a number from 0 to 2: a child would take it for a standard stream."""
    with contextlib.ExitStack() as taken:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            taken.callback(os.close, descriptor)
        os.close(descriptor)
        yield


def reserve() -> None:
    """Reserve some descriptors, which :func:`scarce` frees. Also call this once there are enough again."""
    global _told
    with contextlib.suppress(OSError):
        while len(_held) < min(RESERVE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16):
            _held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        _told = False


def ensure_free(count: int) -> None:
    """Check that this many descriptors are free, for code that does not report well that there are none.

    Raises:
        OSError: if there are not.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def scarce(error: OSError) -> bool:
    """Whether an error means that no descriptor, or no memory for one, was left: then a retry may succeed later.

    If so, this frees the reserve, and logs that once.
    """
    global _told
    if error.errno not in _SCARCE:
        return False
    release()
    if not _told:
        _told = True
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        _log.warning("%s; this process may open %d files (ulimit -Hn), and tries again", error, limit)
    return True


@contextlib.contextmanager
def given_limit() -> Iterator[None]:
    """Start processes in this context with the limit that this process was started with.

    The limit applies to the whole process. So it is lowered only while few enough descriptors are in use.
    """
    if _given is None:
        yield
        return
    with _lock:
        probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.close(probe)
        lower = probe + MARGIN < _given[0]  # the lowest numbers are used first
        if lower:
            resource.setrlimit(resource.RLIMIT_NOFILE, _given)
        try:
            yield
        finally:
            if lower:
                resource.setrlimit(resource.RLIMIT_NOFILE, (_given[1], _given[1]))


def release() -> None:
    """Free the reserve."""
    while _held:
        with contextlib.suppress(IndexError):  # another thread was faster
            os.close(_held.pop())
