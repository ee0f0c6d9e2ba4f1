"""What the workers of a round report about their steps, as events: start of training, first step, and all steps."""

from __future__ import annotations

from elastic_launch.clock import Clock
from elastic_launch.contract import Hello, Ready
from elastic_launch.events.types import EventSink, FirstStep, RoundSteps, TrainingBegun

__all__ = ["StepEvents"]


class StepEvents:
    """Follows one round after the other; used by one thread.

    It closes a round only when all of its workers have disconnected: only then has everything they sent been read.
    """

    def __init__(self, clock: Clock, events: EventSink) -> None:
        self._clock = clock
        self._events = events
        self._round = 0
        self._open = 0
        self._first = self._last = 0
        self._began = self._at = 0.0

    def begin(self, who: Hello, ready: Ready) -> None:
        """A worker begins to train."""
        if who.round < self._round:
            return
        if who.round > self._round:
            self.close()
            self._round = who.round
            self._first = self._last = ready.step
            self._began = self._at = self._clock.now()
            took = round(ready.restore_s, 6)
            self._events.emit(TrainingBegun(who.round, who.rank, ready.step, ready.total, took, ready.uncompared))
        self._open += 1

    def step(self, round_number: int, step: int, at: float) -> None:
        """A worker finished a step at a given time; the first report counts."""
        if round_number != self._round or step <= self._last:
            return
        first = self._last == self._first
        self._last, self._at = step, max(at, self._at)
        if first:
            self._events.emit(FirstStep(round_number, step))

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
        self._events.emit(RoundSteps(self._round, self._first, self._last, round(self._at - self._began, 6)))
