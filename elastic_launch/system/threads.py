"""Threads that a process depends on, whose unexpected end is reported to its main loop; and calls that may hang."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from elastic_launch.errors import ElasticLaunchError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A vital thread ended with an unhandled exception."""

    name: str
    error: str


Listener = Callable[[ThreadDied], object]

_lock = threading.Lock()
_listeners: list[Listener] = []


class VitalThread(threading.Thread):
    """A daemon thread that other threads depend on.

    If its target raises an exception, the traceback is printed as for any thread, and the listeners registered with
    :func:`deaths_reported_to` are called with a :class:`ThreadDied`: without such a thread, the process would hang, or
    do only half of its work.

    Args:
        owner: called instead of the listeners, if given: the process can continue without this thread, and the owner
            handles its end.
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
    """Call a function when a vital thread of this process dies within this context.

    Args:
        listener: called from the dying thread; must not block.
    """
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def within(seconds: float, what: str, function: Callable[[], T], *, thread: str = "bounded call") -> T:
    """Run a function that may hang, and return its result: a file system or a resolver may have lost its server.

    Args:
        what: what the function does, for the error.

    Raises:
        TimeoutError: if it takes longer; its thread remains.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except (ElasticLaunchError, OSError) as error:
            errors.append(error)

    running = threading.Thread(target=run, name=thread, daemon=True)
    running.start()
    running.join(seconds)
    if running.is_alive():
        raise TimeoutError(f"{what} took more than {seconds:g} s")
    if errors:
        error = errors.pop()
        try:
            raise error
        finally:
            # An error that refers to itself through its traceback would keep what it uses until garbage collection.
            del error
    if not results:
        raise ElasticLaunchError(f"{what} failed; the traceback is above")
    return results[0]
