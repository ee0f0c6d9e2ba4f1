"""How long steps take, for limits and estimates, and how long a worker's own start takes."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable

from elastic_launch.shared_progress import WorkerProgress

STEPS = 2
"""Steps that may pass until all ranks have stopped: the one in which they are asked, and the next."""

ENOUGH = 3
"""Steps of a round after which the rest is estimated; the median excludes slow first steps."""

KEPT = 20
"""Number of recent steps that are kept."""

SUSPENDED_STEPS, SHORTEST_SUSPENSION, LONGEST_SUSPENSION = 3, 2.0, 60.0
"""Time that a worker has to leave a round, in steps; at least and at most so many seconds."""

UNKNOWN_START = 60.0
"""Seconds that a worker's start is expected to take before one was seen."""


class StepTimer:
    """Learns from the workers' steps; used by several threads.

    Args:
        look: returns how far the workers are; called whenever a value is needed.
    """

    def __init__(self, look: Callable[[], WorkerProgress | None] = lambda: None) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._round = self._training = self._step = 0
        self._earlier = 0  # steps of the round's earlier trainings
        self._began = 0  # steps that were done when the round's workers began to train
        self._at = 0.0
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._saving = 0.0
        self._report = 0, 0.0  # the round's first report: steps, and seconds
        self._first = 0
        self._total = 0
        self._trained = (0, 0.0)

    def begin(self, round_number: int, step: int, now: float, total: int = 0, training: int = 0) -> None:
        """A worker begins to train, with so many steps done of a total; 0 if the total is not known.

        ``training``: number of the script's training, from 0.
        """
        self._look_again()
        with self._lock:
            if (round_number, training) <= (self._round, self._training):
                return
            if round_number > self._round:
                self._earlier, self._began = 0, step
            else:
                self._earlier += self._step - self._first
            self._round, self._training, self._step, self._at = round_number, training, step, now
            self._first, self._total = step, total
            self._report = 0, 0.0

    def step(self, round_number: int, step: int, now: float, training: int = 0) -> None:
        """A worker has finished a step; the first report counts."""
        with self._lock:
            if (round_number, training) == (self._round, self._training) and step > self._step:
                number = step - self._step
                now = max(now, self._at)
                if self._step == self._first:
                    self._report = number, now - self._at
                self._steps.extend([(now - self._at) / number] * min(number, KEPT))
                self._trained = self._trained[0] + number, self._trained[1] + now - self._at
                self._step, self._at = step, now

    def _look_again(self) -> None:
        if (reached := self._look()) is not None:
            self.step(*reached[:3], reached.training)

    def saved(self, seconds: float) -> None:
        """A worker took this long to save."""
        with self._lock:
            self._saving = seconds

    @property
    def reached(self) -> tuple[int, int]:
        """The last round in which a worker began to train, and the total optimizer steps done; 0 before."""
        self._look_again()
        with self._lock:
            return self._round, self._step

    @property
    def position(self) -> tuple[int, int]:
        """The number of the script's training, from 0, and the total optimizer steps done in it."""
        self._look_again()
        with self._lock:
            return self._training, self._step

    def of_round(self, round_number: int) -> tuple[int, int] | None:
        """Optimizer steps done when a round's workers began to train, and since then; None if none has begun."""
        self._look_again()
        with self._lock:
            since = self._earlier + self._step - self._first
            return (self._began, since) if round_number == self._round else None

    @property
    def trained(self) -> tuple[int, float]:
        """Steps of all rounds, repeated ones included, and the seconds that they took."""
        self._look_again()
        with self._lock:
            return self._trained

    @property
    def total(self) -> int:
        """Steps of the whole training; 0 if that is not known."""
        with self._lock:
            return self._total

    @property
    def done(self) -> int:
        """Optimizer steps done."""
        self._look_again()
        with self._lock:
            return self._step

    @property
    def step_seconds(self) -> float | None:
        """The median of this round's last steps; None if there is none yet."""
        self._look_again()
        with self._lock:
            mine = list(self._steps)[-(self._step - self._first) :] if self._step > self._first else []
            return statistics.median(mine) if mine else None

    def remaining(self) -> float | None:
        """Seconds until the training ends at this round's pace; None if that is not known."""
        self._look_again()
        with self._lock:
            done = self._step - self._first
            # A framework's script that trains beyond the total has begun a second training, of which nothing is known.
            if done < ENOUGH or self._step > self._total:
                return None
            mine = list(self._steps)[-done:]
            return (self._total - self._step) * statistics.median(mine)

    def first_longer(self, round_number: int) -> float | None:
        """Seconds by which a round's first step took longer than the others; None if that is not known."""
        self._look_again()
        with self._lock:
            number, seconds = self._report
            others = self._step - self._first - number
            if round_number != self._round or not number or others < 1:
                return None
            return max(0.0, seconds - number * statistics.median(list(self._steps)[-others:]))

    def suspend_seconds(self) -> float:
        """Seconds that a worker gets to leave a round: enough for what it has begun, which it discards."""
        self._look_again()
        with self._lock:
            step = statistics.median(self._steps) if self._steps else 0.0
            return min(max(SUSPENDED_STEPS * step, SHORTEST_SUSPENSION), LONGEST_SUSPENSION)

    def drain_seconds(self) -> float:
        """Minimum seconds that a drain takes, as far as is known: two steps, and saving."""
        self._look_again()
        with self._lock:
            return STEPS * (statistics.median(self._steps) if self._steps else 0.0) + self._saving


class StartTimer:
    """Learns how long starts take, without the time in which they wait for others, from those that are reported to it.

    Args:
        start_wait: seconds that other workers should wait for a start.
    """

    def __init__(self, start_wait: float = math.inf) -> None:
        self._start_wait = start_wait
        self._ahead: float | None = None
        self._ready: float | None = None
        self._first: float | None = None

    def ready(self, seconds: float) -> None:
        """A worker began to train so long after its start; it may have waited for others."""
        self._ready = seconds if self._ready is None else min(seconds, self._ready)

    def first_step(self, longer: float) -> None:
        """A new worker's first step took so much longer than others, by what a worker that starts ahead does before.

        Others may have taken longer, too.
        """
        self._first = longer if self._first is None else min(longer, self._first)

    def ahead(self, seconds: float) -> None:
        """A worker that was started ahead came to its first use of the world."""
        self._ahead = seconds

    @property
    def seen(self) -> float | None:
        """Seconds that a start takes, as seen so far; None if none was."""
        if self._ahead is not None or self._ready is None:
            return self._ahead
        return self._ready + (self._first or 0.0)

    @property
    def expected(self) -> float:
        """Seconds that the next start is expected to take."""
        return UNKNOWN_START if self.seen is None else self.seen

    @property
    def slow(self) -> bool:
        """Whether the next start is expected to take longer than other workers should wait for it."""
        return self.expected > self._start_wait
