"""The ledger of a run in progress."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from elastic_launch.clock import Clock
from elastic_launch.events.types import Event, FirstStep
from elastic_launch.observe.chronicle import Chronicle, RoundTold
from elastic_launch.observe.ledger import Ledger, RoundIncident, build

MOST = 1000
"""Events with a mark on the time axis that are kept: the last ones."""

T = TypeVar("T")


class LiveLedger:
    """Follows one host's events as they happen. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._chronicle = Chronicle()
        self._told = 0
        self._marked: deque[tuple[float, Event]] = deque(maxlen=MOST)
        self._last: tuple[RoundIncident, ...] | None = None  # since the last event

    def add(self, event: Event) -> list[RoundIncident]:
        """Add an event; return the incidents that it ends, if this host leads the run.

        For plain scripts this returns none: only once a round is over is it known that they do not report steps.
        """
        with self._lock:
            now = self._clock.now()
            self._chronicle.add(now, event)
            if event.tone:
                self._marked.append((now, event))
            self._last = None
            if not isinstance(event, FirstStep):
                return []
            over = [x for x in build(self._chronicle).incidents if 0 < x.next_round <= event.round]
            # Those that end while another host leads are returned there.
            told, self._told = self._told, max(self._told, len(over))
            return over[told:] if self._chronicle.leads else []

    @property
    def since(self) -> float:
        """When the first event happened; now, if none has."""
        with self._lock:
            return self._clock.now() if self._chronicle.since is None else self._chronicle.since

    def incident(self) -> tuple[RoundIncident, float] | None:
        """Return the last incident, and the seconds since its end; None if there was none.

        Until training goes on, it lasts until now.
        """
        with self._lock:
            if self._last is None or (self._last and not self._last[-1].recovered):
                self._last = self._until_now(lambda ledger: ledger.incidents[-1:])
            if not self._last:
                return None
            told = self._chronicle.rounds.get(self._last[-1].next_round, RoundTold(0))
            end = told.first if told.first is not None else told.started
            return self._last[-1], self._clock.now() - end if self._last[-1].recovered and end is not None else 0.0

    def drawn(
        self, draw: Callable[[Chronicle, Sequence[tuple[float, Event]], Ledger], T], step: int | None = None
    ) -> T:
        """Return what a function makes of the run until now: chronicle, last events with a mark, ledger."""
        with self._lock:
            return self._until_now(lambda ledger: draw(self._chronicle, tuple(self._marked), ledger), step)

    def goodput(self, step: int | None = None) -> tuple[bool, float | None]:
        """Return whether this host leads the run, and the goodput; None if it is not known.

        Args:
            step: optimizer steps done; if that is not known, the goodput is that of the last event.
        """
        with self._lock:
            if step is None:
                return self._chronicle.leads, build(self._chronicle).goodput
            return self._chronicle.leads, self._until_now(lambda ledger: ledger.goodput, step)

    def _until_now(self, look: Callable[[Ledger], T], step: int | None = None) -> T:
        """Return what a function makes of the ledger with the time, and the steps, since the last event."""
        chronicle = self._chronicle
        told = chronicle.rounds[max(chronicle.rounds)] if chronicle.rounds else RoundTold(0)
        trains = None if told.newest is None or told.closed or told.ended is not None else told.newest[1]
        before = chronicle.until, chronicle.code
        steps_before = (0, None) if trains is None else (trains.last, trains.trained)
        saves = bool(chronicle.code) and not chronicle.agent_ended
        if saves:
            chronicle.code = None
        if not chronicle.over and chronicle.since is not None:
            chronicle.until = max(chronicle.until, self._clock.now())
            if step is not None and trains is not None:
                trains.last, trains.trained = max(trains.last, step), chronicle.until - trains.begun
        try:
            ledger = build(chronicle)
            return look(replace(ledger, lost_steps=None) if saves else ledger)  # not known until the state is saved
        finally:
            chronicle.until, chronicle.code = before
            if trains is not None:
                trains.last, trains.trained = steps_before

    def summary(self, max_restarts: int) -> str:
        """Return the run in one line; empty if another host leads it, no round was formed, or nothing happened."""
        with self._lock:
            if not self._chronicle.leads:
                return ""
            ledger = build(self._chronicle)
            return ledger.line(max_restarts) if ledger.by_steps or ledger.incidents else ""
