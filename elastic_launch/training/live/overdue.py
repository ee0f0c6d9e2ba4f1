"""Ends a process whose collective on GPUs outlasts its group's timeout.

NCCL's watchdog does this unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0, which :class:`~.groups.RoundGroups` needs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable

LONGEST_PAUSE = 30.0
"""Maximum seconds between two looks."""


Recorder = Callable[[bool, bool], bytes]
"""One of torch's flight recorders, asked without single collectives."""


def end_if_overdue(timeout: float, recorder: Recorder, is_over: Callable[[], bool]) -> None:
    """From now on, have a thread abort this process if a collective takes longer than the timeout.

    The error has the words of NCCL's watchdog, by which the launcher tells a symptom from a cause.

    Args:
        timeout: seconds since the collective was begun, or the one before it completed.
        recorder: has all collectives of this process, or those of one backend.
        is_over: whether the thread is to end; called before each look.
    """
    threading.Thread(target=_watch, args=(timeout, recorder, is_over), name="overdue collectives", daemon=True).start()


def _watch(timeout: float, recorder: Recorder, is_over: Callable[[], bool]) -> None:
    waiting: dict[str, tuple[int, float]] = {}  # by group, the last one that has completed, and since when it is
    pause = min(LONGEST_PAUSE, timeout / 10)
    while True:
        time.sleep(pause)
        if is_over():
            return
        now = time.monotonic()
        for group, status in json.loads(recorder(False, False))["pg_status"].items():
            begun, completed = (int(status[f"last_{what}_collective"]) for what in ("enqueued", "completed"))
            if completed >= begun:
                waiting.pop(group, None)
            elif group not in waiting or waiting[group][0] != completed:
                waiting[group] = completed, now
            elif now - waiting[group][1] > timeout:
                print(
                    f"[elastic-launch] Watchdog caught collective operation timeout: number {completed + 1} of process "
                    f"group {group} has not completed within {timeout:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                os.abort()
