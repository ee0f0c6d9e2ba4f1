"""Stopping before the training's end: who requested it, and how the process exits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

from elastic_launch.system.forks import not_inherited


class StopSource(IntEnum):
    """Who requested a stop; of several, the highest value counts."""

    NO = 0
    SCRIPT = 1
    AGENT = 2
    SIGNAL = 3

    @property
    def drains(self) -> bool:
        """Whether the training continues later in other processes, so that no results follow in this one."""
        return self >= StopSource.AGENT

    def exit_code(self, *, agent: bool) -> int:
        """Return the code with which a process exits after a drain.

        Args:
            agent: whether the process has an agent of this project, which relies on messages, not on the code.
        """
        # A sender of SIGTERM to this process expects the signal's.
        return 0 if agent or self is StopSource.AGENT else 128 + signal.SIGTERM


UNCONFIRMED = 128 + signal.SIGTERM
"""Exit code after a drain of which the agent may not know: with 0 it would take the training for finished."""


class DrainedExit(SystemExit):
    """Ends the process after a step boundary. The state is saved, and another process continues from it.

    Attributes:
        at_once: read by the process that runs the script: other ranks wait until this process is gone, so once its
            ``atexit`` functions have run, it may exit without further cleanup.
    """

    at_once = True


class Termination:
    """Turns the first SIGTERM into a stop request; a second one ends the process as usual.

    Nothing is changed if the script has its own handler, or does not run in the main thread, nor in processes that the
    script forks: a pool ends its own by SIGTERM.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._pid = os.getpid()
        self._withdraw: Callable[[], None] | None = None

    def wanted(self, by_agent: str) -> StopSource:
        """Return who wants this process to stop, given the agent's reason, if it has one."""
        return StopSource.SIGNAL if self.asked else StopSource.AGENT if by_agent else StopSource.NO

    def watch(self) -> None:
        """Install the handler, unless it is installed already."""
        if self._before is not None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before, self._pid = signal.signal(signal.SIGTERM, self._caught), os.getpid()
            self._withdraw = not_inherited(signal.SIGTERM, self.close)

    def close(self) -> None:
        """Put the default action back, unless the script has installed a handler meanwhile."""
        if self._before is not None:
            if signal.getsignal(signal.SIGTERM) == self._caught:
                signal.signal(signal.SIGTERM, self._before)
            self._before = None
        if self._withdraw is not None:
            self._withdraw()
            self._withdraw = None

    def _caught(self, number: int, frame: FrameType | None) -> None:
        elsewhere = os.getpid() != self._pid
        if elsewhere and signal.getsignal(signal.SIGTERM) != self._caught:
            return  # the script's handler has called the one before it, which would be none
        if self.asked or elsewhere:  # elsewhere: native code has forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True
