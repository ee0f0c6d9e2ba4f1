"""Starts worker processes by fork and exec, signals and reaps them."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastic_agents.child import UNKNOWN, Child, started
from elastic_agents.workers.sessions import dead_strangers, has_group, reap, reap_last, reap_orphans, status_of
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.wake import Waker

OnExit = Callable[[int, int], None]
"""Called with pid and exit code (-N for signal N) once a process is reaped, from any thread."""

GROUP_EVERY = 0.05
"""Seconds between two looks whether a process group has ended, whose first process has."""

SWEEP_EVERY = 10.0
"""Seconds between reapings of dead processes that workers left behind; twice that if their session is unknown."""

_HARMLESS = (signal.SIGURG, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Signals that do not end a process without a handler for them (signal(7))."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A process to start.

    Attributes:
        stdout, stderr: descriptors that the process writes to; the caller keeps and closes its own copies.
        inherit: further descriptors of this process that the process inherits.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    stdout: int
    stderr: int
    inherit: Sequence[int] = ()


class ExecProcesses:
    """Starts processes, each the leader of its own session, and reports their ends at once.

    A thread waits on the processes' pidfds, so an exit is seen when it happens.
    """

    def __init__(self, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._running: dict[int, Child] = {}  # by pid
        self._grouped: dict[int, bool] = {}  # those that end with their process group; whether it still gets SIGTERM
        self._outlived: dict[int, Child] = {}  # those of them that have ended before it
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._sessions: set[int] = set()
        self._unclaimed: set[int] = set()
        self._closed = False
        self._thread = VitalThread(self._reap, "reaper")
        self._thread.start()

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call back once starting a process is as fast as possible; immediately, or later from another thread."""
        call()

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        """Call back for each of so many processes once it can start without waiting; at once or from another thread."""
        for _ in range(count):
            call()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call back from another thread each time that a process on which starts depend has died."""

    def replace_lost(self) -> None:
        """Start another one in its place. The calling thread must live as long as that process."""

    def training(self) -> None:
        """Record that all workers train: preparations for the next ones no longer delay them."""

    def start(self, request: StartRequest) -> int:
        """Start a process and return its pid, which is also its session id.

        Raises:
            OSError: if it cannot be executed.
        """
        streams = {"stdout": request.stdout, "stderr": request.stderr}
        return self._watch(
            started(list(request.argv), "a worker", env=dict(request.env), pass_fds=request.inherit, **streams)
        )

    def _claimed(self) -> Collection[int]:
        """Return children of this process that other code will reap."""
        return ()

    def _watch(self, child: Child) -> int:
        """Take charge of a child; return its pid."""
        with self._lock:
            self._sessions.add(child.pid)
            self._running[child.pid] = child
            self._selector.register(child, selectors.EVENT_READ, child)
        self._waker.wake()
        return child.pid

    def signal(self, pid: int, number: int) -> None:
        """Signal a process, if it has not been reaped, or what is left of the process group that it ends with.

        After SIGKILL, its end no longer waits for that of the group, some of which may be unkillable.
        """
        with self._lock:
            kills = number == signal.SIGKILL and pid in self._grouped
            if kills or pid in self._outlived:
                _signal_group(pid, number)
            elif pid in self._running:
                self._running[pid].signal(number)
            if kills:
                del self._grouped[pid]
                self._waker.wake()

    def terminate(self, pid: int, number: int) -> None:
        """Ask a process to end, by a signal, or by SIGTERM if it ignores that one.

        SIGTERM goes to the process alone, since a loader's processes would end before it, and a wrapper may pass it on.
        Any other signal goes to its process group, as from a terminal: a shell that runs a script in the foreground
        ends on Ctrl-C only if the script does. A program other than Python may be a shell that a signal ends without
        its script: then the rest of its group gets SIGTERM, and it counts as running until that has ended.
        """
        given = signal.SIGTERM if ignores(pid, number) else number
        with self._lock:
            if pid in self._running and not _is_python(pid):
                self._grouped.setdefault(pid, given == signal.SIGTERM)
        if given == signal.SIGTERM:
            self.signal(pid, given)
        else:
            self.signal_group(pid, given)
        # A stopped process would not handle the signal before its grace is over.
        self.signal(pid, signal.SIGCONT)

    def signal_group(self, pid: int, number: int) -> None:
        """Signal a process and the rest of its process group, if it has not been reaped."""
        with self._lock:
            if pid in self._running:
                _signal_group(pid, number)

    def close(self) -> None:
        """Release everything; the processes must have ended."""
        self._closed = True
        self._waker.wake()
        self._thread.join(10)
        for child in self._running.values():
            child.signal(signal.SIGKILL)
            child.reap()
        with suppress(OSError):  # no descriptor is left
            reap_last(self._sessions)
        self._selector.close()
        self._waker.close()

    def _reap(self) -> None:
        swept = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(GROUP_EVERY if self._outlived else SWEEP_EVERY):
                if key.data is None:
                    self._waker.clear()
                    continue
                child: Child = key.data
                with self._lock:
                    self._selector.unregister(child)
                    if grouped := child.pid in self._grouped:
                        self._outlived[child.pid] = child
                        if self._grouped[child.pid]:
                            for number in (signal.SIGTERM, signal.SIGCONT):
                                _signal_group(child.pid, number)
                    else:
                        del self._running[child.pid]
                if not grouped:
                    self._reaped(child)
            for pid, child in list(self._outlived.items()):
                if pid not in self._grouped or not has_group(pid):
                    with self._lock:
                        del self._running[pid], self._outlived[pid]
                        self._grouped.pop(pid, None)
                    self._reaped(child)
            if time.monotonic() >= swept + SWEEP_EVERY:
                swept = time.monotonic()
                with self._lock, suppress(OSError):  # no descriptor is left: retried next time
                    self._sweep()

    def _reaped(self, child: Child) -> None:
        child.reap()
        self._on_exit(child.pid, UNKNOWN if child.exit_code is None else child.exit_code)

    def _sweep(self) -> None:
        """Reap orphans; unknown ones only if they were unclaimed the last time, too: other code may soon reap them."""
        reap_orphans(self._sessions)
        dead = dead_strangers() - self._running.keys() - set(self._claimed())
        for pid in dead & self._unclaimed:
            reap(pid)
        self._unclaimed = dead - self._unclaimed


def heeds(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal or ignores it; its default action would end most workers."""
    return _in_mask("SigIgn", pid, number) or catches(pid, number)


def ignores(pid: int, number: int) -> bool:
    """Whether a signal would have no effect on a process."""
    return _in_mask("SigIgn", pid, number) or (number in _HARMLESS and not catches(pid, number))


def _is_python(pid: int) -> bool:
    """Whether a process is an interpreter, as far as its program's name shows."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return True


def _signal_group(leader: int, number: int) -> None:
    """Signal the process group of a session's leader; its number stays reserved until the leader is reaped."""
    with suppress(ProcessLookupError, PermissionError):  # other code has just reaped it, or all are another user's
        os.killpg(leader, number)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return _in_mask("SigCgt", pid, number)


def _in_mask(name: str, pid: int, number: int) -> bool:
    """Check a mask of a process' status, in which bit N - 1 stands for signal N."""
    return bool(int(status_of(pid).get(name, "0"), 16) >> (number - 1) & 1)
