"""Fakes for tests: of this project, and of code that is built on it."""

from __future__ import annotations

import threading

from elastic_launch.clock import Clock
from elastic_launch.errors import StoreError
from elastic_launch.rendezvous.store import ControlStore

__all__ = ["FakeClock", "MemoryStore"]


class FakeClock(Clock):
    """A clock that stands still until it is advanced.

    Args:
        start: what it shows at first.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Let seconds pass, and return the new time.

        Raises:
            ValueError: if seconds is negative: a monotonic clock never falls.
        """
        if seconds < 0:
            raise ValueError(f"A monotonic clock cannot be advanced by {seconds:g} s.")
        self._now += seconds
        return self._now


class MemoryStore(ControlStore):
    """A control store in this process' memory, for any number of threads.

    Waiting is done in real time, on a condition variable: a change ends it at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: bytes | None = None
        self._closed = False

    def load(self, timeout: float) -> bytes | None:
        with self._changed:
            self._check_open()
            return self._value

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        with self._changed:
            self._check_open()
            if self._value != expected:
                return False
            self._value = value
            self._changed.notify_all()
            return True

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._value != known, timeout)
            self._check_open()
            return self._value

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The store in memory is closed.")
