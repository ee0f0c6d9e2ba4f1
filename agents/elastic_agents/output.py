"""The workers' output: to the console as it comes, to files; the last lines of stderr are kept for failure reports."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

__all__ = ["OutputPump", "Stream"]

TAIL_LINES = 20
TAIL_LINE_BYTES = 2000


class Stream:
    """One worker's stdout or stderr."""

    def __init__(self, source: int, console: int, path: Path) -> None:
        self.source = source
        self.console = console
        self.path = path
        self.ended = threading.Event()
        self._file: BinaryIO | None = None
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""

    def write(self, data: bytes) -> None:
        """Pass data on and remember its end."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(line[-TAIL_LINE_BYTES:] for line in lines)
        self._partial = self._partial[-TAIL_LINE_BYTES:]
        _write_all(self.console, data)
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            return  # a full disk must not stop training; the console has it

    def tail(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        lines = [*self._lines, self._partial] if self._partial else list(self._lines)
        return tuple(line.decode(errors="replace") for line in lines[-TAIL_LINES:])

    def close(self) -> None:
        """Called by the pump at the end of the stream."""
        os.close(self.source)
        if self._file is not None:
            self._file.close()
        self.ended.set()


class OutputPump:
    """A thread that moves the workers' output."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def open(self, console: int, path: Path) -> tuple[Stream, int]:
        """Return a stream and the descriptor for the worker to write to, which the caller closes after the start."""
        source, sink = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(source, False)
        stream = Stream(source, console, path)
        with self._lock:
            self._selector.register(source, selectors.EVENT_READ, stream)
        self._wake_out.send(b"x")
        return stream, sink

    def close(self, timeout: float = 1.0) -> None:
        """Stop once all streams have ended, or after timeout seconds."""
        with self._lock:
            streams = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for stream in streams:
            stream.ended.wait(timeout)
        self._closed = True
        self._wake_out.send(b"x")
        self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(60.0):
                if key.data is None:
                    self._wake_in.recv(4096)
                else:
                    self._move(key.data)

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


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return  # nobody reads the console any more; the files have it
