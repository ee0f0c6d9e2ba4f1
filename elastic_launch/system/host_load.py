"""How busy a node's host is."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.contract import Count

OVERLOADED = 1.25
"""A host is overloaded if its load average in the last minute, per CPU, is more, unless :data:`PRESSED` can tell."""

PRESSED = OVERLOADED - 1
"""A host is overloaded if tasks waited for a CPU in a larger share of the time. The load average would be late, counts
tasks that wait for a disk, too, and says nothing of the host in some containers."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """One GPU of a host.

    Attributes:
        busy: per cent of the time in which it computed; None if the driver does not say.
        used, total: its memory in bytes.
    """

    busy: Count | None
    used: Count
    total: Count


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The load of a host.

    Attributes:
        cpu: per cent of the time of all CPUs of the host in which they were not idle.
        used, total: memory in bytes: those of the container, if its limit is lower than the host's memory.
        gpus: all that NVIDIA's driver shows to the agent.
    """

    cpu: Count
    used: Count
    total: Count
    gpus: tuple[GpuLoad, ...] = ()

    def __str__(self) -> str:
        text = f"CPU {self.cpu} %, {_gib(self.used)} of {_gib(self.total)} GiB"
        if not self.gpus:
            return text
        busy = " ".join("?" if gpu.busy is None else str(gpu.busy) for gpu in self.gpus)
        used = " ".join(_gib(gpu.used) for gpu in self.gpus)
        total = " ".join(dict.fromkeys(_gib(gpu.total) for gpu in self.gpus))  # mostly the same
        return f"{text}; GPU {busy} %, {used} of {total} GiB"


def overloaded(load: float, pressure: float | None) -> bool:
    """Return whether a host has more to do than its CPUs can.

    Args:
        load: its load average in the last minute, per CPU.
        pressure: share of the last 10 s in which tasks waited for a CPU; None if that is not known.
    """
    return load > OVERLOADED if pressure is None else pressure > PRESSED


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size < 10 << 30 else f"{size / 2**30:.0f}"
