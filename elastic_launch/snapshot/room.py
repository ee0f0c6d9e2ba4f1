"""How much memory is free for snapshots, according to the kernel and the control groups."""

from __future__ import annotations

from pathlib import Path

from elastic_launch.system.memory_groups import CGROUPS, memory_groups

__all__ = ["free_memory"]

_UNLIMITED = 1 << 60


def free_memory(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that this process can still allocate before an out-of-memory kill.

    This is the minimum of the host's available memory and of what is left in each memory control group of the process:
    version 2 (``memory.max`` less ``memory.current``, in the group and all its ancestors) and version 1
    (``memory.limit_in_bytes`` less ``memory.usage_in_bytes``). Reclaimable page cache of a group counts as used, so the
    figure errs on the small side.
    """
    return min([_available(proc), *_left_in_groups(proc, cgroups)])


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _UNLIMITED)


def _left_in_groups(proc: Path, cgroups: Path) -> list[int]:
    found = []
    for group in memory_groups(proc, cgroups):
        limit, used = (_number(group.path / name) for name in (group.limit, group.used))
        if limit is not None and used is not None:
            found.append(max(0, limit - used))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or not this hierarchy
