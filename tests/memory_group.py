"""Control groups whose memory runs out on command, so that the kernel kills a process in them. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness import ENTER_GROUP

from elastic_launch.system.memory_groups import MemoryGroup, inactive_cache, memory_groups

__all__ = ["Group", "group", "missing"]

SLACK = 8 * 2**20
"""Bytes between what a group uses and its limit, when its memory is to run out."""

MOST = 512
"""MiB that are taken at most until the kernel kills a process."""

# A process that takes memory until there was a kill in its group, and that is not killed itself.
TAKE = """
import sys, time
def kills():
    return next(line for line in open(sys.argv[1]) if line.startswith("oom_kill "))
open("/proc/self/oom_score_adj", "w").write("-1000")
before, taken = kills(), []
for _ in range(int(sys.argv[2])):
    taken.append(b"x" * 2**20)
    if kills() != before:
        sys.exit()
    time.sleep(0.002)
sys.exit(1)
"""

_numbers = itertools.count()


class Group:
    """A memory control group for the processes of one node."""

    def __init__(self, path: Path, kind: MemoryGroup) -> None:
        self.path = path
        self._events = kind.events
        self._limit, self._used = kind.limits[0]
        self.prefix = (*ENTER_GROUP, str(path))
        """The prefix of a command that is to run in the group."""

    @property
    def kills(self) -> int:
        """Processes in it that the kernel has killed for lack of memory."""
        lines = (self.path / self._events).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def limit(self, more: int) -> None:
        """Limit its memory to what it uses now, without the page cache that can be dropped, and so many bytes more."""
        used = int((self.path / self._used).read_text()) - inactive_cache(self.path)
        (self.path / self._limit).write_text(str(used + more))

    def run_out(self, pid: int) -> bool:
        """Have memory run out until the kernel kills a process, this one first; return whether it has killed any."""
        limit = self.path / self._limit
        unlimited = limit.read_text()
        with contextlib.suppress(OSError):  # it has just ended
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        limit.write_text(str(int((self.path / self._used).read_text()) + SLACK))
        try:
            command = [*self.prefix, sys.executable, "-c", TAKE, str(self.path / self._events), str(MOST)]
            done = subprocess.run(command, timeout=60, capture_output=True)
            return done.returncode == 0
        finally:
            limit.write_text("-1" if unlimited.strip().isdecimal() else unlimited)

    def remove(self) -> None:
        """Remove it; processes that are left move to the group above."""
        deadline = time.monotonic() + 10
        while True:
            try:
                for pid in (self.path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (self.path.parent / "cgroup.procs").write_text(pid)
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def missing() -> str:
    """Return what this machine lacks to limit a group's memory, or nothing."""
    if os.geteuid() != 0:
        return "needs root for memory control groups"
    try:
        with group():
            return ""
    except (OSError, LookupError) as error:
        return f"may not limit a control group's memory: {error}"


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Make a group below this process' own, or, with cgroup v2, where groups with processes have none, at the root.

    Raises:
        OSError: if it cannot be made.
        LookupError: if there is no hierarchy of groups for memory.
    """
    found = [each for each in memory_groups() if (each.path / "cgroup.procs").exists()]
    for each in found:
        path = each.path / f"elastic-launch-{os.getpid()}-{next(_numbers)}"
        path.mkdir()
        if (path / each.limits[0][0]).exists():
            break
        path.rmdir()
    else:
        raise LookupError("there is no hierarchy of groups for memory")
    made = Group(path, each)
    try:
        yield made
    finally:
        made.remove()
