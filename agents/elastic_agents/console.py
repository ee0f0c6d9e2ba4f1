"""The launcher's own lines."""

from __future__ import annotations

import logging
import os
import sys

from elastic_agents.sinks import has_colours, painted
from elastic_launch.config import LaunchConfig
from elastic_launch.plain_text import plain

__all__ = ["announce", "configure_logging"]

_log = logging.getLogger("elastic_launch")

_COLOURS = {logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
"""SGR codes by level; other lines are as they are."""


def configure_logging(*, complain: bool = True) -> None:
    """Write the launcher's lines to stderr, from the level on that LOGLEVEL names.

    Args:
        complain: say so if it names none.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(coloured=has_colours(2)))
    _log.handlers[:] = [handler]
    _log.propagate = False
    wanted = os.environ.get("LOGLEVEL") or "INFO"
    levels = logging.getLevelNamesMapping()
    _log.setLevel(levels.get(wanted.upper(), logging.INFO))
    if complain and wanted.upper() not in levels:
        _log.warning("LOGLEVEL=%s is no level: INFO is used; known: DEBUG, INFO, WARNING, ERROR, CRITICAL", wanted)


def announce(config: LaunchConfig) -> None:
    """Say what begins, and where its files go."""
    if config.found_out:
        _log.info("%s", config.found_out)
    kept = ", logs in" if config.output.keep else "; output is not kept in files; events in"
    _log.info("run %s%s %s", config.run_id, kept, config.run_directory)
    if ignored := ", ".join(number.name for number in config.signals.ignored):
        text = "%s stays ignored, as this process was started (by nohup, or in a shell's background)"
        _log.info(text, ignored)


class _Formatter(logging.Formatter):
    """Puts the launcher's name before each message, in the colour of its level.

    Much of what is told comes from workers and other nodes, and must not move the terminal's cursor.
    """

    def __init__(self, *, coloured: bool) -> None:
        super().__init__("%(message)s")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        name, colour = "[elastic-launch]", _COLOURS.get(record.levelno)
        if self._coloured and colour is not None:
            name = painted(name, colour)
        return f"{name} {plain(super().format(record))}"
