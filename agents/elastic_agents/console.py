"""The agent's own console: the format of its lines, and the writers that all console output goes through."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from elastic_agents.output_sinks import has_colours, painted
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.events.incidents import Incidents
from elastic_launch.system.plain_text import plain
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch")

_LEVELS = logging.getLevelNamesMapping()

_COLOURS = {logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
"""SGR codes by level; other lines are not coloured."""

LIMIT = 1024 * 1024
"""Bytes queued for a console at most, and as many again for the launcher's own lines."""

PATIENCE = 5.0
"""Seconds after which a console that accepts no data counts as unread."""

_UNREAD = (errno.EPIPE, errno.EBADF, errno.EIO)
"""Errors of a console that has no reader any more, such as that of a closed terminal: no reader misses a line."""

TAIL = 64
"""Bytes that are remembered: longer than an escape sequence of a terminal."""

PIECE = 16384
"""Bytes per write: less than a pipe holds, so that a slow reader can be told from one that has stopped."""


class _Source:
    """One source of console output.

    Attributes:
        cut: whether another source has ended its last line, which had no newline.
    """

    def __init__(self) -> None:
        self.cut = False


class _Cursor:
    """Where the next byte on a console would appear: output from another source begins at the start of a line.

    Attributes:
        tail: the last bytes.
        failed: whether it has been logged that the console cannot be written.
    """

    def __init__(self) -> None:
        self.failed = False
        self.tail = b""
        self._source: _Source | None = None  # of the current line; None at its start
        self._returned = False  # the current line has a carriage return: it is a progress bar

    def placed(self, source: _Source, data: bytes) -> bytes:
        """Return data from a source as it must be written now."""
        if source.cut:
            source.cut = False
            data = data.removeprefix(b"\n")
        if not data:
            return b""
        start = b""
        if self._source is not None and self._source is not source:
            self._source.cut = True
            # Two progress bars overwrite each other in one line, as they do without a launcher.
            start = b"" if self._returned and data.startswith(b"\r") else b"\n"
        *whole, last = data.rsplit(b"\n", 1)
        if whole or start:
            self._returned = False
        self._returned = self._returned or b"\r" in last
        self._source = source if last else None
        self.tail = (self.tail + data[-TAIL:])[-TAIL:]
        return start + data


class Consoles:
    """This process' output to its standard streams: one thread each, or one for both if they are the same file."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int, int], tuple[Writer, _Cursor]] = {}

    def put_to(self, descriptor: int, *, wait: bool) -> Callable[[bytes], bool]:
        """Return a function that queues one source's data for a descriptor, see :meth:`Writer.put`."""
        writer, cursor = self._writer_of(descriptor)
        return partial(writer.put, partial(_write, writer, descriptor, cursor, _Source()), wait=wait)

    def draw(self, descriptor: int, picture: Callable[[bytes], bytes]) -> bool:
        """Have a descriptor's thread write a picture, which leaves the cursor where it is; return whether it will.

        Args:
            picture: called in that thread with the last bytes on this console.
        """
        writer, cursor = self._writer_of(descriptor)
        return writer.put(lambda _: _pour(writer, descriptor, cursor, picture(cursor.tail)))

    def hurry(self) -> None:
        """From now on, no source waits for room, see :meth:`Writer.hurry`."""
        for writer, _ in self._writers.values():
            writer.hurry()

    def flush(self) -> bool:
        """Wait until all is written, as long as the consoles are being read; return whether it is."""
        return all(writer.flush() for writer, _ in self._writers.values())

    def close(self) -> None:
        """Write what is left, as long as the consoles are being read."""
        writers, self._writers = self._writers, {}
        for writer, _ in writers.values():
            writer.close()

    def _writer_of(self, descriptor: int) -> tuple[Writer, _Cursor]:
        try:
            found = os.fstat(descriptor)
            key = (found.st_dev, found.st_ino)
        except OSError:  # closed: the write itself will fail later, so do not fail here
            key = (-1, descriptor)
        if key not in self._writers:
            name = _name(descriptor)
            lost = partial(_tell_lost, name)
            writer = Writer(f"console {name}", limit=LIMIT, patience=PATIENCE, lost=lost)
            self._writers[key] = (writer, _Cursor())
        return self._writers[key]


def _write(writer: Writer, descriptor: int, cursor: _Cursor, source: _Source, data: bytes) -> None:
    _pour(writer, descriptor, cursor, cursor.placed(source, data))


def _pour(writer: Writer, descriptor: int, cursor: _Cursor, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view[:PIECE]) :]
            writer.progress()
        except BlockingIOError:  # a process that shares the console has made it non-blocking; keep the data
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()
        except OSError as error:
            if descriptor != 2 and error.errno not in _UNREAD and not cursor.failed:
                cursor.failed = True
                _log.warning("%s cannot be written, and loses lines: %s (said once)", _name(descriptor), error)
            return  # the log files have the output


def _name(descriptor: int) -> str:
    return {1: "stdout", 2: "stderr"}.get(descriptor, str(descriptor))


def _tell_lost(name: str, lines: int, seconds: float) -> None:
    _log.warning("%d lines were dropped here: %s was not read for %.0f s", lines, name, seconds)


def configure_logging(
    form: str = "time",
    *,
    node: str = "",
    consoles: Consoles | None = None,
    quiet: bool = False,
    level: int | None = None,
) -> None:
    """Write the launcher's lines to stderr, from a level on: the given one, else the one that LOGLEVEL names.

    Args:
        form: one of :data:`elastic_launch.config.output.LOG_FORMATS`.
        node: id of this node.
        consoles: write the lines; without them, the logging thread writes each line at once.
        quiet: without LOGLEVEL, only warnings and errors.
        level: level of the lines; None: as described above.
    """
    handler: logging.Handler = logging.StreamHandler() if consoles is None else _Handler(consoles)
    handler.setFormatter(formatter(form, node))
    _log.handlers[:] = [handler]
    _log.propagate = False
    default = "WARNING" if quiet else "INFO"
    named = _LEVELS.get((os.environ.get("LOGLEVEL") or default).upper(), _LEVELS[default])
    _log.setLevel(named if level is None else level)
    _name_level(os.environ.get("LOGLEVEL"), named)


def formatter(form: str, node: str) -> logging.Formatter:
    """Return what makes the launcher's lines; see :func:`configure_logging`."""
    return _Json(node) if form == "json" else _Text(stamped=form == "time")


def _name_level(text: str | None, level: int) -> None:
    """Make a text that LOGLEVEL has the name of a level in this process, too.

    torch.distributed.elastic reads the variable when it is imported, and fails by any other text, as ``info``.
    """
    if text is not None and text not in _LEVELS:
        name = logging.getLevelName(level)
        logging.addLevelName(level, text)
        logging.addLevelName(level, name)  # which is the one that is shown


def announce(config: LaunchConfig) -> None:
    """Print what starts, and where its files go."""
    wanted = os.environ.get("LOGLEVEL") or "INFO"
    if wanted.upper() not in _LEVELS:
        default = logging.getLevelName(_log.level)
        _log.warning(
            "LOGLEVEL=%s is not a level: %s is used; known: DEBUG, INFO, WARNING, ERROR, CRITICAL", wanted, default
        )
    if config.found_out:
        _log.info("%s", config.found_out)
    kept = ", logs in" if config.output.keep else "; output is not kept in files; events in"
    _log.info("%s%s %s", config.title, kept, config.run_directory)
    if ignored := ", ".join(number.name for number in config.signals.ignored):
        text = "signals ignored at the start (by nohup, or in a shell's background) stay ignored: %s"
        _log.info(text, ignored)


def name_incidents(incidents: Incidents) -> None:
    """Have each of the launcher's lines name the incident that is under way, or that it is about, from now on."""

    def stamp(record: logging.LogRecord) -> bool:
        if not hasattr(record, "incident"):
            record.incident = incidents.now
        return True

    for handler in _log.handlers:
        handler.addFilter(stamp)


class _Handler(logging.Handler):
    """Never blocks: other components may depend on the thread that logs."""

    def __init__(self, consoles: Consoles) -> None:
        super().__init__()
        self._put = consoles.put_to(2, wait=False)

    def emit(self, record: logging.LogRecord) -> None:
        self._put(f"{self.format(record)}\n".encode(errors="backslashreplace"))


class _Text(logging.Formatter):
    """Puts the launcher's name before each message, in the colour of its level, and the time before that.

    Much of the text comes from workers and other nodes, and must not move the terminal's cursor.

    Args:
        stamped: whether to print the time; in full, except on a terminal.
    """

    def __init__(self, *, stamped: bool) -> None:
        super().__init__("%(message)s")
        self._stamped = stamped
        self._coloured = has_colours(2)
        self._short = os.isatty(2)

    def format(self, record: logging.LogRecord) -> str:
        name, colour = "[elastic-launch]", _COLOURS.get(record.levelno)
        if self._coloured and colour is not None:
            name = painted(name, colour)
        text, incident = plain(super().format(record)), getattr(record, "incident", None)
        about = f"incident {incident}: "
        known = incident is None or text.startswith(about)
        return f"{self._time(record.created)}{name} {'' if known else about}{text}"

    def _time(self, created: float) -> str:
        if not self._stamped:
            return ""
        if self._short:
            return time.strftime("%H:%M:%S ", time.localtime(created))
        return f"{datetime.fromtimestamp(created, UTC).isoformat(timespec='milliseconds')[:-6]}Z "


class _Json(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, node: str) -> None:
        super().__init__("%(message)s")
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found = {
            "time": moment,
            "level": record.levelname,
            "node": self._node,
            "message": plain(super().format(record)),
        }
        if (incident := getattr(record, "incident", None)) is not None:
            found["incident"] = incident
        return json.dumps(found)
