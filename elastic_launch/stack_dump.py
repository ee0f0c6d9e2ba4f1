"""Lets a process' agent see where its threads stand: on a signal, faulthandler writes their stacks to a file.

It runs in the signal's handler, so it needs no lock of the interpreter, and works in a process that is deadlocked. The
signal is one that is ignored by processes without a handler.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from typing import IO

from elastic_launch.system.forks import not_inherited
from elastic_launch.system.private_files import open_private

SIGNAL = signal.SIGURG

STACKS = "stacks.txt"
"""Name of the file, beside the worker's error file."""

_open: list[IO[bytes]] = []


def dump_stacks_on_signal() -> None:
    """From now on, write the stacks of this process, not of those that it forks, if an agent has started it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file or _open or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    # If the file cannot be opened, no stacks are written. The training does not depend on them.
    with suppress(OSError, ValueError):
        path = os.path.join(os.path.dirname(error_file), STACKS)
        file = open(open_private(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)  # noqa: SIM115 - until the end
        _open.append(file)
        faulthandler.register(SIGNAL, file=file)
        not_inherited(SIGNAL, _no_longer)


def _no_longer() -> None:
    if signal.getsignal(SIGNAL) is signal.SIG_DFL:  # Python does not know of handlers of faulthandler
        faulthandler.unregister(SIGNAL)
    _open.pop().close()
