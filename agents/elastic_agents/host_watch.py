"""Samples how busy this host is, in a thread of its own: a call into a GPU's driver may hang."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from elastic_launch.clock import Clock
from elastic_launch.system.host_load import GpuLoad, HostLoad
from elastic_launch.system.memory_groups import CGROUPS, memory_groups
from elastic_launch.system.threads import VitalThread

_log = logging.getLogger("elastic_launch.agent")

EVERY = 5.0
"""Seconds between two samples."""

OLD = 6 * EVERY
"""Seconds after which a sample says nothing of the present: the thread hangs in the driver, or has ended."""

CLOSE = 0.5
"""Seconds that the thread gets to end."""

UNSUPPORTED = 3
"""``NVML_ERROR_NOT_SUPPORTED``: of the utilisation of a GPU that is divided by MIG, for example."""


class HostWatch:
    """The load of this host; thread-safe.

    Args:
        gpus: returns a function that samples the GPUs; what either raises leaves the GPUs out from then on.
        also: called by the thread before each sample.
    """

    def __init__(
        self,
        clock: Clock,
        gpus: Callable[[], Callable[[], tuple[GpuLoad, ...]]] | None = None,
        proc: Path = Path("/proc"),
        cgroups: Path = CGROUPS,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock, self._proc, self._cgroups, self._also = clock, proc, cgroups, also
        self._open: Callable[[], Callable[[], tuple[GpuLoad, ...]]] | None = gpus or nvml
        self._gpus: Callable[[], tuple[GpuLoad, ...]] | None = None
        self._before: tuple[int, int] | None = None  # see _cpu_times
        self._last: tuple[float, HostLoad] | None = None  # when it was taken
        self._told: tuple[float, HostLoad] | None = None
        self._closing = threading.Event()
        self._thread = VitalThread(self._watch, "host load", owner=lambda died: _log.debug("no load: %s", died.error))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE)

    def last(self) -> HostLoad | None:
        """Return the last sample; None if there is none of the last seconds."""
        last = self._last
        return None if last is None or self._clock.now() - last[0] > OLD else last[1]

    def news(self) -> HostLoad | None:
        """Return the last sample, if it was not returned here before."""
        last, told = self._last, self._told
        self._told = last
        return None if last is told else self.last()

    def sample(self) -> None:
        """Take a sample of what has happened since the one before."""
        try:
            before, (busy, whole) = self._before, _cpu_times(self._proc)
            self._before = busy, whole
            used, total = _memory(self._proc, self._cgroups)
        except (OSError, ValueError, KeyError) as error:  # a kernel with other files
            _log.debug("no load: %s", error)
            return
        if before is None or whole <= before[1]:
            return
        cpu = round(100 * max(0, busy - before[0]) / (whole - before[1]))
        load = HostLoad(cpu, used, total, self._sample_gpus())
        self._last = self._clock.now(), load

    def _sample_gpus(self) -> tuple[GpuLoad, ...]:
        try:
            if self._gpus is None and self._open is not None:
                self._gpus, self._open = self._open(), None
            return self._gpus() if self._gpus is not None else ()
        except (OSError, AttributeError) as error:  # no driver, an old one, or a GPU that has failed
            _log.debug("no load of GPUs: %s", error)
            self._gpus = self._open = None
            return ()

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._also()
            self.sample()
            self._closing.wait(EVERY)


def _cpu_times(proc: Path) -> tuple[int, int]:
    """Return the time in which CPUs were not idle, and the whole time, since the host was started.

    Times of guests are among those of users, see proc_stat(5).
    """
    with (proc / "stat").open() as file:
        user, nice, system, idle, iowait, *more = (int(word) for word in file.readline().split()[1:9])
    busy = user + nice + system + sum(more)
    return busy, busy + idle + iowait


def _memory(proc: Path, cgroups: Path) -> tuple[int, int]:
    """Return the bytes in use, and how many there are: on the host or within the lowest limit of a control group."""
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    limits = [usage for group in memory_groups(proc, cgroups) for usage in group.usage()]
    return min([(total - free, total), *limits], key=lambda usage: usage[1])


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvml(library: str = "libnvidia-ml.so.1") -> Callable[[], tuple[GpuLoad, ...]]:
    """Return a function that samples NVIDIA's GPUs (https://docs.nvidia.com/deploy/nvml-api).

    Raises:
        OSError, AttributeError: if there is no driver, or it lacks a function. The returned function raises them, too.
    """
    driver = ctypes.CDLL(library)

    def call(name: str, *arguments: object, allowed: int = 0) -> bool:
        code = getattr(driver, name)(*arguments)
        if code not in (0, allowed):
            raise OSError(f"{name} returns {code}")
        return bool(code == 0)

    call("nvmlInit_v2")
    count = ctypes.c_uint()
    call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    devices = [ctypes.c_void_p() for _ in range(count.value)]
    for index, device in enumerate(devices):
        call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))

    def sample() -> tuple[GpuLoad, ...]:
        found = []
        for device in devices:
            busy, memory = _Utilization(), _Memory()
            call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            known = call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(busy), allowed=UNSUPPORTED)
            found.append(GpuLoad(busy.gpu if known else None, memory.used, memory.total))
        return tuple(found)

    return sample
