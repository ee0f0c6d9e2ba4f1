"""The memory control groups of this process, of version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that limits memory.

    What the kernel's documentation says of these files:

    - Version 2, https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files: usage at ``memory.max`` that
      cannot be reduced invokes the OOM killer in the group; above ``memory.high`` its processes are throttled.
      ``memory.current`` and ``memory.stat`` are of the group "and its descendants", so the limits of ancestors apply,
      too. ``oom_kill`` in ``memory.events`` counts "processes belonging to this cgroup killed by any kind of OOM
      killer", also for the limit of an ancestor, and those of its descendants unless the hierarchy is mounted with
      ``memory_localevents``. The root of the hierarchy has none of these files, nor has a group for whose children no
      memory controller is enabled, or a threaded one: its memory counts in the next group above that has them. Swap is
      limited separately, by ``memory.swap.max``.
    - Version 1, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html: the same of ``memory.limit_in_bytes``; in
      addition, ``memory.memsw.limit_in_bytes`` limits memory and swap together, if the kernel accounts swap.
      ``oom_kill`` in ``memory.oom_control`` counts the group's own processes only.

    Attributes:
        path: its directory, which may not be visible in a container.
        limits: names of its files with a limit, each with that of the usage in bytes which it limits.
        events: name of the file whose line ``oom_kill N`` counts kills.
    """

    path: Path
    limits: tuple[tuple[str, str], ...]
    events: str

    def usage(self) -> Iterator[tuple[int, int]]:
        """Yield the bytes in use within each limit that there is, and the limit.

        Inactive page cache, such as a dataset that was read, does not count, because the kernel drops it first.
        """
        for names in self.limits:
            limit, used = (_number(self.path / name) for name in names)
            if limit is not None and used is not None:
                yield max(0, used - inactive_cache(self.path)), limit


_VERSION_1 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)
_VERSION_2 = (("memory.max", "memory.current"), ("memory.high", "memory.current"))


def memory_groups(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> Iterator[MemoryGroup]:
    """Yield the groups that this process is in, each followed by its ancestors up to the root of its hierarchy."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limits, events = cgroups, _VERSION_2, "memory.events"
        elif "memory" in controllers.split(","):
            root, limits, events = cgroups / "memory", _VERSION_1, "memory.oom_control"
        else:
            continue
        group = root / path.strip("/")
        for place in (group, *group.parents):
            yield MemoryGroup(place, limits, events)
            if place == root:
                break


def inactive_cache(group: Path) -> int:
    """Return the bytes of page cache in a group and those below it that are not in use.

    They are "filesystem-backed" memory on a list of the page reclaim algorithm. Snapshots are not among them: shared
    memory is "swap-backed" (https://docs.kernel.org/admin-guide/cgroup-v2.html, ``memory.stat``).
    """
    try:
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    found = {name: int(value) for name, value in lines}
    # Version 1 counts the groups below in the total alone.
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or not this hierarchy
