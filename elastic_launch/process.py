"""What a program of this project is as a process: its standard streams, its first signals, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from elastic_launch.errors import ExitCode
from elastic_launch.termination import write_termination_log

__all__ = ["GIVEN_UP", "exiting"]

GIVEN_UP = "c10d-call"
"""Name of threads in calls that are not waited for beyond their time."""


def exiting(act: Callable[[], int]) -> NoReturn:
    """Exit with what act returns, or as after Ctrl-C; for whatever has started this process, and as whatever it has."""
    _open_streams()
    if os.getpid() == 1:
        _end_by_signals()
    try:
        code = act()
    except KeyboardInterrupt:
        # The agent has handlers of its own: this came before there was anything to clean up.
        code = ExitCode.INTERRUPTED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End with a code.

    A thread that was given up would abort the process if its call returned while the interpreter takes itself to
    pieces: the call is C++, and forbids that its thread is unwound.
    """
    if any(thread.name == GIVEN_UP for thread in threading.enumerate()):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _open_streams() -> None:
    """Open those of descriptors 0 to 2 that were closed: else a socket of ours gets the number, and workers take it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _end_by_signals() -> None:
    """Let signals end process 1 as they would any other, before and after the agent's handlers (pid_namespaces(7))."""

    def end(number: int, frame: object) -> NoReturn:
        try:
            text = f"exit code {128 + number}: stopped by {signal.Signals(number).name}\n"
            write_termination_log(text, unless_written=True)  # the agent knows better, if it has said something
        finally:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
