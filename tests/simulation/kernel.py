"""Simulated time and tasks. A task is a generator that yields what it waits for, where a thread would block."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from typing import Any

from elastic_launch.testing import FakeClock

__all__ = ["Host", "Kernel", "Mailbox", "Resume", "Task", "Wait"]

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]
"""Starts a wait and calls back with the outcome; an exception is raised in the task."""

Task = Generator[Wait, Any, Any]


class Host:
    """A unit that is killed and frozen as a whole: a process with all its threads.

    Attributes:
        alive: it runs, or is frozen.
        deferred: events that were due in it while it was frozen.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.deferred: list[Callable[[], None]] = []


class Kernel:
    """Runs one event after the other.

    Args:
        seed: for delays; everything else is decided by the user of this class.
        check: called after every event; also an attribute.
    """

    def __init__(self, seed: int, check: Callable[[], None]) -> None:
        self.clock = FakeClock(1000.0)
        self.outside = Host("outside")
        self.random = random.Random(seed)
        self.events = 0
        self.check = check
        self._due: list[tuple[float, int, Host, Callable[[], None]]] = []
        self._pushed = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    def call(self, delay: float, host: Host, function: Callable[[], None]) -> None:
        """Call a function on a host, unless the host is dead by then; while it is frozen, the call waits."""
        self._pushed += 1
        heapq.heappush(self._due, (self.now + delay, self._pushed, host, function))

    def soon(self) -> float:
        """A short delay: of a packet, or until a thread is scheduled."""
        return self.random.choice((0.0005, 0.001, 0.002, 0.01, 0.05))

    def thaw(self, host: Host) -> None:
        host.frozen = False
        deferred, host.deferred = host.deferred, []
        for function in deferred:
            self.call(0.0, host, function)

    def step(self, until: float) -> bool:
        """Run the next event if it is due by then, otherwise advance the time; return whether there was one."""
        if not self._due or self._due[0][0] > until:
            self.clock.advance(max(0.0, until - self.now))
            return False
        moment, _, host, function = heapq.heappop(self._due)
        self.clock.advance(max(0.0, moment - self.now))
        if host.frozen:
            host.deferred.append(function)
        elif host.alive:
            function()
            self.events += 1
            self.check()
        return True

    def run(self, seconds: float) -> None:
        end, most = self.now + seconds, self.events + 10_000 + 1_000 * seconds
        while self.step(end):
            assert self.events < most, "something goes round in circles"

    def sleep(self, host: Host, seconds: float) -> Wait:
        return lambda resume: self.call(seconds, host, lambda: resume(None))

    def spawn(self, host: Host, task: Task) -> None:
        """Run a task until it ends or its host dies."""

        def resume(outcome: Any) -> None:
            if not host.alive:
                return
            try:
                wait = task.throw(outcome) if isinstance(outcome, Exception) else task.send(outcome)
            except StopIteration:
                return
            wait(resume)

        self.call(0.0, host, lambda: resume(None))


class Mailbox:
    """A queue that one task of a host reads."""

    def __init__(self, kernel: Kernel, host: Host) -> None:
        self._kernel = kernel
        self._host = host
        self._items: list[Any] = []
        self._waiting: Resume | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None:
            self._wake_after(self._kernel.soon(), self._waiting)

    def take(self) -> list[Any]:
        """Return all queued items, without waiting."""
        items, self._items = self._items, []
        return items

    def get(self, timeout: float | None = None) -> Wait:
        """Wait for items, at most timeout seconds; the outcome is the list of all queued items."""

        def wait(resume: Resume) -> None:
            self._waiting = resume_once = lambda items: resume(items)  # a new one for each wait
            if self._items:
                self._wake_after(0.0, resume_once)
            elif timeout is not None:
                self._wake_after(max(timeout, 0.001), resume_once)  # as precise as select

        return wait

    def _wake_after(self, delay: float, waiting: Resume) -> None:
        def wake() -> None:
            if self._waiting is waiting:
                self._waiting = None
                waiting(self.take())

        self._kernel.call(delay, self._host, wake)
