"""Makes shared fixtures available to these tests."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def _tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


@pytest.fixture(autouse=True)
def threads_have_left_the_kernel(nothing_left_behind: None) -> Iterator[None]:
    """Wait until joined threads have left the kernel: `nothing_left_behind` reads their files in /proc."""
    before = _tasks()
    yield
    deadline = time.monotonic() + 1.0
    while _tasks() - before - {thread.native_id for thread in threading.enumerate()} and time.monotonic() < deadline:
        time.sleep(0.001)
