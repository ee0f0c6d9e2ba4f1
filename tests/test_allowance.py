"""Limits of time that do not count the time in which those who are waited for could not run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import wait_for

from elastic_launch.system.allowance import LOOK, MOST, Allowance


class Host:
    """A clock, and a process of two threads whose waits for a CPU are set by the test."""

    def __init__(self, proc: Path) -> None:
        self.proc, self.now = proc, 100.0
        self.waits(0.0, 0.0)

    def waits(self, *seconds: float) -> None:
        for thread, waited in enumerate(seconds, 7):
            task = self.proc / "7" / "task" / str(thread)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"123456 {int(waited * 1e9)} 8\n")

    def allow(self, seconds: float, pid: int = 7, most: float | None = None) -> Allowance:
        return Allowance(seconds, pid, most=most, now=lambda: self.now, proc=self.proc)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("pid", [7, 8], ids=["known", "gone"])
def test_time_passes_where_none_waits_for_a_cpu(host: Host, pid: int) -> None:
    allowance = host.allow(1.0, pid)
    found = []
    for _ in range(4):
        host.now += 0.3
        found.append(allowance.left())
    assert found == pytest.approx([0.7, 0.4, 0.1, -0.2])


def test_what_any_thread_waits_for_a_cpu_does_not_count(host: Host) -> None:
    allowance = host.allow(1.0)
    host.now += 0.5
    host.waits(0.2, 0.1)
    assert allowance.left() == pytest.approx(0.8)
    host.now += 0.5
    host.waits(0.7, 0.6, 0.4)  # more than has passed, and a new thread
    assert allowance.left() == pytest.approx(1.0)
    host.now += 0.5
    assert allowance.left() == pytest.approx(0.5)


@pytest.mark.parametrize(("most", "longest"), [(None, MOST * 2.0), (3.0, 3.0)])
def test_it_has_an_end_although_all_time_is_spent_waiting(host: Host, most: float | None, longest: float) -> None:
    allowance, began = host.allow(2.0, most=most), host.now
    while allowance.left() > 0:
        host.now += LOOK
        host.waits(host.now - began)
    assert host.now - began == longest


def test_a_wait_is_counted_when_it_ends(host: Host) -> None:
    allowance = host.allow(1.0)
    host.now += 0.4
    assert allowance.left() == pytest.approx(0.6)
    host.now += 0.1
    host.waits(0.5)
    assert allowance.left() == pytest.approx(1.0)


def test_a_pause_of_this_process_counts_little(host: Host) -> None:
    """What it waits for may have come meanwhile, and it has not looked yet."""
    allowance = host.allow(7.0)
    host.now += 3600.0
    assert allowance.left() == pytest.approx(7.0 - 2 * LOOK)


def test_a_process_that_gets_hardly_any_cpu_has_longer() -> None:
    """A process that has a tenth of its CPU, since the rest goes to another one."""
    code = "import os; os.sched_setaffinity(0, {%d}); os.nice(%d)\nprint(flush=True)\nwhile True: pass"
    cpu = min(os.sched_getaffinity(0))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for nice in (10, 0):
            started.append(subprocess.Popen([sys.executable, "-c", code % (cpu, nice)], stdout=subprocess.PIPE))
            assert started[-1].stdout is not None
            assert started[-1].stdout.readline()
        began = time.monotonic()
        allowance, others = Allowance(1.0, started[0].pid), Allowance(1.0)
        wait_for("the end of what is not extended", lambda: others.left() <= 0)
        assert allowance.left() > 0.3
        wait_for("the end", lambda: allowance.left() <= 0)
        assert time.monotonic() - began >= 1.5
    finally:
        for process in started:
            process.kill()
            process.communicate()
