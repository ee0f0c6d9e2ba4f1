"""Threads that write without blocking others: a console may have no reader, and a file system may hang.

Data goes into a bounded queue, and a daemon thread writes it. While the other end accepts data, however slowly, nothing
is lost: callers wait for room in the queue. Once the other end has accepted nothing for a while, data that finds the
queue full is dropped and counted, until half of the queue has been written.
"""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from elastic_launch.system.threads import VitalThread

T = TypeVar("T")

Write = Callable[[bytes], object]
"""Writes the data; may block forever. An OSError that it raises is ignored; it must not raise anything else."""

Lost = Callable[[int, float], object]
"""Called with the number of lines dropped, and the seconds for which nothing was accepted."""

OVERHEAD = 128
"""Bytes that an entry of the queue counts in addition to its data."""

IDLE = 2.0
"""Seconds that an exiting process waits for a reader that accepts nothing."""

LONGEST = 60.0
"""Seconds that an exiting process waits for a reader that accepts something now and then."""

_all: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """A thread that makes calls that may hang, in order.

    Args:
        limit: bytes that may be queued before callers that can wait have to. Those that cannot wait may use as many
            again.
        patience: seconds for which a call may make no progress before it counts as stuck.
        lost: called from the thread once there is room again; must not block.
    """

    def __init__(self, name: str, *, limit: int, patience: float, lost: Lost = lambda lines, seconds: None) -> None:
        self.name = name
        self._limit = limit
        self._patience = patience
        self._lost = lost
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._closed = False
        self._hurries = False
        self._queue: deque[tuple[Write, bytes]] = deque()
        self._size = 0  # bytes that are queued or being written
        self._since = 0.0  # when the current call began or last made progress; 0 if there is no call
        self._dropping = False
        self._dropped = 0
        self._dropped_since = 0.0
        self._thread = VitalThread(self._run, name)
        self._thread.start()
        _all.add(self)

    @property
    def stuck(self) -> bool:
        """Whether the current call has made no progress for too long."""
        since = self._since
        return since > 0 and time.monotonic() - since > self._patience

    def put(self, write: Write, data: bytes = b"", *, wait: bool = False) -> bool:
        """Queue data to be written; return whether it was queued.

        Args:
            wait: whether to wait for room while the other end accepts data. If False, this returns at once.
        """
        size = len(data) + OVERHEAD
        with self._lock:
            if wait:
                self._await_room()
            limit = self._limit if wait and not self._hurries else 2 * self._limit
            if self._closed or (self._dropping and wait) or self._size >= limit:
                if not self._dropped:
                    self._dropped_since = self._since or time.monotonic()
                self._dropped += data.count(b"\n")
                return False
            self._queue.append((write, data))
            self._size += size
            self._filled.notify()
        return True

    def ask(self, call: Callable[[], T], timeout: float) -> T:
        """Make a call in the thread, after what is queued, and return its result.

        Raises:
            TimeoutError: if it has not returned after ``timeout`` seconds, and then it does not begin later; at once if
                another call is stuck.
            OSError: whatever the call raises.
        """
        answer: Future[T] = Future()

        def act(data: bytes) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except OSError as error:
                    answer.set_exception(error)

        if not self.stuck and self.put(act) and wait([answer], timeout).done:
            return answer.result(0)
        answer.cancel()
        raise TimeoutError(errno.ETIMEDOUT, "the file system does not answer")

    def progress(self) -> None:
        """Note progress; to be called from within a call when the other end has accepted data."""
        self._since = time.monotonic()

    def hurry(self) -> None:
        """From now on, no caller waits for room: those that would may queue as much as those that cannot wait."""
        with self._lock:
            self._hurries = True
            self._drained.notify_all()

    def flush(self, idle: float = IDLE, longest: float = LONGEST) -> bool:
        """Wait until everything is written; return whether it is.

        Args:
            idle: seconds without progress after which this gives up.
            longest: seconds after which it gives up in any case.
        """
        deadline = time.monotonic() + longest
        with self._lock:
            while self._size:
                now = time.monotonic()
                left = min(deadline, (self._since or now) + idle) - now
                if left <= 0:
                    return False
                self._drained.wait(left)
        return True

    def close(self, idle: float = IDLE, longest: float = LONGEST) -> bool:
        """Accept nothing more, and end the thread once all is written; return whether it is, see :meth:`flush`."""
        done = self.flush(idle, longest)
        with self._lock:
            self._closed = True
            self._filled.notify()
        if done:
            # Nothing is left, unless another thread has put something meanwhile.
            self._thread.join(idle)
        return done and not self._thread.is_alive()

    def _await_room(self) -> None:
        while self._size >= self._limit and not (self._dropping or self._closed or self._hurries):
            left = (self._since or time.monotonic()) + self._patience - time.monotonic()
            if left <= 0:
                self._dropping = True
                return
            self._drained.wait(left)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._filled.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                write, data = self._queue.popleft()
            self._since = time.monotonic()
            with suppress(OSError):  # what a file system refuses ends no thread that others depend on
                write(data)
            self._since = 0.0
            self._done(len(data) + OVERHEAD)

    def _done(self, size: int) -> None:
        with self._lock:
            self._size -= size
            self._drained.notify_all()
            if not self._dropped or self._size > self._limit // 2:
                return
            lines, self._dropped, self._dropping = self._dropped, 0, False
            seconds = time.monotonic() - self._dropped_since
        self._lost(lines, seconds)


def flush_all() -> bool:
    """Flush all writers of this process; return whether everything is written. If not, a thread may hang forever."""
    return min([writer.flush() for writer in list(_all)], default=True)  # unlike all(), flushes each of them
