"""A minute on a host with 25 busy processes per CPU, and a kill in it: all is slow, and nothing is lost or misjudged.

``make soak``, outside CI: it takes the machine from everything else. The variable STARVED_SECONDS changes the minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from changes import Changes
from harness import Job

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

LOOPS = 25
"""Busy processes per CPU."""

MISJUDGED = {"hang_found", "node_lost", "node_cut_off", "straggler_found", "workers_held"}
"""Events that a host which is only slow must not cause."""


@contextlib.contextmanager
def starved() -> Iterator[None]:
    """Keep all CPUs busy: each process has a session of its own, which the kernel's autogroup schedules by itself."""
    busy = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # they end with a killed test, too
    command = [sys.executable, "-I", "-S", "-c", busy]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(LOOPS * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


@pytest.mark.parametrize("several", [False, True])
def test_a_starved_host_is_only_slow(job: Job, undisturbed: str, several: bool) -> None:
    """One agent with two workers, or two agents with one each."""
    changes = Changes(job, live=True, step_time=0.4)
    agents = [changes.node(k, nnodes="1:2") for k in "ab"] if several else [changes.alone("--nproc", "2")]
    changes.trains(2, steps=10)
    began = time.monotonic()
    minute = float(os.environ.get("STARVED_SECONDS", "60"))
    with starved():
        changes.trains(2, steps=len(changes.steps()) + 5)
        time.sleep(max(0.0, began + minute / 3 - time.monotonic()))
        victim = [event for event in job.events("worker_started") if event["rank"] == 1][-1]["pid"]
        os.kill(victim, signal.SIGKILL)
        killed = max(event["round"] for event in job.events("round_formed"))
        changes.trains(2, after=killed)
        time.sleep(max(0.0, began + minute - time.monotonic()))
    result = changes.finish(*agents)
    events = job.events()
    misjudged = [event for event in events if event["event"] in MISJUDGED]
    assert misjudged == [], changes.outputs()
    assert [kind for _, _, kind in changes.kinds()].count("crash") == 1, changes.kinds()
    assert changes.done_again() == 0, changes.outputs()
    assert result["hash"] == undisturbed
