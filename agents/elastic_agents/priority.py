"""Lowers the priority of processes that can wait, so that training goes first."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICE = 10


def give_way() -> None:
    """Use only the CPU time that other processes leave; if cores are idle, nothing changes.

    A kernel that groups processes by session applies a process' own nice value only within its session (sched(7), "The
    autogroup feature").
    """
    with contextlib.suppress(OSError):
        os.nice(NICE)
        Path("/proc/self/autogroup").write_text(str(NICE))
