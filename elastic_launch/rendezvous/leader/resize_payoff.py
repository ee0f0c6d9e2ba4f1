"""Whether a resize pays: nobody should wait for a larger world that comes when the work is almost done.

A round of w workers needs another T seconds. That is T * w seconds of one worker's work; if the speed grows in
proportion to the workers, W of them need T * w / W, so the larger round saves T * (1 - w / W). Against that stands
what a resize costs once: the time from its order until the workers of the new round train. It pays if it saves more
than it costs. Speed that grows less than in proportion saves less: the rule leaves out no resize that would have paid.
"""

from __future__ import annotations

import math

__all__ = ["DEFAULT_COST", "ResizePayoff", "saved"]

DEFAULT_COST = 5.0
"""Seconds that a resize is taken to cost before there was one: processes start, import torch, meet, and restore."""


def saved(remaining: float, workers: int, larger: int) -> float:
    """Return the seconds that a round of ``larger`` workers saves.

    Args:
        remaining: seconds that the present round of ``workers`` still needs.
    """
    return max(0.0, remaining * (1.0 - workers / larger)) if larger > 0 else 0.0


class ResizePayoff:
    """What is known of a round's remaining time and of a resize's cost, by the leader's clock.

    Attributes:
        cost: seconds that the last resize took from its order until all workers trained.
    """

    def __init__(self) -> None:
        self.cost = DEFAULT_COST
        self._ordered_at: float | None = None
        self._ends_at: float | None = None

    def formed(self, resize_at: float | None) -> None:
        """A round was formed; for a resize that was ordered then, if it is one."""
        self._ordered_at, self._ends_at = resize_at, None

    def trains(self, now: float) -> None:
        """All workers of the round train."""
        if self._ordered_at is not None:
            self.cost = now - self._ordered_at
            self._ordered_at = None

    def told(self, remaining: float, now: float) -> None:
        """A member estimates the seconds that the round still needs; below 0, or no number, if it does not know."""
        self._ends_at = now + remaining if math.isfinite(remaining) and remaining >= 0 else None

    def remaining(self, now: float) -> float | None:
        """Seconds that the round still needs; None if nobody knows."""
        return None if self._ends_at is None else max(0.0, self._ends_at - now)

    def pays(self, workers: int, larger: int, now: float) -> bool:
        """Whether a resize from so many workers to so many does; it does as long as nobody knows better."""
        remaining = self.remaining(now)
        return remaining is None or saved(remaining, workers, larger) > self.cost
