"""Time as a dependency, so that tests inject it instead of sleeping."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock of one host. Its values are never compared with those of other hosts."""

    def now(self) -> float:
        """Return the seconds since an arbitrary time; never decreases."""


class MonotonicClock:
    """The host's monotonic clock, including time for which the host was suspended."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
