"""One queue for everything that an agent reacts to, with timers."""

from __future__ import annotations

import heapq
import itertools
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import field
from types import FrameType
from typing import Any, Generic, TypeVar

from elastic_launch.clock import Clock
from elastic_launch.contract import WorkerEnding
from elastic_launch.observe.present import Present
from elastic_launch.system.threads import VitalThread
from elastic_launch.values import Value

T = TypeVar("T")

REPEAT = 1.0
"""Seconds within which signals to leave count as one: wrappers send two, or signal a process and its group."""


class SignalCaught(Value):
    """The agent itself received a signal.

    Attributes:
        at: when, by the agent's clock; it may be handled much later. None: when it is handled.
    """

    number: int
    at: float | None = field(default=None, compare=False)


class HowAreYou(Value):
    """Asks how this node's part of the run is, for an HTTP request or for the charts of the page.

    Attributes:
        every: seconds after which it is asked again; None: it is asked once.
    """

    answer: Callable[[Present], None]
    every: float | None = None


class ProcessEnding(Value):
    """A worker's process will exit. It may not have said yet which worker it is."""

    pid: int
    report: WorkerEnding


class FirstStepDone(Value):
    """A worker of this node has done a step, for the first time since the agent began."""


class Inbox(Generic[T]):
    """A queue filled from any thread and from signal handlers, and emptied by one loop.

    A function in it is called by that loop, and may return what the loop is to react to.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # SimpleQueue.put is reentrant, so a signal handler may call it whatever the main thread is doing.
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, T]] = []
        self._order = itertools.count()
        self.closed = False
        """Whether items are no longer taken."""

    def put(self, item: T) -> None:
        """Add an item; never blocks."""
        self._queue.put(item)

    def put_later(self, delay: float, item: T) -> None:
        """Add an item after delay seconds; for the consuming thread only."""
        heapq.heappush(self._timers, (self.clock.now() + delay, next(self._order), item))

    def close(self) -> None:
        """Items are no longer taken: what is put from now on is lost."""
        self.closed = True

    def take(self) -> T:
        """Return the next item; queued items go before timers that are due."""
        while True:
            wait = self._timers[0][0] - self.clock.now() if self._timers else None
            try:
                # Without an upper bound a signal could wait for the next item on platforms without sem_clockwait.
                return self._queue.get(timeout=max(0.0, min(wait, 60.0)) if wait is not None else 60.0)
            except queue.Empty:
                if self._timers and self._timers[0][0] <= self.clock.now():
                    return heapq.heappop(self._timers)[2]


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install a signal handler while entered."""
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            # None: set by native code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if old is None else old)


def signals_to(inbox: Inbox[Any], numbers: Iterable[signal.Signals]) -> AbstractContextManager[None]:
    """Put signals into an inbox while entered."""
    return handling(numbers, lambda number, frame: inbox.put(SignalCaught(number, inbox.clock.now())))


def dropping(numbers: Iterable[signal.Signals]) -> AbstractContextManager[None]:
    """Ignore signals while entered, by a handler: what this process executes meanwhile does not inherit that."""
    return handling(numbers, lambda number, frame: None)


@contextmanager
def withheld(inbox: Inbox[Any], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Put signals into an inbox that this process blocks, so that all processes that it starts block them, too.

    Slurm, for one, sends a signal to every process of a step, which would end most of them. Threads that were started
    before the signals were blocked may get them as well, so there must be none.
    """
    if not (chosen := frozenset(numbers)):
        yield
        return
    closing = threading.Event()

    def take() -> None:
        while True:
            number = signal.sigwait(chosen)
            if closing.is_set():
                return
            inbox.put(SignalCaught(number, inbox.clock.now()))

    signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
    thread = VitalThread(take, "withheld signals")
    thread.start()
    try:
        yield
    finally:
        closing.set()
        if thread.ident is not None and thread.is_alive():
            with suppress(ProcessLookupError):
                signal.pthread_kill(thread.ident, min(chosen))
        thread.join(10)
        while signal.sigtimedwait(chosen, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, chosen)
