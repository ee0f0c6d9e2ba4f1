"""Limits of time that do not count the time in which those who are waited for could not run.

On a host whose CPUs have too much to do, a process takes seconds for what needs a tenth of one. It is slow, but it
does not hang. Linux counts for each thread how long it was ready to run and waited for a CPU
(https://docs.kernel.org/scheduler/sched-stats.html).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOK = 0.5
"""Most seconds between two looks at an allowance. A longer time counts as twice as much: this process did not run."""

LEAST = 0.02
"""Seconds before which another look reads nothing."""

MOST = 5.0
"""How many times as long as its seconds an allowance lasts at most, unless its user says otherwise."""


class Allowance:
    """The seconds that processes of this host have for something.

    Args:
        pids: those processes. What their threads wait for CPUs does not count; the kernel tells it at each wait's end.
        most: seconds after which it is over in any case, as far as this process ran; None: :data:`MOST` times as many.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        *pids: int,
        most: float | None = None,
        now: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self._seconds, self._most = seconds, MOST * seconds if most is None else most
        self._pids, self._now, self._proc = pids, now, proc
        self._looked, self._before = now(), self._waits()
        self._passed = self._waited = 0.0

    def left(self) -> float:
        """Return the seconds that are left; 0 or less once it is over. Call it every :data:`LOOK` seconds."""
        now = self._now()
        if (gap := now - self._looked) >= LEAST:
            before, self._before, self._looked = self._before, self._waits(), now
            waited = sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in self._before.items())
            self._passed += min(gap, 2 * LOOK)
            self._waited = min(self._waited + waited, self._passed)
        return min(self._seconds + self._waited, self._most) - self._passed

    def _waits(self) -> dict[str, float]:
        """Return for how long each thread has waited for a CPU so far; nothing where the kernel does not count it."""
        found = {}
        for pid in set(self._pids):
            with suppress(OSError):  # it has ended
                for thread in os.listdir(self._proc / str(pid) / "task"):
                    with suppress(OSError, IndexError, ValueError):
                        text = (self._proc / str(pid) / "task" / thread / "schedstat").read_text()
                        found[thread] = int(text.split()[1]) / 1e9
        return found
