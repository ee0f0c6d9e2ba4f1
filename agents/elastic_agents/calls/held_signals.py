"""Signals that are held back in a caller until its new process has an owner."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any


class HeldSignals:
    """Holds back all signals: an exception that a handler raises would leave a new process without an owner.

    Blocking them is not enough. If the process has other threads, one of them takes the signal, and Python runs the
    handler in the main thread all the same. So the handlers of Python functions are replaced meanwhile, too.

    Attributes:
        mask: the signals that were blocked before.
    """

    def __init__(self) -> None:
        self.mask: set[int] = set()
        self._blocked = False
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def hold(self) -> None:
        """Begin. :meth:`release` must follow, even if this method raises."""
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._blocked = True
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if threading.current_thread() is threading.main_thread():  # no other thread runs handlers
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, lambda came, _: self._came.append(came))

    def restore(self) -> None:
        """Put the handlers back; also to be called by a process that is forked meanwhile."""
        for number in list(self._handlers):
            signal.signal(number, self._handlers[number])
            del self._handlers[number]

    def release(self) -> None:
        """End, and let the present handlers handle the signals that came. Does nothing if it has been called before."""
        self.restore()
        if self._blocked:
            self._blocked = False
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        while self._came:
            number = self._came.pop(0)
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, sys._getframe())
