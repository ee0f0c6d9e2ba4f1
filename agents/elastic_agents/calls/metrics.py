"""torch's metrics of an agent, put in the caller's process, where the caller's handlers are.

The metrics have the names that torch's agent uses (``torch.distributed.elastic.metrics``, group ``torchelastic``). The
agent's process writes what it measures into a pipe as JSON arrays, one per line: a metric's name and value, or the
state of the workers and the remaining restarts, which the caller's process repeats at each monitor interval.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from elastic_launch.events.types import Event, OrderReceived, WorkerExited, WorkerKept, WorkerPlaced, WorkerStarted

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

_log = logging.getLogger("elastic_launch.agent")

Put = Callable[[str, int], object]

HEALTHY, SUCCEEDED, FAILED = "healthy", "succeeded", "failed"


def wanted() -> bool:
    """Whether this process has a handler that uses these metrics."""
    from torch.distributed.elastic.metrics.api import NullMetricHandler, getStream

    return not isinstance(getStream("torchelastic").handler, NullMetricHandler)


class Meter:
    """Turns what happens on a node into metrics and states; called by the agent's thread only."""

    def __init__(self, now: Callable[[], float], put: Put, tell: Callable[[str], object]) -> None:
        self._now = now
        self._put = put
        self._tell = tell
        self._since = now()  # when this node last had workers
        self._stopping: float | None = None  # since when the last round's workers are stopping
        self._formed = 0.0
        self._workers = 0  # in the round
        self._started = self._gone = self._finished = 0
        self._state = ""

    def hear(self, event: Event) -> None:
        match event:
            case OrderReceived(order="form", workers=workers):
                self._formed, self._workers = self._now(), workers
                self._took("SimpleElasticAgent._rendezvous", self._since)
                self._started = self._gone = self._finished = 0
            case OrderReceived(order="break" | "drain" | "evicted"):
                self._stop("")
            case WorkerStarted(round=0) | WorkerExited(round=0):
                pass  # it is ahead of a round
            case WorkerStarted() | WorkerKept() | WorkerPlaced():
                self._started += 1
                if self._started == self._workers:
                    self._begun()
            case WorkerExited():
                self._exited(event)

    def _begun(self) -> None:
        self._took("LocalElasticAgent._start_workers", self._formed)
        self._took("SimpleElasticAgent._initialize_workers", self._since)
        if self._stopping is not None:
            self._took("SimpleElasticAgent._restart_workers", self._stopping)
        self._stopping = None
        self._be(HEALTHY)

    def _exited(self, event: WorkerExited) -> None:
        self._gone += 1
        if event.exit_code == 0:
            self._finished += 1
            if self._finished == self._workers:
                self._be(SUCCEEDED)
        elif not event.stopped and self._stopping is None:
            self._stop(FAILED)
        if self._gone == self._started and self._stopping is not None:
            self._since = self._now()
            self._took("LocalElasticAgent._stop_workers", self._stopping)

    def _stop(self, state: str) -> None:
        if self._stopping is None and self._started:
            self._stopping = self._since = self._now()
            self._be(state)

    def _be(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._tell(state)

    def _took(self, name: str, since: float) -> None:
        self._put(f"{name}.success", 1)
        self._put(f"{name}.duration.ms", round(1000 * (self._now() - since)))


class MetricPipe:
    """The agent's end of the pipe. Never blocks: what the caller does not read in time is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._dropped = False
        os.set_blocking(descriptor, False)

    def put(self, name: str, value: int) -> None:
        """Send a metric, or a state and the remaining restarts."""
        try:
            os.write(self._descriptor, json.dumps([name, value]).encode() + b"\n")
        except BlockingIOError:
            if not self._dropped:
                self._dropped = True
                _log.warning("metrics are dropped: the caller's handler takes them too slowly (said once)")
        except BrokenPipeError:
            pass  # the caller has ended, and this process will end too


class Monitor:
    """The caller's end of the pipe: passes metrics to this process' handlers, as torch's agent does.

    Args:
        interval: seconds between repeated metrics while a state lasts.
    """

    def __init__(self, descriptor: int, role: str, interval: float) -> None:
        self.descriptor = descriptor
        self._role = role
        self._interval = interval
        self._pending = b""
        self._state = ""
        self._left = 0
        self._due = 0.0
        os.set_blocking(descriptor, False)

    @property
    def pause(self) -> float | None:
        """Seconds until :meth:`put` has something to do even if no data arrives; None if there is nothing to do."""
        return max(0.0, self._due - time.monotonic()) if self._state == HEALTHY else None

    def put(self) -> None:
        """Put what has arrived or is due; an exception from a handler ends the wait."""
        while data := self._read():
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                name, value = json.loads(line)
                if name in ("", HEALTHY, SUCCEEDED, FAILED):
                    self._state, self._left = name, value
                    self._put_state()
                else:
                    _put(name, value)
        if self._state == HEALTHY and time.monotonic() >= self._due:
            self._put_state()

    def _put_state(self) -> None:
        self._due = time.monotonic() + self._interval
        if self._state:
            _put(f"workers.{self._role}.remaining_restarts", self._left)
            _put(f"workers.{self._role}.{self._state}", 1)

    def _read(self) -> bytes:
        try:
            return os.read(self.descriptor, 65536)
        except BlockingIOError:
            return b""


def put_results(role: str, result: RunResult, restarts: int, max_restarts: int) -> None:
    """Put how a run ended."""
    failed = result.is_failed()
    left = max_restarts - restarts
    flakiness = 100.0 if failed else 100.0 - 100.0 * (left + 1) / (max_restarts + 1)
    found: dict[str, Any] = {"flakiness": int(flakiness), "run_total": 1}
    for outcome, is_it in (("success", not failed), ("failed", failed)):
        found[f"run_{outcome}_with_retries"] = int(is_it and restarts > 0)
        found[f"run_{outcome}_no_retries"] = int(is_it and restarts == 0)
    for name, value in found.items():
        _put(f"workers.{role}.{name}", value)


@contextmanager
def timed_run() -> Iterator[None]:
    """Put how long a run takes, and whether it returns a result."""
    began, how = time.monotonic(), "failure"
    try:
        yield
        how = "success"
    finally:
        _put(f"SimpleElasticAgent.run.{how}", 1)
        _put("SimpleElasticAgent.run.duration.ms", round(1000 * (time.monotonic() - began)))


def _put(name: str, value: int) -> None:
    from torch.distributed.elastic.metrics.api import put_metric

    put_metric(name, value)
