"""When the next snapshot in memory is due. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

__all__ = ["SHARE", "Cost", "Rhythm"]

SHARE = 0.01
"""Share of the training's time that snapshots may cost."""

MEMORY = 5
"""Snapshots by whose median one is judged: what one cost may be an accident."""

STEPS = 15
"""Steps by whose median one is judged."""

SAMPLES = 10
"""Comparisons of steps that count; older ones fade."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one snapshot took, in seconds.

    Attributes:
        stall: while the training waited for it.
        beside: while the training went on.
    """

    stall: float
    beside: float


@dataclass(slots=True)
class _Step:
    took: float
    carries: bool = False  # a snapshot is written during it
    cost: Cost | None = None


class Rhythm:
    """Keeps what snapshots cost to a share of the time in between.

    With a cost of c seconds a snapshot and steps of t seconds, one is due every ceil(c / (SHARE * t)) steps.

    What is written beside the training takes cores and memory bandwidth from it: all of its time where they are
    scarce, none where they are not. Which part it is, is learnt from steps that carried a snapshot, each less the mean
    of the two around it. Until there are such, all counts.
    """

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=MEMORY)
        self._besides: deque[float] = deque(maxlen=MEMORY)
        self._part, self._samples = 1.0, 1
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._last = self._before = 0
        self._at: float | None = None
        self._at_step = 0
        self._now = _Step(0.0)
        self._recent: deque[_Step] = deque(maxlen=3)

    def begin(self, step: int) -> None:
        """A training begins with so many steps done; what was learnt of times and costs stays."""
        self._last, self._at = step, None
        self._before = step
        self._now = _Step(0.0)
        self._recent.clear()

    def step_done(self, step: int, now: float) -> None:
        """A step is done; learns how long steps take."""
        if self._at is not None and step > self._at_step:
            took = (now - self._at) / (step - self._at_step)
            self._steps.append(took)
            self._now.took = took
            self._recent.append(self._now)
            self._compare()
        self._at, self._at_step = now, step
        self._now = _Step(0.0)

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after a step."""
        return step - self._last >= self.interval

    @property
    def interval(self) -> int:
        """Steps between snapshots."""
        step = self._step
        if not step or not self._stalls:
            return 1
        stall, beside = statistics.median(self._stalls), statistics.median(self._besides)
        if stall + beside <= SHARE * step:
            return 1
        part = min(1.0, max(0.0, self._part))
        # Two at least, as steps without a snapshot are what those with one are compared with.
        return max(2, math.ceil((stall + part * beside) / (SHARE * step)))

    @property
    def last(self) -> int:
        """The step after which the last snapshot was taken."""
        return self._last

    def taken(self, step: int) -> None:
        """A snapshot is taken after a step, and written during the next one."""
        self._before, self._last = self._last, step
        self._now.carries = True

    def undone(self) -> None:
        """The last snapshot is none after all: another one is due."""
        self._last = self._before

    def cost(self, cost: Cost, *, fresh: bool = False) -> None:
        """What the last snapshot took.

        Args:
            fresh: whether its memory had to be found first, which happens once for each slot: that does not count,
                unless it took longer than a step does.
        """
        if fresh and not 0 < self._step < cost.stall + cost.beside:
            return
        self._stalls.append(cost.stall)
        self._besides.append(cost.beside)
        self._now.cost = cost

    @property
    def _step(self) -> float:
        """What a step takes, without what comes between some of them, such as an evaluation."""
        return statistics.median(self._steps) if self._steps else 0.0

    def _compare(self) -> None:
        """Learn from three steps in a row, if the one in the middle alone carried a snapshot."""
        if [step.carries for step in self._recent] != [False, True, False]:
            return
        before, step, after = self._recent
        if step.cost is None or step.cost.beside <= 0 or max(before.took, after.took) > 2 * self._step:
            return
        part = (step.took - (before.took + after.took) / 2 - step.cost.stall) / step.cost.beside
        if abs(part - 0.5) > 3:
            return  # whatever that was
        # Steps differ for other reasons, too: as far to both sides, so that these cancel out.
        part = min(2.0, max(-1.0, part))
        self._samples = min(self._samples + 1, SAMPLES)
        self._part += (part - self._part) / self._samples
