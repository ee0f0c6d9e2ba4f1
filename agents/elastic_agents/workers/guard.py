"""The agent's side of the guard: two small processes that kill the workers' sessions if the agent is killed.

They also stop them if the agent does not renew its lease (:mod:`elastic_agents.workers.lease`).

Each works independently: if one is killed and the agent dies before it is replaced, the other one is left.

The agent writes ``+SID``, ``-SID``, ``/DIRECTORY`` and ``=TIME`` lines, the last for a lease; end of file without
``bye`` means that the agent died. A guard process writes lines with the time and the pids that it stops.
"""

from __future__ import annotations

import io
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_launch.system.threads import VitalThread

_log = logging.getLogger("elastic_launch.agent")

SETTLED = 1.0
"""Minimum lifetime in seconds of a guard that is replaced at once."""

LONGEST_DELAY = 10.0
"""Maximum seconds between two attempts to start a guard."""


PATIENCE = 10.0
"""Seconds that a dismissed guard has to exit; then it is killed."""


OnStopped = Callable[[float, tuple[int, ...]], object]


class Guard:
    """Owns the guard's two processes.

    Args:
        stopped: called with the time by the host's clock and the pids of processes that the guard stops, before it does
            so and again afterwards; from threads of this object.

    Raises:
        OSError: if they cannot be started.
    """

    def __init__(self, stopped: OnStopped = lambda at, pids: None) -> None:
        first = _Watcher(stopped)
        try:
            second = _Watcher(stopped)
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

    def lease(self, until: float) -> None:
        """Stop all sessions at this time by the host's clock, unless another lease is granted before."""
        self._tell(f"={until!r}")

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

    def __init__(self, stopped: OnStopped) -> None:
        self._stopped = stopped
        self._lock = threading.Lock()
        self._lines: set[str] = set()  # that a replacement receives
        self._lease = ""  # likewise
        self._closing = threading.Event()
        self._process = _start()
        self._thread = VitalThread(self._replace_dead, "guard")
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.popen.pid

    def tell(self, line: str) -> None:
        with self._lock:
            if line.startswith("-"):
                self._lines.discard(f"+{line[1:]}")
            elif line.startswith("="):
                self._lease = line
            else:
                self._lines.add(line)
            self._write(line)

    def dismiss(self) -> None:
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._write("bye")
                self._process.stdin.close()

    def close(self) -> None:
        self.dismiss()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._process.popen.kill()
            self._thread.join(PATIENCE)

    def _replace_dead(self) -> None:
        delay = 0.0
        while True:
            began = time.monotonic()
            code = self._followed()
            if self._closing.is_set():
                return
            _log.warning("a guard process, pid %d, ended with %d; another one takes its place", self.pid, code)
            delay = 0.0 if time.monotonic() - began >= SETTLED else max(SETTLED, delay)
            while not self._replaced(delay):
                delay = min(max(SETTLED, 2 * delay), LONGEST_DELAY)
                if self._closing.is_set():
                    return

    def _followed(self) -> int:
        """Pass on what the process reports, until it ends; return its exit code."""
        process, pending = self._process, b""
        ready = select.poll()
        ready.register(process.end, select.POLLIN)
        ready.register(process.stdout, select.POLLIN)
        with process.stdout:
            while True:
                found = {descriptor for descriptor, _ in ready.poll()}
                if process.stdout.fileno() not in found:
                    os.close(process.end)
                    return process.popen.wait()
                if not (data := process.stdout.read(65536)):
                    ready.unregister(process.stdout)  # it ends
                    continue
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    at, *pids = line.split()
                    self._stopped(float(at), tuple(map(int, pids)))

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
                process.stdin.write(b"bye\n")
                process.stdin.close()
            else:
                dead.stdin.close()
                for line in filter(None, (*self._lines, self._lease)):
                    self._write(line)
        return True

    def _write(self, line: str) -> None:
        try:
            written = self._process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            return  # it has died; its replacement receives everything
        if written is None:
            self._process.popen.kill()  # it is stopped: the pipe is full, and it has not read


@dataclass(frozen=True, slots=True)
class _Process:
    """A guard process; ``end`` is a descriptor that is readable once it has ended."""

    popen: subprocess.Popen[bytes]
    stdin: io.RawIOBase
    stdout: io.RawIOBase
    end: int


def _start() -> _Process:
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({root!r}); from elastic_agents.workers.guard_process import watch; watch(0, 1)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # It must find its shared libraries, and must not see the agent's secrets.
        env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
        start_new_session=True,
    )
    assert isinstance(process.stdin, io.RawIOBase)
    assert isinstance(process.stdout, io.RawIOBase)
    try:
        os.set_blocking(process.stdin.fileno(), False)
        return _Process(process, process.stdin, process.stdout, os.pidfd_open(process.pid))
    except OSError:
        process.kill()
        with process:  # closes its pipes, and waits
            raise
