"""What those who watch a run see of it: a few figures with names, for a terminal and for a page."""

from __future__ import annotations

import threading
from collections import deque

from elastic_launch.clock import Clock
from elastic_launch.events import types as ev
from elastic_launch.events.types import counted
from elastic_launch.observe.ledger import PARTS, spoken
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.present import Present
from elastic_launch.system.plain_text import one_line

__all__ = ["Watch", "span"]

WINDOW = 15.0
"""Seconds whose steps make the rate of steps."""

NODES = 8
"""Nodes that are named; of the others there is the number."""


class Watch:
    """Follows a node's events, and how the node is at moments. Thread-safe.

    Args:
        ledger: follows the same events.
    """

    def __init__(self, clock: Clock, ledger: LiveLedger) -> None:
        self._clock = clock
        self._ledger = ledger
        self._lock = threading.Lock()
        self._since = clock.now()
        self._next = "finds the run's leader"
        self._started = 0  # workers of this node in the round
        self._stepless: str | None = "workers start"  # what the round waits for before its first step; None: it steps
        self._checkpoint: tuple[int, float] | None = None
        self._snapshot: tuple[int, float] | None = None
        self._steps: deque[tuple[float, int, float]] = deque()

    def add(self, event: ev.Event) -> None:
        """Add an event."""
        with self._lock:
            match event:
                case ev.LinkChanged(up=up, cause=cause):
                    self._next = "waits for a round to form" if up else f"no link to the leader: {cause}"
                case ev.NodeJoined(next=following):
                    self._next = following
                case ev.Parked():
                    self._next = event.line()
                case ev.RoundDraining(cause=cause) | ev.RoundBroken(cause=cause):
                    self._next = cause
                case ev.OrderReceived(order="form"):
                    self._started, self._stepless = 0, "workers start"
                case ev.OrderReceived(order="drain" | "break" | "evicted", cause=cause):
                    self._next = cause
                case ev.WorkerStarted() | ev.WorkerKept() | ev.WorkerPlaced() if event.round:
                    self._started += 1
                case ev.TrainingBegun():
                    self._stepless = "first step"
                case ev.FirstStep():
                    self._stepless = None
                case ev.CheckpointSaved(step=step):
                    self._checkpoint = step, self._clock.now()

    def figures(self, present: Present) -> list[tuple[str, str]]:
        """Return names and values, the most important first."""
        with self._lock:
            now = self._clock.now()
            rate = self._rate(present, now)
            if present.snapshot is None:
                self._snapshot = None
            elif self._snapshot is None or self._snapshot[0] != present.snapshot:
                self._snapshot = present.snapshot, now
            found = [("world size", self._world(present))]
            if present.step is not None:
                share = f" of {present.total} ({present.step / present.total:.0%})" if present.total else ""
                found.append(("step", f"{present.step}{share}"))
            if rate is not None:
                found.append(("steps/s", f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"))
            if present.remaining is not None:
                found.append(("time left", span(present.remaining)))
            if present.loss is not None:
                found.append(("loss", f"{present.loss:.4g}"))
            if present.batch:
                found.append(("global batch", f"{present.batch}, accumulation {present.passes}"))
            if present.restarts is not None and (most := present.max_restarts) is not None:
                found.append(("restarts left", f"{max(0, most - present.restarts)} of {most}"))
            for name, saved in (("snapshot", self._snapshot), ("checkpoint", self._checkpoint)):
                if saved is not None:
                    found.append((name, f"step {saved[0]}, {span(now - saved[1])} ago"))
            found.append(("running for", span(now - self._since)))
            return found

    def doing(self, present: Present) -> str:
        """Return what the node does or waits for, and the last incident, in one line."""
        incident = self._ledger.incident()
        with self._lock:
            match present.phase:
                case "starting":
                    text = "starts: imports torch"
                case "running" if self._stepless == "workers start":
                    text = f"workers start: {self._started} of {present.workers} have; none has begun to train yet"
                case "running":
                    text = f"trains; {self._stepless}" if self._stepless else "trains"
                case "leaving" | "over" | "finished" | "saving":
                    text = present.phase
                case phase:
                    text = f"{phase}: {self._next}"
        if incident is None:
            return one_line(text)
        cause = f"{incident.kind}, {incident.cause}" if incident.cause else incident.kind
        if incident.recovered:
            lost = f", {counted(incident.lost_steps, 'step')} lost" if incident.lost_steps else ""
            return one_line(f"{text}; incident {incident.number} cost {incident.still_s:.1f} s{lost}: {cause}")
        known = [(part, seconds) for part in PARTS if (seconds := getattr(incident, part)) is not None]
        phases = ", ".join(f"{spoken(part)} {seconds:.1f} s" for part, seconds in known)
        return one_line(f"still for {incident.still_s:.1f} s ({phases}): {cause}; {text}")

    def _world(self, present: Present) -> str:
        members = [f"{one_line(node)} {workers}" for node, workers in present.members[:NODES]]
        if len(present.members) > NODES:
            members.append(f"{len(present.members) - NODES} more")
        if not members:
            return "none yet"
        return f"{present.world_size} on {counted(present.nodes, 'node')}: {', '.join(members)}"

    def _rate(self, present: Present, now: float) -> float | None:
        self._steps.append((now, present.trained, present.trained_s))
        while len(self._steps) > 2 and now - self._steps[0][0] > WINDOW:
            self._steps.popleft()
        for _, trained, seconds in (self._steps[0], (0.0, 0, 0.0)):
            if present.trained > trained and present.trained_s > seconds:
                return (present.trained - trained) / (present.trained_s - seconds)
        return None


def span(seconds: float) -> str:
    """Return a time as people say it: ``3 s``, ``12 min``, ``2 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes // 1440} days"
