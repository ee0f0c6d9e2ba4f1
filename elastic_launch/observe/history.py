"""How a run's figures went over time, in bounded memory."""

from __future__ import annotations

import threading
from typing import NamedTuple

from elastic_launch.clock import Clock
from elastic_launch.observe.present import Present

MOST = 240
"""Samples that are kept: once there are more, every second one is dropped, and half as many are added from then on."""


class Sample(NamedTuple):
    """A moment after a step, by the host's clock; ``step_s`` is the mean of the steps since the sample before."""

    at: float
    step_s: float
    loss: float | None
    lr: float | None


class History:
    """Keeps how a node was at moments in which steps had been done. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._trained, self._trained_s = 0, 0.0
        self._every = 0.0

    def add(self, present: Present) -> None:
        """Add how the node is now."""
        with self._lock:
            now, steps, before = self._clock.now(), present.trained - self._trained, self._trained_s
            if steps <= 0 or (self._samples and now - self._samples[-1].at < self._every):
                return
            self._trained, self._trained_s = present.trained, present.trained_s
            taken = present.trained_s - before
            self._samples.append(Sample(now, taken / steps, present.loss, present.lr))
            if len(self._samples) > MOST:
                self._samples = self._samples[::-2][::-1]
                self._every = 2 * (now - self._samples[0].at) / MOST

    def samples(self) -> tuple[Sample, ...]:
        """Return what is kept, the oldest first."""
        with self._lock:
            return tuple(self._samples)
