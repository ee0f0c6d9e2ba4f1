"""The ledger of a run in progress."""

from __future__ import annotations

import threading

from elastic_launch.clock import Clock
from elastic_launch.events.types import Event, FirstStep
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.ledger import Incident, build

__all__ = ["LiveLedger"]


class LiveLedger:
    """Follows one host's events as they happen. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._chronicle = Chronicle()
        self._told = 0
        self._last: tuple[Incident, ...] | None = None  # since the last event

    def add(self, event: Event) -> list[Incident]:
        """Add an event; return the incidents that it ends, if this host leads the run.

        For plain scripts this returns none: only once a round is over is it known that they do not report steps.
        """
        with self._lock:
            self._chronicle.add(self._clock.now(), event)
            self._last = None
            if not isinstance(event, FirstStep) or not self._chronicle.leads:
                return []
            over = [x for x in build(self._chronicle).incidents if 0 < x.next_round <= event.round]
            told, self._told = self._told, max(self._told, len(over))
            return over[told:]

    def incident(self) -> Incident | None:
        """Return the last incident; until training goes on, it lasts until now. None if there was none."""
        with self._lock:
            if self._last is None or (self._last and not self._last[-1].recovered):
                chronicle = self._chronicle
                until = chronicle.until
                if not chronicle.over:
                    chronicle.until = max(until, self._clock.now())
                try:
                    self._last = build(chronicle).incidents[-1:]
                finally:
                    chronicle.until = until
            return self._last[-1] if self._last else None

    def goodput(self) -> tuple[bool, float | None]:
        """Return whether this host leads the run, and the goodput so far; None if it is not known."""
        with self._lock:
            return self._chronicle.leads, build(self._chronicle).goodput

    def summary(self, max_restarts: int) -> str:
        """Return the run in one line; empty if another host leads it, no round was formed, or nothing happened."""
        with self._lock:
            if not self._chronicle.leads:
                return ""
            ledger = build(self._chronicle)
            return ledger.line(max_restarts) if ledger.by_steps or ledger.incidents else ""
