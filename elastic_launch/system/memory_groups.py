"""The memory control groups of this process, of version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that limits memory.

    Attributes:
        path: its directory, which may not be visible in a container.
        limit, used: names of its files with the limit and the usage in bytes.
        events: name of the file whose line ``oom_kill N`` counts kills.
        own: whether the process is in this group; otherwise, this is an ancestor of such a group.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
    """

    path: Path
    limit: str
    used: str
    events: str
    own: bool


def memory_groups(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> Iterator[MemoryGroup]:
    """Yield the groups that this process is in, each followed by its ancestors up to the root of its hierarchy."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "memory.events")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        else:
            continue
        group = root / path.strip("/")
        for place in (group, *group.parents):
            yield MemoryGroup(place, *names, own=place == group)
            if place == root:
                break
