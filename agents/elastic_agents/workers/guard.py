"""The agent's side of the guard: two small processes that kill the workers' sessions if the agent is killed.

Each works independently: if one is killed and the agent dies before it is replaced, the other one is left.

The agent writes ``+SID``, ``-SID`` and ``/DIRECTORY`` lines; end of file without ``bye`` means that the agent died.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from elastic_launch.system.threads import VitalThread

_log = logging.getLogger("elastic_launch.agent")

SETTLED = 1.0
"""Minimum lifetime in seconds of a guard that is replaced at once."""

LONGEST_DELAY = 10.0
"""Maximum seconds between two attempts to start a guard."""


PATIENCE = 10.0
"""Seconds that a dismissed guard has to exit; then it is killed."""


class Guard:
    """Owns the guard's two processes.

    Raises:
        OSError: if they cannot be started.
    """

    def __init__(self) -> None:
        first = _Watcher()
        try:
            second = _Watcher()
        except OSError:
            first.close()
            raise
        self._watchers = (first, second)

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the current processes."""
        return tuple(watcher.pid for watcher in self._watchers)

    def add(self, sid: int) -> None:
        """Kill this session if the agent dies."""
        self._tell(f"+{sid}")

    def remove(self, sid: int) -> None:
        """Forget this session: it has ended."""
        self._tell(f"-{sid}")

    def add_directory(self, path: Path) -> None:
        """Remove this directory if the agent dies."""
        self._tell(f"{path}")

    def close(self) -> None:
        """Dismiss the guard."""
        for watcher in self._watchers:
            watcher.dismiss()
        for watcher in self._watchers:
            watcher.close()

    def _tell(self, line: str) -> None:
        for watcher in self._watchers:
            watcher.tell(line)


class _Watcher:
    """Owns one process: if it dies or stops reading, it is replaced, and the new one receives the same lines.

    Raises:
        OSError: if the first process cannot be started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: set[str] = set()  # that a replacement receives
        self._closing = threading.Event()
        self._process = _start()
        self._thread = VitalThread(self._replace_dead, "guard")
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        with self._lock:
            if line.startswith("-"):
                self._lines.discard(f"+{line[1:]}")
            else:
                self._lines.add(line)
            self._write(line)

    def dismiss(self) -> None:
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._write("bye")
                _stdin(self._process).close()

    def close(self) -> None:
        self.dismiss()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join(PATIENCE)

    def _replace_dead(self) -> None:
        delay = 0.0
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if self._closing.is_set():
                return
            _log.warning("a guard process, pid %d, ended with %d; another one takes its place", self._process.pid, code)
            delay = 0.0 if time.monotonic() - began >= SETTLED else max(SETTLED, delay)
            while not self._replaced(delay):
                delay = min(max(SETTLED, 2 * delay), LONGEST_DELAY)
                if self._closing.is_set():
                    return

    def _replaced(self, delay: float) -> bool:
        """Start another guard after a delay; return whether that succeeded."""
        if self._closing.wait(delay):
            return False
        try:
            process = _start()
        except OSError as error:
            _log.warning("a guard process cannot be started (%s); this agent tries again", error)
            return False
        with self._lock:
            dead, self._process = self._process, process
            if self._closing.is_set():  # the goodbye went to the previous process
                _stdin(process).write(b"bye\n")
                _stdin(process).close()
            else:
                _stdin(dead).close()
                for line in self._lines:
                    self._write(line)
        return True

    def _write(self, line: str) -> None:
        try:
            written = _stdin(self._process).write(f"{line}\n".encode())
        except BrokenPipeError:
            return  # it has died; its replacement receives everything
        if written is None:
            self._process.kill()  # it is stopped: the pipe is full, and it has not read


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({root!r}); from elastic_agents.workers.guard_process import watch; watch(0)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # It must find its shared libraries, and must not see the agent's secrets.
        env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
        start_new_session=True,
    )
    os.set_blocking(_stdin(process).fileno(), False)
    return process


def _stdin(process: subprocess.Popen[bytes]) -> io.RawIOBase:
    assert isinstance(process.stdin, io.RawIOBase)
    return process.stdin
