"""Ends this process when a collective of a GPU outlasts its timeout.

Torch's watchdog does so, but not where it must leave errors alone so that communicators can be aborted
(TORCH_NCCL_ASYNC_ERROR_HANDLING=0). It still notes the timeout then, which ``Backend.get_error()`` returns.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

_log = logging.getLogger(__name__)

_EVERY = 1.0
"""Seconds between two looks."""

_CLOSE = 5.0
"""Seconds that :meth:`TimeoutWatch.close` waits for the thread."""


def _abort() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


class TimeoutWatch:
    """Looks at process groups, in a thread of its own, until :meth:`close`.

    Args:
        backends: returns the backends to look at.
        ends: called once, when a collective of one of them has outlasted its timeout; ends the process by default.
    """

    def __init__(
        self, backends: Callable[[], Iterable[Any]], ends: Callable[[], None] = _abort, *, every: float = _EVERY
    ) -> None:
        self._backends = backends
        self._ends = ends
        self._every = every
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="timeouts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._thread.join(_CLOSE)

    def _look(self) -> None:
        while not self._closed.wait(self._every):
            if self._any_timed_out():
                _log.error("a collective has outlasted the timeout of its process group: this process is ended")
                self._ends()
                return

    def _any_timed_out(self) -> bool:
        with suppress(RuntimeError):  # groups may be formed or destroyed meanwhile
            return any(map(_timed_out, self._backends()))
        return False


def _timed_out(backend: Any) -> bool:
    with suppress(AttributeError, RuntimeError):  # not every backend knows
        return bool(backend.get_error().name == "TIMEOUT")
    return False
