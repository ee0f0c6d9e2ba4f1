"""How long a worker's own start takes, without the time in which it waits for others."""

from __future__ import annotations

import math

UNKNOWN_START = 60.0
"""Seconds that a worker's start is expected to take before one was seen."""


class StartTimer:
    """Learns how long starts take from those that are reported to it.

    Args:
        start_wait: seconds that other workers should wait for a start.
    """

    def __init__(self, start_wait: float = math.inf) -> None:
        self._start_wait = start_wait
        self._ahead: float | None = None
        self._ready: float | None = None
        self._first: float | None = None

    def ready(self, seconds: float) -> None:
        """A worker began to train so long after its start; it may have waited for others."""
        self._ready = seconds if self._ready is None else min(seconds, self._ready)

    def first_step(self, longer: float) -> None:
        """A new worker's first step took so much longer than others, by what a worker that starts ahead does before.

        Others may have taken longer, too.
        """
        self._first = longer if self._first is None else min(longer, self._first)

    def ahead(self, seconds: float) -> None:
        """A worker that was started ahead came to its first use of the world."""
        self._ahead = seconds

    @property
    def seen(self) -> float | None:
        """Seconds that a start takes, as seen so far; None if none was."""
        if self._ahead is not None or self._ready is None:
            return self._ahead
        return self._ready + (self._first or 0.0)

    @property
    def expected(self) -> float:
        """Seconds that the next start is expected to take."""
        return UNKNOWN_START if self.seen is None else self.seen

    @property
    def slow(self) -> bool:
        """Whether the next start is expected to take longer than other workers should wait for it."""
        return self.expected > self._start_wait
