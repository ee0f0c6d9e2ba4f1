"""Fakes for tests of this project and of code that uses it."""

from __future__ import annotations

from elastic_launch.clock import Clock
from elastic_launch.rendezvous.stores.control_store import MemoryStore

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
