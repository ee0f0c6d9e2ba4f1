"""Whether a resize pays off: a larger world is not worth waiting for when the work is almost done.

A round of w workers needs another T seconds, which is T * w seconds of one worker's work. If the speed is proportional
to the number of workers, W workers need T * w / W, so the larger round saves T * (1 - w / W). A resize costs, once,
the time from its order until the workers of the new round train. It pays off if it saves more than it costs. If the
speed grows less than proportionally, it saves less: so the rule skips no resize that would have paid off.
"""

from __future__ import annotations

import math

DEFAULT_COST = 5.0
"""Assumed cost of a resize in seconds before the first one: processes start, import torch, meet, and restore."""

DEFAULT_LIVE_COST = 1.0
"""The same if all workers are live: they keep their processes, and new ones have started before."""


def saved(remaining: float, workers: int, larger: int) -> float:
    """Return the seconds that a round of ``larger`` workers saves.

    Args:
        remaining: seconds that the current round of ``workers`` still needs.
    """
    return max(0.0, remaining * (1.0 - workers / larger)) if larger > 0 else 0.0


class ResizePayoff:
    """The known remaining time of a round and cost of a resize, by the leader's clock.

    Attributes:
        live: whether the workers of the last round in which all trained are live.
    """

    def __init__(self) -> None:
        self.live = False
        self._costs = {False: DEFAULT_COST, True: DEFAULT_LIVE_COST}
        self._ordered_at: float | None = None
        self._ends_at: float | None = None

    def formed(self, resize_at: float | None) -> None:
        """Record that a round was formed; ``resize_at`` is when its resize was ordered, if it is the result of one."""
        self._ordered_at, self._ends_at = resize_at, None

    @property
    def cost(self) -> float:
        """Seconds that the last resize of such workers took from its order until all of them trained."""
        return self._costs[self.live]

    def trains(self, now: float, *, live: bool) -> None:
        """Record that all workers of the round train, and whether all of them are live."""
        self.live = live
        if self._ordered_at is not None:
            self._costs[live] = now - self._ordered_at
            self._ordered_at = None

    def told(self, remaining: float | None, now: float) -> None:
        """Record a member's estimate of the seconds that the round still needs; None if it is not known."""
        if remaining is not None and not (math.isfinite(remaining) and remaining >= 0):
            remaining = None  # another node's word
        self._ends_at = None if remaining is None else now + remaining

    def remaining(self, now: float) -> float | None:
        """Seconds that the round still needs; None if unknown."""
        return None if self._ends_at is None else max(0.0, self._ends_at - now)

    def pays(self, workers: int, larger: int, now: float) -> bool:
        """Whether a resize from ``workers`` to ``larger`` workers pays off; True if the remaining time is unknown."""
        remaining = self.remaining(now)
        return remaining is None or saved(remaining, workers, larger) > self.cost
