"""Finds ranks that are slower than the others: in a step they all wait for the slowest one.

Each rank measures its own time in a step: waiting for data, and everything else but the exchange with other ranks.
From time to time the ranks exchange these, so that the first one can report who is slow, and in what.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_launch.system.host_load import overloaded
from elastic_launch.training.live.waits import on_host

SLOW = 1.5
"""A rank is slow if a micro-batch takes it this many times the median of the other ranks."""

NOTABLE = 0.001
"""Seconds that each micro-batch must take longer than that at least."""

FIRST_WINDOW = 20
"""Steps of the first window."""

WINDOW_S, LONGEST_WINDOW = 5.0, 10_000
"""Seconds that a later window lasts, and its maximum number of steps."""

WINDOWS = 3
"""Consecutive windows in which a rank must be slow: a single pause may be in two of them."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    phase: str  # what it needs more time for: ``data``, or ``compute`` for everything else
    ratio: float  # its time divided by the median of the other ranks
    load: float = 0.0  # load average of its host in the last minute, per CPU
    pressure: float | None = None  # share of the last 10 s in which tasks of its host waited for a CPU, if it is known


def slow_ranks(times: Sequence[tuple[float, float]]) -> list[Straggler]:
    """Return the ranks that are slow.

    Args:
        times: for each rank, seconds per micro-batch of waiting for data, and of everything else; NaN if it has none.
    """
    busy = {rank: time for rank, time in enumerate(times) if not math.isnan(sum(time))}
    found = []
    for rank, mine in busy.items() if len(busy) > 1 else ():
        others = [time for other, time in busy.items() if other != rank]
        usual = statistics.median(map(sum, others))
        if sum(mine) > SLOW * usual and sum(mine) - usual > NOTABLE:
            more = [mine[phase] - statistics.median(time[phase] for time in others) for phase in (0, 1)]
            found.append(Straggler(rank, "data" if more[0] > more[1] else "compute", round(sum(mine) / usual, 2)))
    return found


def comparable(slow: Sequence[Straggler], pressed: Sequence[bool]) -> list[Straggler]:
    """Return the slow ranks of which a window says something.

    Ranks that compete for CPUs get them in turn, so any of them may be slow in a window. But if only a few hosts are
    overloaded, this is why their ranks are slow.

    Args:
        pressed: for each rank, whether its host is overloaded.
    """
    most = 2 * sum(pressed) > len(pressed)
    return [found for found in slow if not (most and pressed[found.rank])]


class Persistence:
    """Finds the ranks that remain slow."""

    def __init__(self) -> None:
        self._windows: dict[int, int] = {}  # consecutive windows in which a rank was slow

    def add(self, slow: Sequence[Straggler]) -> list[Straggler]:
        """Add a window; return the ranks that have now been slow in :data:`WINDOWS` windows, each of them once."""
        self._windows = {found.rank: self._windows.get(found.rank, 0) + 1 for found in slow}
        return [found for found in slow if self._windows[found.rank] == WINDOWS]


class Pace:
    """Compares the ranks of one round.

    Args:
        on_host: whether the host's clock shows what a step takes; on a device that computes by itself, only the wait
            for data is compared.
        report: called on rank 0 for each rank that remains slow.
    """

    def __init__(
        self, rank: int, world_size: int, step: int, *, on_host: bool, report: Callable[[Straggler], None]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._on_host = on_host
        self._report = report
        self._next = step + FIRST_WINDOW
        self._began = step
        self._wall = self._data = self._compute = 0.0
        self._count = 0
        self._persistence = Persistence()

    def add(self, wall: float, data: float, exchange: float, micro_batches: int) -> None:
        """Count a step.

        Args:
            wall, data, exchange: seconds of the whole step, of waiting for data, and of the exchange with other ranks.
        """
        self._wall += wall
        self._data += data
        self._compute += max(0.0, wall - data - exchange)
        self._count += micro_batches

    def compare(self, step: int) -> None:
        """Compare the ranks if a window ends with this step; called by all ranks."""
        if step < self._next or self._world_size == 1:
            return
        count = self._count or math.nan
        compute = self._compute / count if self._on_host else 0.0 * count
        mine = [self._data / count, compute, self._wall, _load(), _pressure()]
        table = torch.zeros(self._world_size, len(mine), dtype=torch.float64, device="cpu")
        table[self._rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")
        on_host(dist.all_reduce, table)
        rows = table.tolist()
        # The same on all ranks, as the next window must be.
        each = max(float(table[:, 2].max()) / max(1, step - self._began), 1e-9)
        self._began, self._next = step, step + min(max(FIRST_WINDOW, math.ceil(WINDOW_S / each)), LONGEST_WINDOW)
        self._wall = self._data = self._compute = 0.0
        self._count = 0
        hosts = [(load, None if pressure < 0 else pressure) for *_, load, pressure in rows]
        slow = comparable(slow_ranks([(data, compute) for data, compute, *_ in rows]), [overloaded(*x) for x in hosts])
        for found in self._persistence.add(slow):
            if self._rank == 0:
                load, pressure = hosts[found.rank]
                pressure = None if pressure is None else round(pressure, 2)
                self._report(replace(found, load=round(load, 2), pressure=pressure))


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _pressure(file: Path = Path("/proc/pressure/cpu")) -> float:
    """Return what the kernel says of that (https://docs.kernel.org/accounting/psi.html); -1 if it does not count it."""
    try:
        found = re.match(r"some avg10=([0-9.]+)", file.read_text())
        return float(found[1]) / 100 if found else -1.0
    except (OSError, ValueError):
        return -1.0
