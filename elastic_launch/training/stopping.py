"""Stopping before the training's end: who requested it, and how the process exits."""

from __future__ import annotations

import os
import signal
import threading
from enum import IntEnum
from types import FrameType
from typing import Any


class Stop(IntEnum):
    """Who requested a stop; of several, the highest value counts."""

    NO = 0
    SCRIPT = 1
    AGENT = 2
    SIGNAL = 3

    @property
    def drains(self) -> bool:
        """Whether the training continues later in other processes, so that no results follow in this one."""
        return self >= Stop.AGENT


class Drained(SystemExit):
    """Ends the process after a step boundary. The state is saved, and another process continues from it.

    Attributes:
        at_once: read by the process that runs the script: other ranks wait until this process is gone, so once its
            ``atexit`` functions have run, it may exit without further cleanup.
    """

    at_once = True


class Termination:
    """Turns the first SIGTERM into a stop request; a second one ends the process as usual.

    Nothing is changed if the script has its own handler, or does not run in the main thread.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def watch(self) -> None:
        """Install the handler, unless it is installed already."""
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
