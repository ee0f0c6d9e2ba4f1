"""The workers' output: routed to the console and to files; the last lines are kept for failure reports."""

from __future__ import annotations

import fcntl
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from elastic_agents.console import Consoles
from elastic_agents.output_sinks import Appended, Console, Kept, Lines, Logged, Sink, colour_of, has_colours, painted
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.output import Route
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.wake import Waker
from elastic_launch.system.writer_thread import Writer

TAIL_LINES, PAGE_LINES = 20, 200
"""Last lines of a stream for failure reports, and those for the page of the run."""

TAIL_LINE_BYTES = 2000
HEAD_BYTES = 1400
CUT = b" [...] "

LIMIT = 16 * 1024 * 1024
"""Bytes queued for log files at most."""

PATIENCE = 10.0
"""Seconds after which log files that accept no data no longer hold up the workers."""


class Stream:
    """One worker's stdout or stderr."""

    def __init__(self, source: int, sinks: Sequence[Sink]) -> None:
        self.source = source
        self.ended = threading.Event()
        self._sinks = sinks
        self._clock = MonotonicClock()
        self._lines: deque[tuple[float, bytes]] = deque(maxlen=PAGE_LINES)
        self._partial = b""

    def write(self, data: bytes) -> None:
        """Pass data on, and keep the last lines."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        now = self._clock.now()
        self._lines.extend((now, _shortened(line)) for line in lines)
        self._partial = _shortened(self._partial)
        for sink in self._sinks:
            sink.write(data)

    def tail(self, most: int = TAIL_LINES) -> tuple[tuple[float, str], ...]:
        """Return so many last lines, oldest first, each with its arrival time by the agent's clock."""
        lines = list(self._lines)
        if self._partial:
            lines.append((self._clock.now(), self._partial))
        return tuple((at, line.decode(errors="replace")) for at, line in lines[-most:])

    def close(self) -> None:
        """Called by the output pump at the end of the stream."""
        try:
            os.close(self.source)
            for sink in self._sinks:
                sink.close()
        finally:
            self.ended.set()


class OutputPump:
    """A thread that moves the workers' output.

    It waits for consoles and files, and so do the workers, as long as these accept data.

    Args:
        consoles: the agent's own.
    """

    def __init__(self, consoles: Consoles) -> None:
        self._consoles = consoles
        self.kept = Kept()
        self._files = Writer("logs", limit=LIMIT, patience=PATIENCE, lost=self.kept.lost)
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._unfinished: set[Console] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = VitalThread(self._run, "output")
        self._thread.start()

    def open(self, console: int, route: Route) -> tuple[Stream, int]:
        """Return a stream and the descriptor for the worker to write to, which the caller closes after the start."""
        return self._open(self._sinks(console, route))

    def open_log(self) -> int:
        """Return a descriptor whose lines become the launcher's own log lines; the caller closes it after the start."""
        _, sink = self._open([Lines(Logged(), "")])
        return sink

    def flush(self) -> bool:
        """Wait until what has been read so far is written; return whether that succeeded, see :meth:`Writer.flush`."""
        return self._files.flush() & self._consoles.flush()

    def close(self, timeout: float = 1.0) -> None:
        """Stop once all streams have ended, or after the timeout; then wait as long as the files accept data."""
        with self._lock:
            streams = [key.data for key in self._selector.get_map().values() if key.data is not None]
        deadline = time.monotonic() + timeout
        for stream in streams:  # daemons that workers have left behind may hold some open
            stream.ended.wait(max(0.0, deadline - time.monotonic()))
        self._closed = True
        # The thread may wait for room for what it has read, and what a pipe still holds would get into no file.
        self._files.hurry()
        self._consoles.hurry()
        self._waker.wake()
        self._thread.join(10)
        if not self._thread.is_alive():  # else it may still use them
            self._selector.close()
            self._waker.close()
        self._files.close()

    def _open(self, sinks: list[Sink]) -> tuple[Stream, int]:
        source, sink = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(source, False)
        stream = Stream(source, sinks)
        with self._lock:
            self._selector.register(source, selectors.EVENT_READ, stream)
        self._waker.wake()
        return stream, sink

    def _sinks(self, console: int, route: Route) -> list[Sink]:
        sinks: list[Sink] = []  # the files first: a console may be read slowly
        if route.path is not None:
            sinks.append(Appended(route.path, self._files, self.kept))
        if route.matching is not None:
            sinks.append(Lines(Appended(route.matching, self._files, self.kept), route.header, route.filters))
        if route.console:
            prefix = route.prefix
            if prefix and has_colours(console):
                prefix = painted(prefix, colour_of(route.rank))
            shown = Console(self._consoles.put_to(console, wait=True), self._unfinished)
            sinks.append(Lines(shown, prefix) if prefix else shown)
        return sinks

    def _run(self) -> None:
        while not self._closed:
            due = min((console.due for console in self._unfinished), default=float("inf"))
            for key, _ in self._selector.select(min(60.0, max(0.0, due - time.monotonic()))):
                if key.data is None:
                    self._waker.clear()
                else:
                    self._move(key.data)
            now = time.monotonic()
            for console in [console for console in self._unfinished if console.due <= now]:
                console.show()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._move_last(key.data)

    def _move(self, stream: Stream) -> None:
        try:
            data = os.read(stream.source, 65536)
        except BlockingIOError:
            return
        if data:
            stream.write(data)
            return
        with self._lock:
            self._selector.unregister(stream.source)
        stream.close()

    def _move_last(self, stream: Stream) -> None:
        """Move what the pipe holds, at most once: a daemon may go on writing."""
        with suppress(BlockingIOError):
            stream.write(os.read(stream.source, fcntl.fcntl(stream.source, fcntl.F_GETPIPE_SZ)))
        stream.close()


def _shortened(line: bytes) -> bytes:
    """Cut the middle out of a long line, as an exception begins with its type; also if it was cut before, and grew."""
    if len(line) <= TAIL_LINE_BYTES:
        return line
    head, rest = line[:HEAD_BYTES], line[HEAD_BYTES:].removeprefix(CUT)
    return head + CUT + rest[HEAD_BYTES + len(CUT) - TAIL_LINE_BYTES :]
