"""The launcher's own lines."""

from __future__ import annotations

import logging
import os
import sys

from elastic_agents.sinks import has_colours, painted

__all__ = ["configure_logging"]

_log = logging.getLogger("elastic_launch")

_COLOURS = {logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
"""SGR codes by level; other lines are as they are."""


def configure_logging() -> None:
    """Write the launcher's lines to stderr, from the level on that LOGLEVEL names."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(coloured=has_colours(2)))
    _log.handlers[:] = [handler]
    _log.propagate = False
    wanted = os.environ.get("LOGLEVEL") or "INFO"
    levels = logging.getLevelNamesMapping()
    _log.setLevel(levels.get(wanted.upper(), logging.INFO))
    if wanted.upper() not in levels:
        _log.warning("LOGLEVEL=%s is no level: INFO is used; known: DEBUG, INFO, WARNING, ERROR, CRITICAL", wanted)


class _Formatter(logging.Formatter):
    """Puts the launcher's name before each message, in the colour of its level."""

    def __init__(self, *, coloured: bool) -> None:
        super().__init__("%(message)s")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        name, colour = "[elastic-launch]", _COLOURS.get(record.levelno)
        if self._coloured and colour is not None:
            name = painted(name, colour)
        return f"{name} {super().format(record)}"
