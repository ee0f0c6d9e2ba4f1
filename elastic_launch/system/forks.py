"""Keeps what this project does from processes that the script forks: signal handlers, and what ends a session."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

_undo: list[tuple[int, Callable[[], object]]] = []
_before = threading.local()  # mask: the signals that the thread that forks had blocked before
_hooked: list[bool] = []


def not_inherited(number: int, undo: Callable[[], object]) -> Callable[[], None]:
    """Have each process that is forked from now on undo what was done about a signal, before anything else runs there.

    The signal is blocked in the thread that forks until then: one that is sent to the new process at once has the
    effect that it would have without this project. This holds for Python's forks, from any thread, not for those of
    native code.

    Returns:
        a function that ends this, for who has undone it in this process.
    """
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_undo_all)
    entry = number, undo
    _undo.append(entry)

    def end() -> None:
        if entry in _undo:
            _undo.remove(entry)

    return end


def never_freed(thing: object) -> None:
    """Keep an object to the end of this process: what a suspended generator does as it is freed is not done here."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _hold() -> None:
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number for number, _ in _undo})


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _undo_all() -> None:
    try:
        while _undo:
            _undo.pop()[1]()
    finally:
        _release()
