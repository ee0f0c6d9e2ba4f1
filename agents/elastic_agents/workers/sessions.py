"""Sessions of processes: each worker leads its own, which is ended as a whole, grandchildren included.

Uses only cheap standard library modules, since the guard imports this one and must start at once.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import suppress

_STAND = (b"T", b"t", b"Z", b"X")
"""States of processes that do nothing: stopped by a signal, by a debugger, or dead."""

_STOPPING = 1.0
"""Seconds after which processes that do not stop yet (in uninterruptible sleep) are not waited for."""

_TRACKERS = 1.0
"""Seconds in which resource trackers end once all other processes have."""

_EXECUTE = 1.0
"""Seconds in which a process that executes a program has its command line; none has one for a moment (execve(2))."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def read_proc(path: str) -> str:
    """Return the text of a file in ``/proc``; empty if it cannot be read, as when the process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of ``/proc/<pid>/status`` (proc(5)); none if the process has ended."""
    lines = (line.partition(":") for line in read_proc(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def start_of(pid: int) -> str:
    """Return what tells a process from a later one of its number; empty if it has ended, waited for or not."""
    fields = read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""  # proc_pid_stat(5): state, and starttime


def threads_of(pid: int) -> list[int]:
    """Return the threads of a process; none if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def session_members(sids: set[int]) -> list[int]:
    """Return the processes of the given sessions that still run, but for those that end once all others have.

    Zombies don't count. Nor do resource trackers of Python's multiprocessing, which remove what the others have left in
    shared memory; nothing else would.
    """
    return _members(sids)[0]


def _members(sids: set[int]) -> tuple[list[int], list[int]]:
    """Return the processes of the given sessions that still run; resource trackers apart."""
    running = [pid for pid, state, _, _ in _processes(sids) if state not in (b"Z", b"X")]
    trackers = [pid for pid in running if _tracks_resources(pid)]
    return [pid for pid in running if pid not in trackers], trackers


def empty_sessions(sids: set[int]) -> set[int]:
    """Return those of the given sessions in which no process runs.

    Looks twice: a process that ends while it is looked at may just have started another one.
    """
    empty = set(sids)
    for _ in range(2):
        if empty:
            empty -= {sid for _, state, _, sid in _processes(empty) if state not in (b"Z", b"X")}
    return empty


def has_group(leader: int) -> bool:
    """Whether a process of the group of a session's leader runs, other than resource trackers.

    Looks twice, as :func:`empty_sessions` does.
    """
    with suppress(OSError):  # no descriptor or memory is left
        return any(_group_of(member) == leader for _ in range(2) for member in session_members({leader}))
    return True


def _group_of(pid: int) -> int | None:
    with suppress(OSError):
        return os.getpgid(pid)
    return None


def reap_orphans(sids: set[int]) -> None:
    """Reap dead processes of the given sessions that have become children of this process (if it is a subreaper).

    Session leaders are skipped: they are workers, whose exit codes are awaited elsewhere.
    """
    me = os.getpid()
    for pid, state, parent, _ in list(_processes(sids)):
        if state == b"Z" and parent == me and pid not in sids:
            reap(pid)


def reap_last(sids: set[int]) -> None:
    """Reap what is dead in sessions that are over, resource trackers included, which end a moment after the others."""
    deadline = time.monotonic() + _TRACKERS
    while True:
        reap_orphans(sids)
        others = [pid for pid, _, _, _ in _processes(sids) if pid not in sids]
        # One that ends has no command line any more.
        if not any(_tracks_resources(pid) or not command_of(pid) for pid in others) or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def dead_strangers() -> set[int]:
    """Return dead children of this process that have not been waited for, of sessions other than its own.

    A subreaper, or process 1 of a container, inherits everything that workers have left behind, including daemons with
    their own sessions. Some of these children were started by this process, and will soon be waited for elsewhere.
    """
    me, own = os.getpid(), os.getsid(0)
    return {pid for pid, state, parent, sid in _processes() if state == b"Z" and parent == me and sid != own}


def reap(pid: int) -> None:
    """Wait for a dead child."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # another thread has already done it


def _processes(sids: Set[int] | None = None) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield pid, state, parent and session of each process (proc_pid_stat(5)), or of each in the given sessions.

    A restart waits for this, and a host may have thousands of processes: asking the kernel for a process' session takes
    a fortieth of the time of reading its file.

    Raises:
        OSError: if no descriptor or memory is left.
    """
    if sids is not None and not sids:
        return
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if sids is not None:
            try:
                if os.getsid(pid) not in sids:
                    continue
            except ProcessLookupError:
                continue
            except PermissionError:  # denied by a security module, which may still allow reading the file
                pass
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The command's name is in parentheses and may contain any character.
                fields = file.read().rpartition(b")")[2].split()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            continue  # it has ended, or is hidden because it belongs to another user
        if sids is None or int(fields[3]) in sids:
            yield pid, fields[0], int(fields[1]), int(fields[3])


def kill_sessions(sids: set[int], timeout: float = 5.0) -> list[int]:
    """Kill sessions until no process in them runs; their resource trackers, which may be stopped, end by themselves.

    Args:
        timeout: seconds after which unkillable processes (in uninterruptible sleep) are given up.

    Returns:
        the processes given up.

    Raises:
        OSError: if processes could not be listed at the end.
    """
    begun = time.monotonic()
    deadline = begun + timeout
    delay = 0.001
    while sids:
        try:
            members, trackers = _members(sids)
        except OSError:  # possibly temporary
            if time.monotonic() > deadline:
                raise
            time.sleep(delay)
            continue
        if not members or time.monotonic() > deadline:
            _send(trackers, signal.SIGCONT)
            return members
        # What has no command line yet may be a tracker.
        known = [pid for pid in members if command_of(pid)] if time.monotonic() < begun + _EXECUTE else members
        _send(known, signal.SIGKILL)
        time.sleep(delay)
        delay = min(2 * delay, 0.05)
    return []


def stop_sessions(sids: set[int], tell: Callable[[list[int]], object]) -> None:
    """Stop sessions (SIGSTOP) until no process in them runs; those that were stopped before are left alone.

    Args:
        tell: called with processes before they are stopped, and again afterwards: this process may be killed, or be
            frozen itself, in between.
    """
    deadline = time.monotonic() + _STOPPING
    told: set[int] = set()
    while sids and time.monotonic() <= deadline:
        with suppress(OSError):  # no descriptor or memory is left: that may be temporary
            found = {pid: state for pid, state, _, _ in _processes(sids)}
            # One that a debugger or strace has stopped may run on the next moment.
            new = [pid for pid, state in found.items() if (state == b"t" or state not in _STAND) and pid not in told]
            if not new and all(state in _STAND for state in found.values()):
                return
            told.update(new)
            if new:
                tell(new)
                _send(new, signal.SIGSTOP)
                tell(new)
        time.sleep(0.001)


def command_of(pid: int) -> str:
    """Return a process' command line; empty if it has ended."""
    return read_proc(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def are_tracked(sids: set[int]) -> bool:
    """Whether a resource tracker of Python's multiprocessing still runs in any of the sessions."""
    return any(_tracks_resources(pid) for pid, state, _, _ in _processes(sids) if state not in (b"Z", b"X"))


def _tracks_resources(pid: int) -> bool:
    return "-c\0from multiprocessing.resource_tracker import main" in read_proc(f"/proc/{pid}/cmdline")


def resume(pids: Collection[int], sids: Set[int]) -> bool:
    """Resume stopped processes, as far as they still belong to the given sessions; return whether there are any."""
    left = [pid for pid in pids if session_of(pid) in sids]
    _send(left, signal.SIGCONT)
    return bool(left)


def session_of(pid: int) -> int | None:
    """Return the session of a process; None if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _send(pids: Collection[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's (sudo)
            os.kill(pid, number)
