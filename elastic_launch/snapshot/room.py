"""How much memory is free for snapshots, according to the kernel and the control groups."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from elastic_launch.system.memory_groups import CGROUPS, memory_groups

RESERVE = 0.1  # fraction of the free memory that snapshots leave free

MORE_MEMORY = (
    "take a host with more memory, or raise the limit (docker run --memory, a pod's limits.memory, Slurm's --mem)"
)
"""What to do if there is too little."""

LEFT_OUT = "no snapshots in memory from now on: %s. A fault costs the steps since the last checkpoint%s"
"""The message that snapshots are left out: why, and what to do about it."""

_UNLIMITED = 1 << 60


def room(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> tuple[int, str]:
    """Return the bytes that this process can still allocate, and in words what limits them.

    This is the minimum of the host's available memory and of what is left below each limit of the memory control groups
    of the process and all their ancestors, see :class:`~elastic_launch.system.memory_groups.MemoryGroup`. Swap does not
    count as free.
    """
    return min([(_available(proc), "on this host"), *_left_in_groups(proc, cgroups)])


def lacking(size: int, what: str) -> str:
    """Return why so many further bytes of snapshots have no room; empty if they have.

    ``what`` is how the sentence begins, up to and with "need".
    """
    free, where = room() if size else (0, "")
    if size <= (1 - RESERVE) * free:
        return ""
    return (
        f"{what} {size / 2**30:.2f} GiB more, and {free / 2**30:.2f} GiB are free {where}, of which {RESERVE:.0%} "
        "are left free"
    )


def forget_peak(proc: Path = Path("/proc")) -> None:
    """Have :func:`below_peak` consider only what this process uses from now on, if the kernel can do that."""
    with contextlib.suppress(OSError):
        (proc / "self" / "clear_refs").write_text("5")


def below_peak(proc: Path = Path("/proc")) -> int:
    """Return by how many bytes this process uses less memory than it has used, which it may soon use again."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "self" / "status").read_text().splitlines())
        return 1024 * (int(lines["VmHWM"].split()[0]) - int(lines["VmRSS"].split()[0]))
    except (OSError, KeyError, ValueError):
        return 0


def remedy_of(error: OSError) -> str:
    """Return what to do about an error as memory was allocated; empty if it was not a lack of memory."""
    return MORE_MEMORY if error.errno in (errno.ENOMEM, errno.ENOSPC) else ""


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _UNLIMITED)


def _left_in_groups(proc: Path, cgroups: Path) -> list[tuple[int, str]]:
    found = []
    for group in memory_groups(proc, cgroups):
        where = "within the container's limit of {:.2f} GiB ({})"
        found += [(max(0, most - used), where.format(most / 2**30, group.path)) for used, most in group.usage()]
    return found
