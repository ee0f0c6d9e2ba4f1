"""A child of this process, however it was started: signalled, awaited and reaped."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_log = logging.getLogger("elastic_launch")

UNKNOWN = 255
"""Exit code of a process whose own exit code is lost."""

KILLED = 10.0
"""Seconds that a process gets between SIGKILL and its end."""


def started(command: Sequence[str], name: str, **options: Any) -> Child:
    """Start a process in a session of its own, with the limit on descriptors that this process was started with.

    Args:
        options: options of :class:`subprocess.Popen`.

    Raises:
        OSError: if it cannot be executed, or watched.
    """
    import subprocess  # here, since a warm server does without, and its workers must not see what it imports

    from elastic_launch.system.descriptors import given_limit

    with given_limit():
        process = subprocess.Popen(command, start_new_session=True, **options)
    process.returncode = UNKNOWN  # Popen must no longer wait for it
    return Child(process.pid, name)


class Child:
    """A child; signals may be sent from any thread and from signal handlers.

    Attributes:
        exit_code: -N for signal N; None while it runs, and if it cannot be reaped.

    Raises:
        OSError: if no descriptor is left; the child is then ended.
    """

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self._name = name
        self._lock = threading.RLock()
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            self.reap()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended, until it is reaped."""
        return self._descriptor

    def signal(self, number: int) -> None:
        """Send a signal, if it has not been reaped."""
        with self._lock, suppress(ProcessLookupError):  # other code has just reaped it
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)

    def wait(self, timeout: float | None = None, pipe: int = -1) -> bool:
        """Wait for its end, or until a pipe is readable; return whether the process has ended.

        Signal handlers run meanwhile.
        """
        end = select.poll()
        end.register(self._descriptor, select.POLLIN)
        if pipe >= 0:
            end.register(pipe, select.POLLIN)
        found = end.poll(None if timeout is None else 1000 * timeout)
        return any(descriptor == self._descriptor for descriptor, _ in found)

    def end(self, timeout: float) -> None:
        """End and reap it: by SIGTERM, after a timeout by SIGKILL."""
        if self._descriptor < 0:
            return
        try:
            if not self.wait(0):
                self.signal(signal.SIGTERM)
                if not self.wait(timeout):
                    self.signal(signal.SIGKILL)
        except BaseException:
            self.signal(signal.SIGKILL)
            raise
        finally:
            self.reap()

    def reap(self) -> None:
        """Read its exit code. It is ending, but the kernel or a debugger may hold it. For one thread at a time."""
        deadline = time.monotonic() + KILLED
        if self._descriptor >= 0:
            self.wait(KILLED)
        while self.exit_code is None and not self._reaped():
            if time.monotonic() > deadline:
                _log.error(
                    "%s, pid %d, cannot be reaped after %g s and is left behind: the kernel or a debugger holds it "
                    "(see /proc/%d/status)",
                    *(self._name, self.pid, KILLED, self.pid),
                )
                break
            time.sleep(0.01)
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _reaped(self) -> bool:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            self.exit_code = UNKNOWN  # other code in this process has already waited for it
            return True
        if pid:
            self.exit_code = os.waitstatus_to_exitcode(status)
        return bool(pid)
