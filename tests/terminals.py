"""A terminal for tests: a real pseudo-terminal, whose screen pyte keeps."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence

import pyte
from harness import tree


class Terminal:
    """Runs one command on a pseudo-terminal that it controls, and reads what that shows.

    Attributes:
        raw: all bytes that the terminal got.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], rows: int = 24, columns: int = 100) -> None:
        self.raw = b""
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.ours, theirs = pty.openpty()
        self._set_size(rows, columns)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CONTROLLED, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": "", "PYTHONUNBUFFERED": "1", **env},
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.ours, 65536)
            except OSError:  # all of its processes have ended
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    @property
    def lines(self) -> list[str]:
        """What the screen shows now."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    @property
    def scrolled(self) -> list[str]:
        """All lines: those that have left the screen at its top, and those on it."""
        with self._lock:
            gone = [
                "".join(row[x].data for x in range(self._screen.columns)).rstrip() for row in self._screen.history.top
            ]
            return [*gone, *(line.rstrip() for line in self._screen.display)]

    @property
    def shown(self) -> str:
        return "\n".join(self.lines)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size, as a window does."""
        with self._lock:
            self._screen.resize(rows, columns)
        self._set_size(rows, columns)

    def type(self, data: bytes) -> None:
        os.write(self.ours, data)

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, array.array("H", [rows, columns, 0, 0]))

    def close(self) -> None:
        for pid in tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        os.close(self.ours)


_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "elastic_launch", *sys.argv[1:]])
"""


@contextlib.contextmanager
def terminal(*command: str, rows: int = 24, columns: int = 100, **env: str) -> Iterator[Terminal]:
    found = Terminal(command, env, rows, columns)
    try:
        yield found
    finally:
        found.close()
