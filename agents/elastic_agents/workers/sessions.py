"""Sessions of processes: each worker leads its own, which is ended whole, grandchildren included.

Uses only the standard library's cheapest modules, since the guard imports it and must start at once.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Set

__all__ = ["dead_strangers", "empty_sessions", "kill_sessions", "reap", "reap_orphans", "session_members"]

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def session_members(sids: set[int]) -> list[int]:
    """Return the processes of the given sessions that still run; zombies don't count."""
    return [pid for pid, state, _, _ in _processes(sids) if state not in (b"Z", b"X")]


def empty_sessions(sids: set[int]) -> set[int]:
    """Return those of the given sessions of which nothing runs.

    Looks twice: a process that ends as it is looked at may just have started another one.
    """
    empty = set(sids)
    for _ in range(2):
        if empty:
            empty -= {sid for _, state, _, sid in _processes(empty) if state not in (b"Z", b"X")}
    return empty


def reap_orphans(sids: set[int]) -> None:
    """Reap what has died in the given sessions and has become a child of this process, a subreaper perhaps.

    Not the sessions' leaders: these are workers, whose exit codes somebody waits for.
    """
    me = os.getpid()
    for pid, state, parent, _ in list(_processes(sids)):
        if state == b"Z" and parent == me and pid not in sids:
            reap(pid)


def dead_strangers() -> set[int]:
    """Return children of this process that have died and that nobody has waited for, of sessions other than its own.

    A subreaper, or process 1 of a container, gets whatever workers have left behind, daemons with sessions of their own
    included; those among them whom somebody here has started are waited for soon.
    """
    me, own = os.getpid(), os.getsid(0)
    return {pid for pid, state, parent, sid in _processes() if state == b"Z" and parent == me and sid != own}


def reap(pid: int) -> None:
    """Wait for a dead child."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # another thread has done so


def _processes(sids: Set[int] | None = None) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield pid, state, parent and session of each process (proc_pid_stat(5)), or of each in the given sessions.

    A restart waits for this, and a host may have thousands of processes: to ask the kernel for a process' session takes
    a fortieth of the time that it takes to read its file.

    Raises:
        OSError: if there are no descriptors left, or no memory.
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
            except PermissionError:  # by a security module, which may let it be read all the same
                pass
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The command's name stands in parentheses and may hold any character.
                fields = file.read().rpartition(b")")[2].split()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            continue  # it has ended, or is hidden: somebody else's
        if sids is None or int(fields[3]) in sids:
            yield pid, fields[0], int(fields[1]), int(fields[3])


def kill_sessions(sids: set[int], timeout: float = 5.0) -> list[int]:
    """Kill sessions until nothing of them runs.

    Args:
        timeout: seconds after which processes that the kernel cannot end (uninterruptible sleep) are given up.

    Returns:
        the processes given up.

    Raises:
        OSError: if at the end processes could not be looked at.
    """
    deadline = time.monotonic() + timeout
    delay = 0.001
    while sids:
        try:
            members = session_members(sids)
        except OSError:  # for the moment
            if time.monotonic() > deadline:
                raise
            time.sleep(delay)
            continue
        if not members or time.monotonic() > deadline:
            return members
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # another user's, of sudo: it is given up in the end
                continue
        time.sleep(delay)
        delay = min(2 * delay, 0.05)
    return []
