"""File descriptors: raises this process's limit, keeps a reserve, and starts processes with the original limit.

It also tells which errors mean that a limit on descriptors, processes or threads is reached.

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

from elastic_launch.errors import ElasticLaunchError

_log = logging.getLogger(__name__)

RESERVE = 32
"""Descriptors that are kept in reserve for when there are no others; a sixteenth of all if there are few."""

FEWEST = 64
"""Descriptors that an agent with two workers needs; each further worker needs a few more."""

_MORE_FILES = "Raise the limit of open files (ulimit -Hn) to 1024 or more."

MARGIN = 128
"""Descriptors that other threads may open while a process is started with the original limit."""

PAUSE = 0.5
"""Seconds between retries of an operation that lacked a descriptor."""

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_lock = threading.Lock()
_given: tuple[int, int] | None = None
_held: list[int] = []
_told = False


def raise_limit(nodes: int = 1) -> None:
    """Raise the limit to what this user may have.

    Args:
        nodes: most nodes that the run may have, if this agent may lead it: a leader has a connection to each of them.

    Raises:
        ElasticLaunchError: if that is not enough for an agent, which would wait for descriptors forever.
    """
    global _given
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST:
        raise ElasticLaunchError(
            f"This agent may open {hard} files (ulimit -Hn); one with few workers needs {FEWEST}.", _MORE_FILES
        )
    if hard != resource.RLIM_INFINITY and hard < (needed := FEWEST + nodes) and nodes > 1:
        raise ElasticLaunchError(
            f"This agent may open {hard} files (ulimit -Hn); to lead a run of up to {nodes} nodes it needs {needed}.",
            f"Raise the limit of open files (ulimit -Hn) to {needed} or more, or give a smaller maximum to --nnodes.",
        )
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
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        while len(_held) < (RESERVE if soft == resource.RLIM_INFINITY else min(RESERVE, soft // 16)):
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


def lacks_processes(error: Exception) -> bool:
    """Whether a process or thread could not be started for want of one: then a retry may succeed later."""
    if isinstance(error, RuntimeError):
        return str(error) == "can't start new thread"
    return isinstance(error, OSError) and error.errno == errno.EAGAIN


def process_limit() -> str:
    """Say that no process or thread can be started, and which limits may be the reason."""
    if (memory := _memory_limit()) is None:
        return "the limit on processes and threads is reached (ulimit -u, or pids.max of a container or service)"
    return (
        f"the limit on memory (ulimit -v, which is {memory}), or that on processes and threads (ulimit -u, or pids.max "
        "of a container or service), is reached"
    )


def explained(error: Exception) -> str:
    """Return an error's text, with the limit that may be the reason."""
    if lacks_processes(error):
        return f"{error}: {process_limit()}"
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return f"{error}: the limit of open files is reached (ulimit -Hn)" if files else str(error)


def _memory_limit() -> int | None:
    """Return the limit on the address space of a process in KiB, as ``ulimit -v`` has it; None if there is none."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft // 1024


def remedy(error: Exception) -> str:
    """Return what to do about an error that means that a limit of this process is reached; "" for other errors."""
    if lacks_processes(error):
        return "Raise it. An agent has about 20 processes and threads, each worker about 10, without loader processes."
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return _MORE_FILES
    # A library that cannot be mapped may also be damaged, or on a file system whose programs may not be executed.
    unmapped = isinstance(error, ImportError | OSError) and "failed to map" in str(error)
    if (isinstance(error, MemoryError) or unmapped) and (memory := _memory_limit()) is not None:
        return f"Raise the limit on memory (ulimit -v, which is {memory}): torch alone maps several GiB."
    return ""


@contextlib.contextmanager
def shortage_told() -> Iterator[None]:
    """Raise an error with a remedy in place of one which says that a limit is reached.

    Raises:
        ElasticLaunchError: if one is.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        if not (hint := remedy(error)):
            raise
        if lacks_processes(error):
            message = f"This agent cannot start what it needs: {process_limit()}."
        elif isinstance(error, OSError):
            message = f"This agent cannot open what it needs: {error}."
        else:
            message = f"This agent cannot load what it needs: {str(error) or 'out of memory'}."
        raise ElasticLaunchError(message, hint) from error


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
