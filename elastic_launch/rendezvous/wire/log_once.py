"""Logging each kind of message once, so that a port scanner cannot fill a log."""

from __future__ import annotations

import logging


class LogOnce:
    """Logs a warning for the first problem of each kind; repetitions appear with ``LOGLEVEL=DEBUG``."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def warn(self, kind: str, text: str, *arguments: object) -> None:
        if kind in self._told:
            self._log.debug(text, *arguments)
            return
        self._told.add(kind)
        self._log.warning(f"{text} (said once)", *arguments)
