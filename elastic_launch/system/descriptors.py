"""File descriptors: as many as this process may have, some in reserve, and the given limit for the processes it starts.

Programs that use select(2) depend on a soft limit of 1024, so only the agent itself raises its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator

__all__ = ["PAUSE", "given_limit", "raise_limit", "release", "reserve", "scarce"]

_log = logging.getLogger(__name__)

RESERVE = 32
"""Descriptors that are held back for when there are no others; a sixteenth of all, where there are few."""

MARGIN = 128
"""Descriptors that other threads may open while a process is started under the given limit."""

PAUSE = 0.5
"""Seconds after which what lacked a descriptor is tried again."""

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_lock = threading.Lock()
_given: tuple[int, int] | None = None
_held: list[int] = []
_told = False


def raise_limit() -> None:
    """Have as many descriptors as this user may."""
    global _given
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # more than the kernel's own bound, fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _given = (soft, hard)


def reserve() -> None:
    """Hold some descriptors back; :func:`scarce` frees them. For when it goes well again, too."""
    global _told
    with contextlib.suppress(OSError):
        while len(_held) < min(RESERVE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16):
            _held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        _told = False


def scarce(error: OSError) -> bool:
    """Whether an error means that there was no descriptor left, or no memory for one: then it may go well later.

    What is held in reserve is free from now on, and it is said once.
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
    """Processes that are started in this context have the limit that this one was started with.

    The limit is the whole process'. So it is lowered only while so few descriptors are in use that nobody notices.
    """
    if _given is None:
        yield
        return
    with _lock:
        probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.close(probe)
        lower = probe + MARGIN < _given[0]  # the lowest numbers are given first
        if lower:
            resource.setrlimit(resource.RLIMIT_NOFILE, _given)
        try:
            yield
        finally:
            if lower:
                resource.setrlimit(resource.RLIMIT_NOFILE, (_given[1], _given[1]))


def release() -> None:
    """Hold nothing back any more."""
    while _held:
        with contextlib.suppress(IndexError):  # another thread was quicker
            os.close(_held.pop())
