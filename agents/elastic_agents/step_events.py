"""What workers report about their steps, as events: start of training, first step, progress, and all steps.

Steps are those of one of the script's trainings, of which a round may have several, one after the other.
"""

from __future__ import annotations

from elastic_launch.clock import Clock
from elastic_launch.contract import Ready, WorkerHello
from elastic_launch.events.types import EventSink, FirstStep, RoundProgress, RoundSteps, TrainingBegun

FIRST, MOST = 4.0, 60.0
"""Seconds from the first step to the first progress that is recorded, and the most between two; they double."""


class StepEvents:
    """Follows one round after the other; used by one thread.

    It closes a round only when all of its workers have disconnected: only then has everything they sent been read.
    """

    def __init__(self, clock: Clock, events: EventSink) -> None:
        self._clock = clock
        self._events = events
        self._round = self._training = 0
        self._open = 0
        self._first = self._last = 0
        self._began = self._at = 0.0
        self._written = 0
        self._every = FIRST
        self._due: float | None = None

    def begin(self, who: WorkerHello, ready: Ready, *, further: bool = False) -> None:
        """A worker begins to train; ``further``: after another training, in the same round."""
        if who.round < self._round:
            return
        if (who.round, ready.training) > (self._round, self._training):
            if who.round > self._round:
                self.close()
            elif self._last > self._written:
                self._progress()
            self._round, self._training = who.round, ready.training
            self._first = self._last = ready.step
            self._began = self._at = self._clock.now()
            self._written, self._due = ready.step, None
            took = round(ready.restore_s, 6)
            about = who.round, who.rank, ready.step, ready.total, took, ready.uncompared
            which = not who.saves, ready.training, ready.continues
            self._events.emit(TrainingBegun(*about, *which))
        self._open += not further

    def step(self, round_number: int, step: int, at: float, training: int = 0) -> None:
        """A worker finished a step at a given time; the first report counts."""
        if (round_number, training) != (self._round, self._training) or step <= self._last:
            return
        first = self._last == self._first
        self._last, self._at = step, max(at, self._at)
        if first:
            self._events.emit(FirstStep(round_number, step, training))
            self._written, self._every = step, FIRST
            self._due = self._clock.now() + FIRST

    def until_progress(self) -> float | None:
        """Return the seconds until progress has to be recorded; None if no round is known to train."""
        return None if self._due is None else max(0.0, self._due - self._clock.now())

    def progress(self) -> None:
        """Record how far the round has come, if it is time for that and steps have been done."""
        if self.until_progress() != 0.0:
            return
        self._every = min(MOST, 2 * self._every)
        self._due = self._clock.now() + self._every
        if self._last > self._written:
            self._progress()

    def _progress(self) -> None:
        self._written = self._last
        trained = round(self._at - self._began, 6)
        self._events.emit(RoundProgress(self._round, self._last, trained, self._training))

    def hung_up(self, round_number: int) -> None:
        """A worker that had begun has disconnected."""
        if round_number == self._round and self._open:
            self._open -= 1
            if not self._open:
                self._write()

    def close(self) -> None:
        """Nothing more will be reported."""
        if self._open:
            self._open = 0
            self._write()

    def _write(self) -> None:
        self._due = None
        trained = round(self._at - self._began, 6)
        self._events.emit(RoundSteps(self._round, self._first, self._last, trained, self._training))
