"""How busy a host is, from files that a kernel shows and from a driver that is played."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_agents.host_watch import OLD, UNSUPPORTED, HostWatch, nvml
from elastic_launch.clock import MonotonicClock
from elastic_launch.system.host_load import GpuLoad, HostLoad

GPU = GpuLoad(97, 71 << 30, 80 << 30)


class At:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


class Host:
    """The files of a host with 64 GiB, of which 16 are available."""

    def __init__(self, path: Path) -> None:
        self.proc, self.cgroups = path / "proc", path / "groups"
        self.group = self.cgroups / "pod"
        (self.proc / "self").mkdir(parents=True)
        self.group.mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/pod\n")
        (self.proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {16 << 20} kB\n")
        self.spend(0, 0)

    def spend(self, busy: int, idle: int) -> None:
        (self.proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 {busy} 0\ncpu0 1\n")


def no_gpus() -> tuple[GpuLoad, ...]:
    return ()


def watch(host: Host, gpus: Callable[[], tuple[GpuLoad, ...]] = no_gpus, clock: At | None = None) -> HostWatch:
    return HostWatch(clock or At(), lambda: gpus, host.proc, host.cgroups)


def test_the_load_is_that_of_the_time_between_two_samples(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.spend(1000, 0)
    found = watch(host)
    found.sample()
    assert found.last() is None, "of one sample nothing follows"
    host.spend(1300, 100)
    found.sample()
    assert found.last() == HostLoad(75, 48 << 30, 64 << 30)
    found.sample()
    assert found.last() == HostLoad(75, 48 << 30, 64 << 30), "no time has passed"


def test_memory_is_that_of_the_container_if_its_limit_is_lower(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = watch(host)
    for name, text in (("max", 8 << 30), ("current", 3 << 30), ("high", "max"), ("stat", f"inactive_file {1 << 30}\n")):
        (host.group / f"memory.{name}").write_text(str(text))
    found.sample()
    host.spend(1, 1)
    found.sample()
    assert found.last() == HostLoad(50, 2 << 30, 8 << 30)
    (host.group / "memory.max").write_text(str(128 << 30))
    host.spend(2, 2)
    found.sample()
    assert found.last() == HostLoad(50, 48 << 30, 64 << 30)


def test_a_sample_is_told_once_and_an_old_one_is_none(tmp_path: Path) -> None:
    host, clock = Host(tmp_path), At()
    found = watch(host, clock=clock)
    assert found.news() is None
    found.sample()
    host.spend(1, 1)
    found.sample()
    load = HostLoad(50, 48 << 30, 64 << 30)
    assert (found.news(), found.news(), found.last()) == (load, None, load)
    clock.at += OLD + 1
    assert found.last() is None


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu  x\n"])
def test_files_of_another_kind_are_no_load(tmp_path: Path, text: str) -> None:
    host = Host(tmp_path)
    (host.proc / "stat").write_text(text)
    found = watch(host)
    found.sample()
    found.sample()
    assert found.last() is None


@pytest.mark.parametrize("late", [False, True], ids=["at first", "later"])
def test_gpus_that_fail_are_left_out_from_then_on(tmp_path: Path, late: bool) -> None:
    host, calls = Host(tmp_path), 0

    def gpus() -> tuple[GpuLoad, ...]:
        nonlocal calls
        calls += 1
        if not late or calls > 1:
            raise OSError("lost")
        return (GPU,)

    found = watch(host, gpus)
    seen = []
    for time in range(5):
        host.spend(time, time)
        found.sample()
        seen.append(found.last())
    assert [load.gpus for load in seen[1:] if load] == ([(GPU,), (), (), ()] if late else [()] * 4)
    assert calls == 1 + late


def test_the_thread_watches_this_host_and_ends() -> None:
    found = HostWatch(MonotonicClock(), lambda: no_gpus)
    found.start()
    found.close()
    assert not found._thread.is_alive()
    found.sample()  # of this host's own files


class Driver:
    """NVML with two GPUs; the second one is divided by MIG."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self._failing:
            return lambda *arguments: 999
        return {
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetCount_v2": self._count,
            "nvmlDeviceGetHandleByIndex_v2": self._handle,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetUtilizationRates": self._busy,
        }[name]

    def _count(self, count: object) -> int:
        count._obj.value = 2  # type: ignore[attr-defined]
        return 0

    def _handle(self, index: ctypes.c_uint, device: object) -> int:
        device._obj.value = 1000 + index.value  # type: ignore[attr-defined]
        return 0

    def _memory(self, device: ctypes.c_void_p, memory: object) -> int:
        ctypes.memmove(memory, (ctypes.c_ulonglong * 3)(80 << 30, 9 << 30, 71 << 30), 24)  # type: ignore[arg-type]
        return 0

    def _busy(self, device: ctypes.c_void_p, busy: object) -> int:
        if device.value == 1001:
            return UNSUPPORTED
        ctypes.memmove(busy, (ctypes.c_uint * 2)(97, 40), 8)  # type: ignore[arg-type]
        return 0


def test_the_driver_is_asked_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agents.host_watch.ctypes.CDLL", lambda library: Driver())
    assert nvml()() == (GPU, GpuLoad(None, GPU.used, GPU.total))


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"])
def test_a_driver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("elastic_agents.host_watch.ctypes.CDLL", lambda library: Driver(name))
    with pytest.raises(OSError, match=f"{name} returns 999"):
        nvml()


def test_without_a_driver_there_is_an_error() -> None:
    with pytest.raises(OSError, match="libnone"):
        nvml("libnone.so.1")
