"""Where output goes: a console, a file, or either of them line by line."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from elastic_launch.system.private_files import make_private
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch.agent")

LONGEST_LINE = 65536
"""Bytes of an unfinished line that are held; a longer line is passed on in pieces of this length."""

HOLD = 0.2
"""Seconds for which a console waits for the end of a line: ``python -u`` writes lines in pieces."""

_COLOURS = (36, 33, 32, 35, 34)
"""SGR codes that distinguish ranks; red is for errors."""


class Sink(Protocol):
    """Takes bytes until it is closed; never raises if its destination fails."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Console:
    """One of the agent's own streams; it stays open.

    Lines are passed on whole, since other sources write there as well; unfinished lines once they are :data:`HOLD` old.
    So is each state of a progress bar, which begins with a carriage return.

    Args:
        put: writes data to the stream, and may block until there is room.
        unfinished: contains this object while it holds an unfinished line.

    Attributes:
        due: when the unfinished line is to be shown, by the monotonic clock.
    """

    def __init__(self, put: Callable[[bytes], object], unfinished: set[Console]) -> None:
        self.due = 0.0
        self._put = put
        self._unfinished = unfinished
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        end = max(0, data.rfind(b"\n") + 1, data.rfind(b"\r"))
        if len(data) - end > LONGEST_LINE:
            end = len(data)
        if end or not self._held:
            self.due = time.monotonic() + HOLD
        self._pass_on(data, end)

    def show(self) -> None:
        """Pass on the unfinished line."""
        self._pass_on(self._held, len(self._held))

    def close(self) -> None:
        self.show()

    def _pass_on(self, data: bytes, end: int) -> None:
        self._held = data[end:]
        if self._held:
            self._unfinished.add(self)
        else:
            self._unfinished.discard(self)
        if end:
            self._put(data[:end])


class Logged:
    """The launcher's own log lines: prints a helper process' output as such lines. Takes whole lines."""

    def write(self, data: bytes) -> None:
        for line in data.decode(errors="replace").splitlines():
            _log.warning("%s", line.removeprefix("[elastic-launch] "))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Kept:
    """What happened to an agent's log files.

    Attributes:
        any: whether they contain anything.
        complaint: why something could not be written; only the first error is logged, the others would be the same.
    """

    def __init__(self) -> None:
        self.any = False
        self.complaint = ""
        self._hangs = False

    @property
    def useful(self) -> bool:
        """Whether a reader may find something there."""
        return self.any or not self.complaint

    def complain(self, error: OSError) -> None:
        """A write has failed."""
        if not self.complaint:
            self.complaint = str(error)
            _log.warning("the workers' output is not kept in files: %s", error)

    def hang(self) -> None:
        """The file system has accepted no data for some time."""
        if not self._hangs:
            self._hangs = True
            _log.warning("the workers' output is not written to files: the file system does not answer")

    def lost(self, lines: int, seconds: float) -> None:
        """Lines are missing from all files, since no file accepted data for a while."""
        self._hangs = False
        self.complaint = self.complaint or "the file system did not answer"
        _log.warning("%d lines are missing in log files: nothing could be written to them for %.0f s", lines, seconds)


class Appended:
    """A file that is appended to, and created when there is something to write.

    It may be shared with other writers: what one call of :meth:`write` writes stays together.

    Args:
        writer: writes all files of an agent.
        kept: shared by all files of an agent.
    """

    def __init__(self, path: Path, writer: Writer, kept: Kept) -> None:
        self._path = path
        self._writer = writer
        self._kept = kept
        self._file: BinaryIO | None = None
        self._missing = 0  # lines
        self._whole = True  # the last data ended with a newline

    def write(self, data: bytes) -> None:
        whole = data
        if self._missing:
            gap = b"[elastic-launch] %d lines are missing here\n" % self._missing
            whole = (gap if self._whole else b"\n" + gap) + data
        if self._writer.stuck:
            self._kept.hang()
        if self._writer.put(self._append, whole, wait=True):
            self._missing, self._whole = 0, data.endswith(b"\n")
        else:
            self._missing += data.count(b"\n") or 1

    def close(self) -> None:
        self._writer.put(self._close)

    def _append(self, data: bytes) -> None:
        try:
            if self._file is None:
                make_private(self._path.parent)
                # Links are followed: the user may have named this file.
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._file = os.fdopen(descriptor, "ab", 0)
            rest = data
            while rest:  # a disk that fills up takes a part, and says only to the next write that it is full
                rest = rest[os.write(self._file.fileno(), rest) :]
                self._kept.any = True
        except OSError as error:  # a full disk must not stop training
            self._kept.complain(error)

    def _close(self, data: bytes) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # network file systems may report a full disk only now (close(2))
                self._kept.complain(error)


class Lines:
    """Passes on whole lines, each with a prefix; with filters, only lines that contain one of them.

    A carriage return ends a line as well. Held data is not scanned again, however many pieces a line comes in.

    Lines are batched up to what a pipe takes in one piece: the agent's own lines come from other threads.
    """

    def __init__(self, sink: Sink, prefix: str, filters: Sequence[str] = ()) -> None:
        self._sink = sink
        self._prefix = prefix.encode(errors="surrogateescape")
        self._filters = [text.encode(errors="surrogateescape") for text in filters]
        self._held: list[bytes] = []
        self._size = 0
        self._returned = False  # the current line began with a carriage return, and is empty so far

    def write(self, data: bytes) -> None:
        self._pass_on(self._cut(data))

    def close(self) -> None:
        if self._held:
            self._pass_on(self._taken(b""))
        self._sink.close()

    def _cut(self, data: bytes) -> Iterator[bytes]:
        *whole, rest = data.split(b"\n")
        for text in whole:
            last = yield from self._states(text)
            if last or self._held or not self._returned:
                yield from self._taken(last)
            self._returned = False
        last = yield from self._states(rest)
        if last:
            self._held.append(last)
            self._size += len(last)
        if self._size > LONGEST_LINE:
            *pieces, last = self._taken(b"")
            yield from pieces
            self._held, self._size = [last], len(last)

    def _states(self, text: bytes) -> Generator[bytes, None, bytes]:
        """A progress bar returns to the line's start and continues: each state becomes a line, as with torchrun."""
        *states, last = text.split(b"\r")
        for state in states:
            if state or self._held:
                yield from self._taken(state)
                self._returned = True
        return last

    def _taken(self, end: bytes) -> Iterator[bytes]:
        line = b"".join([*self._held, end]) if self._held else end
        self._held, self._size = [], 0
        for start in range(0, len(line) or 1, LONGEST_LINE):
            yield line[start : start + LONGEST_LINE]

    def _pass_on(self, lines: Iterable[bytes]) -> None:
        batch: list[bytes] = []
        size = 0
        for line in lines:
            if self._filters and not any(text in line for text in self._filters):
                continue
            if batch and size + len(self._prefix) + len(line) + 1 > select.PIPE_BUF:
                self._sink.write(b"".join(batch))
                batch, size = [], 0
            batch += (self._prefix, line, b"\n")
            size += len(self._prefix) + len(line) + 1
        if batch:
            self._sink.write(b"".join(batch))


def has_colours(descriptor: int) -> bool:
    """Whether colours may be written: to a terminal with colours, unless NO_COLOR is set (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return os.isatty(descriptor)


def painted(text: str, code: int) -> str:
    """Return text in a colour, given by its SGR code (ECMA-48)."""
    return f"\x1b[{code}m{text}\x1b[0m"


def colour_of(rank: int) -> int:
    return _COLOURS[rank % len(_COLOURS)]
