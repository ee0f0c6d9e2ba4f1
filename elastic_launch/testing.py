"""Fakes for tests of this project and of code that uses it."""

from __future__ import annotations

import threading

from elastic_launch.clock import Clock
from elastic_launch.rendezvous.stores.control_store import ControlStore

__all__ = ["FakeClock", "MemoryStore"]


class FakeClock(Clock):
    """A clock that only moves when advanced."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Let seconds pass, and return the new time.

        Raises:
            ValueError: if ``seconds`` is negative, since a monotonic clock never decreases.
        """
        if seconds < 0:
            raise ValueError(f"A monotonic clock cannot be advanced by {seconds:g} s.")
        self._now += seconds
        return self._now


class MemoryStore(ControlStore):
    """A control store in this process's memory. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: bytes | None = None

    def load(self, timeout: float) -> bytes | None:
        return self._value

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        with self._lock:
            if self._value != expected:
                return False
            self._value = value
            return True

    def close(self) -> None:
        return
