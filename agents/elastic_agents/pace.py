"""How long a step takes: what decides whether there is time for a drain."""

from __future__ import annotations

import statistics
import threading
from collections import deque

__all__ = ["Pace"]

STEPS = 2
"""Steps that may pass until all ranks have stopped: the one in which they are asked, and the one after it."""


class Pace:
    """Learns from the workers' steps; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._step = 0
        self._at = 0.0
        self._steps: deque[float] = deque(maxlen=20)
        self._saving = 0.0

    def begin(self, round_number: int, step: int, now: float) -> None:
        """A worker begins to train with so many steps done."""
        with self._lock:
            if round_number > self._round:
                self._round, self._step, self._at = round_number, step, now

    def step(self, round_number: int, step: int, now: float) -> None:
        """A worker has done its step; the first to say so counts."""
        with self._lock:
            if round_number == self._round and step > self._step:
                self._steps.append((now - self._at) / (step - self._step))
                self._step, self._at = step, now

    def saved(self, seconds: float) -> None:
        """Saving took a worker so long."""
        with self._lock:
            self._saving = seconds

    @property
    def reached(self) -> tuple[int, int]:
        """The last round in which a worker began to train, and the optimizer steps done in all; 0 before."""
        with self._lock:
            return self._round, self._step

    @property
    def done(self) -> int:
        """Optimizer steps done."""
        with self._lock:
            return self._step

    def drain_seconds(self) -> float:
        """Seconds that a drain takes at least, as far as is known: two steps, and saving."""
        with self._lock:
            return STEPS * (statistics.median(self._steps) if self._steps else 0.0) + self._saving
