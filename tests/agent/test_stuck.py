"""A process deadlocked on its interpreter's lock is distinguished from one that waits for something else."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from elastic_agents.workers import stuck
from elastic_agents.workers.stuck import StuckDetector

TWO_THAT_COMPUTE = """
def compute():
    while True: sum(range(1000))
threads = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
for thread in threads: thread.start()
thread.join()
"""

ONE_THAT_KEEPS_THE_LOCK = """
def compute():
    time.sleep(0.2)
    re.match("(a+)+$", "a" * 60 + "b")  # for ages, without letting others run
thread = threading.Thread(target=compute, daemon=True)
thread.start()
thread.join()
"""

PROGRAMS = {
    "holds the lock": ("ctypes.PyDLL(None).sleep(600)", True),
    "waits without the lock": ("ctypes.CDLL(None).sleep(600)", False),
    "waits for a thread": ("thread.join()", False),
    "waits for threads that compute": (TWO_THAT_COMPUTE, False),
    "waits for a thread that computes and keeps the lock": (ONE_THAT_KEEPS_THE_LOCK, False),
    "works": ("while True: sum(range(1000))", False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_hangs_if_a_thread_holds_the_lock_and_does_not_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, hangs = PROGRAMS[name]
    monkeypatch.setattr(stuck, "STUCK_AFTER", 1.0)
    monkeypatch.setattr(stuck, "LOOK_EVERY", 0.1)
    code = (
        "import ctypes, re, threading, time\n"
        "def beat():\n"
        "    while True: threading.Event().wait(0.005)\n"
        "thread = threading.Thread(target=beat, daemon=True)\n"
        "thread.start()\n"
        "time.sleep(0.1)\n"
        "print('begun', flush=True)\n"
        f"{call}\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        watch, found = StuckDetector(), []
        deadline = time.monotonic() + (60.0 if hangs else 3.0)
        while not found and time.monotonic() < deadline:
            time.sleep(0.1)
            found = watch.look([process.pid])
        process.kill()
    assert found == ([process.pid] if hangs else [])


def test_a_process_that_is_gone_does_not_hang() -> None:
    assert StuckDetector().look([2**22 + 1]) == []
