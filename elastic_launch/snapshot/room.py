"""How much memory there is for snapshots, by the kernel's and the control groups' books."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def free_memory(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that this process can still take, before it or another one is killed for want of it.

    The least of what the host has available and what is left to each memory control group that the process is in:
    version 2 (``memory.max`` less ``memory.current``, in the group and all above it) and version 1
    (``memory.limit_in_bytes`` less ``memory.usage_in_bytes``). Memory that the kernel could take back from a group's
    files counts as used, so the figure errs on the small side.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
    """
    return min([_available(proc), *_left_in_groups(proc, cgroups)])


def _available(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _left_in_groups(proc: Path, cgroups: Path) -> list[int]:
    found = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.strip("/")
        for place in (group, *group.parents):
            limit, used = (_number(place / name) for name in names)
            if limit is not None and used is not None:
                found.append(max(0, limit - used))
            if place == root:
                break
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or not this hierarchy
