"""Threads that a process depends on: their unexpected end is reported to the process' main loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["ThreadDied", "VitalThread", "deaths_reported_to"]


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A vital thread was ended by an exception that its code does not handle.

    Attributes:
        name: of the thread.
        error: the exception's type and message.
    """

    name: str
    error: str


Listener = Callable[[ThreadDied], object]

_lock = threading.Lock()
_listeners: list[Listener] = []


class VitalThread(threading.Thread):
    """A daemon thread that others depend on.

    If an exception leaves its target, the traceback is printed as for any thread, and those that
    :func:`deaths_reported_to` has registered are called with a :class:`ThreadDied`: a process that goes on without such
    a thread would hang, or do half of its work.

    Args:
        target: what the thread runs.
        name: of the thread, for messages.
        owner: called instead of those, if given: the process can go on without this thread, and the owner sees to it.
    """

    def __init__(
        self,
        target: Callable[..., object],
        name: str,
        args: tuple[object, ...] = (),
        *,
        owner: Listener | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._act = target
        self._arguments = args
        self._owner = owner

    def run(self) -> None:
        try:
            self._act(*self._arguments)
        finally:
            error = sys.exception()
            if error is not None and not isinstance(error, SystemExit):
                died = ThreadDied(self.name, f"{type(error).__name__}: {error}")
                with _lock:
                    listeners = [self._owner] if self._owner is not None else list(_listeners)
                for listener in listeners:
                    listener(died)


@contextmanager
def deaths_reported_to(listener: Listener) -> Iterator[None]:
    """Have a function called when a vital thread of this process dies, for the time of a context.

    Args:
        listener: called from the thread that dies; must not block.
    """
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
