"""Decides when the next snapshot in memory is due. Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

SHARE = 0.01
"""Fraction of the training's time that snapshots may cost."""

MEMORY = 5
"""Number of snapshots whose median cost is used, since a single one may be an outlier."""

STEPS = 15
"""Number of steps whose median duration is used."""

SAMPLES = 10
"""Number of comparisons of steps that count; older ones fade."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The duration of one snapshot, in seconds."""

    stall: float  # time that the training waited for it
    beside: float  # time that it took in the background


@dataclass(slots=True)
class _Step:
    took: float
    carries: bool = False  # a snapshot is written during it
    cost: Cost | None = None


class Rhythm:
    """Limits the cost of snapshots to a fraction of the training's time.

    If a snapshot costs c seconds and a step takes t seconds, one is due every ceil(c / (SHARE * t)) steps.

    Writing in the background takes cores and memory bandwidth from the training: it costs its whole duration if these
    are scarce, and nothing if they are not. The actual part is measured on steps during which a snapshot was written,
    each less the mean of its two neighbours. Until there are such steps, the whole duration counts.
    """

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=MEMORY)
        self._besides: deque[float] = deque(maxlen=MEMORY)
        self._part, self._samples = 1.0, 1
        self._steps: deque[float] = deque(maxlen=STEPS)
        self.last = self._before = 0  # steps after which the last two snapshots were taken
        self._at: float | None = None
        self._at_step = 0
        self._now = _Step(0.0)
        self._recent: deque[_Step] = deque(maxlen=3)

    def begin(self, step: int, last: int | None = None) -> None:
        """Begin a training with ``step`` steps done; measured times and costs are kept.

        ``last`` is the step of the last snapshot, if that is not of this one; below 0, one is due at once.
        """
        self._at = None
        self.last = step if last is None else last if last >= 0 else step - self.interval
        self._before = self.last
        self._now = _Step(0.0)
        self._recent.clear()

    def step_done(self, step: int, now: float) -> None:
        """Record that a step is done at time ``now``, in seconds."""
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
        return step - self.last >= self.interval

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
        # At least two, since steps with a snapshot are compared with steps without one.
        return max(2, math.ceil((stall + part * beside) / (SHARE * step)))

    def taken(self, step: int) -> None:
        """Record that a snapshot is taken after a step, and written during the next one."""
        self._before, self.last = self.last, step
        self._now.carries = True

    def undone(self) -> None:
        """Record that the last snapshot failed, so that another one is due."""
        self.last = self._before

    def cost(self, cost: Cost, *, fresh: bool = False) -> None:
        """Record the cost of the last snapshot.

        Args:
            fresh: whether its memory had to be allocated first, which happens once for each slot; such a cost does not
                count unless it is longer than a step.
        """
        if fresh and not 0 < self._step < cost.stall + cost.beside:
            return
        self._stalls.append(cost.stall)
        self._besides.append(cost.beside)
        self._now.cost = cost

    @property
    def _step(self) -> float:
        """Duration of a step in seconds, without work between some steps, such as an evaluation."""
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
            return  # an outlier of unknown cause
        # Steps also differ for other reasons; symmetric bounds let those differences cancel out.
        part = min(2.0, max(-1.0, part))
        self._samples = min(self._samples + 1, SAMPLES)
        self._part += (part - self._part) / self._samples
