"""How processes that can wait let the training go first."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["give_way"]

NICE = 10


def give_way() -> None:
    """Take what the others leave of cores that are scarce; where some are idle, nothing changes.

    A kernel that groups processes by their sessions heeds a process' own nice value within its session only
    (sched(7), "The autogroup feature").
    """
    with contextlib.suppress(OSError):
        os.nice(NICE)
        Path("/proc/self/autogroup").write_text(str(NICE))
