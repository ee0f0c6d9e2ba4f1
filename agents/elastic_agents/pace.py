"""How long a step takes: what decides whether there is time for a drain, and when the training will end."""

from __future__ import annotations

import statistics
import threading
from collections import deque

__all__ = ["Pace"]

STEPS = 2
"""Steps that may pass until all ranks have stopped: the one in which they are asked, and the one after it."""

ENOUGH = 3
"""Steps of a round from which the rest is estimated; the median leaves out what is slow about the first."""


class Pace:
    """Learns from the workers' steps; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._step = 0
        self._at = 0.0
        self._steps: deque[float] = deque(maxlen=20)
        self._saving = 0.0
        self._first = 0
        self._total = 0

    def begin(self, round_number: int, step: int, now: float, total: int = 0) -> None:
        """A worker begins to train with so many steps done of so many; 0 if that is not known."""
        with self._lock:
            if round_number > self._round:
                self._round, self._step, self._at = round_number, step, now
                self._first, self._total = step, total

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

    def remaining(self) -> float:
        """Seconds until the training ends at this round's pace; -1 if that is not known."""
        with self._lock:
            done = self._step - self._first
            # Who trains on beyond the total has begun a second training, of which nothing is known.
            if done < ENOUGH or self._step > self._total:
                return -1.0
            mine = list(self._steps)[-done:]
            return (self._total - self._step) * statistics.median(mine)

    def drain_seconds(self) -> float:
        """Seconds that a drain takes at least, as far as is known: two steps, and saving."""
        with self._lock:
            return STEPS * (statistics.median(self._steps) if self._steps else 0.0) + self._saving
