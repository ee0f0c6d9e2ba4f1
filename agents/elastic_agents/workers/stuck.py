"""Whether a Python process is deadlocked on the GIL: a thread waits for it, and none runs, so one that sleeps holds it.

Scripts that use DDP hang like this at exit: see :mod:`elastic_agents.warm._process_groups`. Executed workers run none
of this project's code, so this is detected from outside: the main thread is never scheduled again, and a thread waits
for the lock, with a timeout of 5 ms each time, as CPython does (take_gil in Python/ceval_gil.c). The lock is part of
the interpreter's own data, so no other lock looks like it.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from elastic_agents.workers.sessions import read_proc, status_of, threads_of

LOOK_EVERY = 2.0
"""Seconds between two checks of a process."""

STUCK_AFTER = 60.0
"""Seconds for which a main thread must not have run, by the number of checks: the agent itself may not have run."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""The number of futex(2), with which threads wait for locks."""


@dataclass(slots=True)
class _Seen:
    """A main thread that does not run.

    Attributes:
        switches: how often it had run; None if that is unknown.
        looks, waited: number of checks, and in how many of them a thread waited for the lock.
    """

    switches: int | None
    looks: int = 0
    waited: int = 0


class StuckDetector:
    """Checks processes periodically; :meth:`look` must be called every LOOK_EVERY seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, pids: list[int]) -> list[int]:
        """Return those of the processes that are deadlocked on their interpreter's lock; forget all others."""
        self._seen = {pid: self._looked(pid) for pid in pids}
        return [pid for pid, seen in self._seen.items() if _hangs(seen)]

    def _looked(self, pid: int) -> _Seen:
        switches = _switches(pid)
        seen = self._seen.get(pid)
        if seen is None or switches is None or seen.switches != switches:
            return _Seen(switches)
        seen.looks += 1
        seen.waited += _waits_for_interpreter(pid)
        return seen


def _hangs(seen: _Seen) -> bool:
    # A waiting thread may just be awake.
    return seen.waited > seen.looks / 2 and seen.looks * LOOK_EVERY >= STUCK_AFTER


def _switches(pid: int) -> int | None:
    """How often the main thread has left a CPU; None if that is unknown."""
    counts = [int(count) for name, count in status_of(pid).items() if name.endswith("voluntary_ctxt_switches")]
    return sum(counts) if len(counts) == 2 else None


def _waits_for_interpreter(pid: int) -> bool:
    """Whether a thread waits, with a timeout, for a lock in Python's own data, while no thread computes.

    Threads that compute in Python wait for each other in the same way.
    """
    # proc(5): number, arguments, stack pointer, program counter; or "running", or -1 outside of a call.
    calls = {thread: read_proc(f"/proc/{pid}/task/{thread}/syscall").split() for thread in threads_of(pid)}
    if any(call[:1] in (["running"], ["-1"]) for call in calls.values()):
        return False
    # futex(2): address, operation, value, timeout.
    timed = [call for thread, call in calls.items() if thread != pid and len(call) == 9 and call[0] == str(_FUTEX)]
    waited_for = [int(call[1], 16) for call in timed if int(call[4], 16)]
    return bool(waited_for) and any(address in part for part in _data_of_python(pid) for address in waited_for)


def _data_of_python(pid: int) -> list[range]:
    """The address ranges of the interpreter's writable data."""
    found = []
    for line in read_proc(f"/proc/{pid}/maps").splitlines():
        where, access, _, _, _, *path = line.split(maxsplit=5)
        name = os.path.basename(path[0]) if path else ""
        if access.startswith("rw") and name.startswith(("python", "libpython")):
            first, end = (int(number, 16) for number in where.split("-"))
            found.append(range(first, end))
    return found
