"""Sessions of processes: each worker leads its own, which is ended whole, grandchildren included.

Uses only the standard library's cheapest modules, since the guard imports it and must start at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

__all__ = ["kill_sessions", "reap_orphans", "session_members"]


def session_members(sids: set[int]) -> list[int]:
    """Return the processes of the given sessions that still run; zombies don't count."""
    return [pid for pid, state, _ in _processes_of(sids) if state not in (b"Z", b"X")]


def reap_orphans(sids: set[int]) -> None:
    """Reap what has died in the given sessions and has become a child of this process, a subreaper perhaps.

    Not the sessions' leaders: these are workers, whose exit codes somebody waits for.
    """
    me = os.getpid()
    for pid, state, parent in list(_processes_of(sids)):
        if state == b"Z" and parent == me and pid not in sids:
            os.waitpid(pid, os.WNOHANG)


def _processes_of(sids: set[int]) -> Iterator[tuple[int, bytes, int]]:
    """Yield pid, state and parent of each process of the given sessions (proc_pid_stat(5))."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command's name stands in parentheses and may hold any character.
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sids:
                yield int(name), fields[0], int(fields[1])


def kill_sessions(sids: set[int], timeout: float = 5.0) -> list[int]:
    """Kill sessions until nothing of them runs.

    Args:
        timeout: seconds after which processes that the kernel cannot end (uninterruptible sleep) are given up.

    Returns:
        the processes given up.
    """
    deadline = time.monotonic() + timeout
    delay = 0.001
    while sids:
        members = session_members(sids)
        if not members or time.monotonic() > deadline:
            return members
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(delay)
        delay = min(2 * delay, 0.05)
    return []
