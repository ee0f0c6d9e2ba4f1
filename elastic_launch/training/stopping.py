"""Stopping before the training's end: who asked for it, and how the process leaves."""

from __future__ import annotations

import os
import signal
import threading
from enum import IntEnum
from types import FrameType
from typing import Any

__all__ = ["Drained", "Stop", "Termination"]


class Stop(IntEnum):
    """Who asks for a stop; of several the highest counts."""

    NO = 0
    SCRIPT = 1
    AGENT = 2
    SIGNAL = 3

    @property
    def drains(self) -> bool:
        """Whether the training is to go on later, in other processes: this one has no results to come to."""
        return self >= Stop.AGENT


class Drained(SystemExit):
    """Ends the process behind a step boundary: its state is saved, and another process goes on from there.

    Attributes:
        at_once: read by whoever runs the script: others stand still until this process is gone, so once its ``atexit``
            functions have run it need not take itself to pieces.
    """

    at_once = True


class Termination:
    """Turns the first SIGTERM into a wish to stop; the second one ends the process as it always does.

    Where the script has a handler of its own, or runs in another thread than the main one, nothing is changed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def watch(self) -> None:
        """Begin; what has begun goes on."""
        if self._before is not None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._caught)

    def close(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True
