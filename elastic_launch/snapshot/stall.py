"""Reads from storage that may hang, such as a network file system whose server is gone.

A read may take any time as long as it makes progress. Needs no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_launch.snapshot.errors import CheckpointReadError
from elastic_launch.snapshot.location import Place, Url

_log = logging.getLogger(__name__)

T = TypeVar("T")

WARN = 10.0
"""Seconds without progress after which a warning names the storage."""

STALL = 60.0
"""Seconds without progress after which a read is given up."""

STALL_URL = 300.0
"""The same behind a URL, where drivers retry by themselves."""


def advanced() -> None:
    """Record progress; a reading function must call this at least every few MiB."""
    thread = threading.current_thread()
    if isinstance(thread, _Reader):
        thread.at = time.monotonic()


def while_advancing(where: Place, function: Callable[[], T], waiting: Callable[[], object] = lambda: None) -> T:
    """Run a function in a thread that reads from storage and calls :func:`advanced`, and return its result.

    ``waiting`` is called every few seconds meanwhile.

    Raises:
        CheckpointReadError: if the function makes no progress; its thread remains until the storage responds.
    """
    results: list[T] = []
    limit = STALL_URL if isinstance(where, Url) else STALL
    reader = _Reader(lambda: results.append(function()))
    reader.start()
    warned = False
    while reader.is_alive():
        idle = time.monotonic() - reader.at
        if idle >= limit:
            problem = f"{where} does not respond: reading made no progress for {limit:g} s."
            raise CheckpointReadError(where, problem, "Check the file system or the service that holds it.")
        if idle >= WARN and not warned:
            warned = True
            text = "%s does not respond: reading has made no progress for %g s; after %g s it is given up"
            _log.warning(text, where, WARN, limit)
        reader.join(min(WARN, (limit if warned else WARN) - idle))
        waiting()
    if reader.error is not None:
        raise reader.error
    return results[0]


class _Reader(threading.Thread):
    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(name="storage", daemon=True)
        self.at = time.monotonic()
        self.error: BaseException | None = None
        self._act = act

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            self.error = error
