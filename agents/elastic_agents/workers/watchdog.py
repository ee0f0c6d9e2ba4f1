"""The watchdog of torch.distributed.elastic.timer: workers set timers, and a worker whose timer expires is ended.

``TORCHELASTIC_ENABLE_FILE_TIMER=1`` in the agent's environment enables it. Workers write their timers to a named pipe,
through torch's ``FileTimerClient``, as JSON lines: ``{"pid", "scope_id", "expiration_time", "signal"}``. The time is by
the host's wall clock; below 0, the timer is released. torch's own ``FileTimerServer`` ends its agent with the worker.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

from elastic_launch.codec import between, decode, loads
from elastic_launch.errors import ProtocolError, UsageError
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.wake import Waker

_log = logging.getLogger("elastic_launch.agent")

ENV_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"

ENV_FILE = "TORCHELASTIC_TIMER_FILE"
"""The variable with the path of the named pipe, in the agent's and the workers' environment."""

MOST_TIMERS = 10_000

LONGEST_NAME = 4096

_NOT_READ = "a timer in {} is not understood, and not set ({}): {!r} (said once)"


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """A process did not release a timer in time.

    Attributes:
        scope: the timer's name.
        number: number of the signal that the process requested; 0 for none.
    """

    pid: int
    scope: str
    number: int


def _short(name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise ValueError("a name of that length")
    return name


def _valid(number: int) -> int:
    if number > 0 and number not in signal.valid_signals():
        raise ValueError("a signal")
    return max(number, 0)


@dataclass(frozen=True, slots=True)
class TimerRequest:
    """A worker's request, which any process may have written.

    Attributes:
        expiration_time: by the wall clock; below 0: the timer is released.
        signal: its number; 0 for none.
    """

    pid: Annotated[int, between(1, 2**31, "a pid")]
    scope_id: Annotated[str, _short]
    expiration_time: Annotated[float, between(-(2**53), 2**53, "a time")]
    signal: Annotated[int, _valid]


class Timers:
    """The active timers, by process and name."""

    def __init__(self) -> None:
        self._set: dict[tuple[int, str], tuple[float, int]] = {}

    def change(self, request: TimerRequest, ahead: float) -> None:
        """Set or release a timer at a worker's request.

        Args:
            ahead: seconds by which the clock used for timers is ahead of the wall clock.
        """
        key = request.pid, request.scope_id
        if request.expiration_time < 0:
            self._set.pop(key, None)
        elif len(self._set) < MOST_TIMERS:
            self._set[key] = (request.expiration_time + ahead, request.signal)

    def expired(self, now: float) -> list[TimerExpired]:
        """Return the processes whose timers have expired, each once, and release those timers.

        If several timers of a process have expired, the first that requests a signal counts.
        """
        due = sorted((expires, key) for key, (expires, _) in self._set.items() if expires <= now)
        found: dict[int, TimerExpired] = {}
        for _, (pid, scope) in due:
            number = self._set.pop((pid, scope))[1]
            if pid not in found or (number and not found[pid].number):
                found[pid] = TimerExpired(pid, scope, number)
        return list(found.values())

    def wait(self, now: float) -> float | None:
        """Seconds until the next timer expires, None if none is set."""
        return max(0.0, min(expires for expires, _ in self._set.values()) - now) if self._set else None


@contextmanager
def watchdog(put: Callable[[TimerExpired], object]) -> Iterator[None]:
    """Watch the workers' timers, if that is enabled, and pass the workers the path of the pipe.

    Args:
        put: called from the watchdog's thread.

    Raises:
        UsageError: if the named pipe cannot be made.
    """
    if os.environ.get(ENV_ENABLE) != "1":
        yield
        return
    given = os.environ.get(ENV_FILE)
    path = given or os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")
    source = _pipe(path)
    os.environ[ENV_FILE] = path
    waker = Waker()
    thread = VitalThread(_watch, "watchdog", (path, source, waker, put))
    thread.start()
    try:
        yield
    finally:
        waker.wake()
        thread.join(10)
        os.close(source)
        waker.close()
        with suppress(OSError):
            os.unlink(path)
        if given is None:
            del os.environ[ENV_FILE]


def _pipe(path: str) -> int:
    """Replace any existing named pipe by a new one, and return a descriptor to read from it."""
    try:
        if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        # Opened for writing, too: otherwise poll() reports a hang-up whenever no worker writes.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"{ENV_FILE}={path}: no named pipe can be made there: {error.strerror}.",
            f"Name another path, or leave {ENV_FILE} unset.",
        ) from None


def _watch(path: str, source: int, waker: Waker, put: Callable[[TimerExpired], object]) -> None:
    timers, pending, told = Timers(), b"", False
    ready = select.poll()
    ready.register(source, select.POLLIN)
    ready.register(waker, select.POLLIN)
    while True:
        wait = timers.wait(time.monotonic())
        found = {descriptor for descriptor, _ in ready.poll(None if wait is None else 1000 * min(wait, 3600.0))}
        if waker.fileno() in found:
            return
        if source in found:
            *lines, pending = (pending + os.read(source, 65536)).split(b"\n")
            for line in lines:
                try:
                    # The wall clock may be set later, so it is read once for each timer.
                    timers.change(decode(TimerRequest, loads(line)), time.monotonic() - time.time())
                except ProtocolError as error:
                    if not told:
                        _log.warning("%s", _NOT_READ.format(path, error, line[:200]))
                    told = True
            pending = pending[:65536]
        for expired in timers.expired(time.monotonic()):
            put(expired)
