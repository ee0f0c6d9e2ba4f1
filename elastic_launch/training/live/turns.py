"""Has the threads of gloo's groups look at once whether they are to end, instead of every 10 ms.

Each of gloo's groups has a thread that waits for events of its connections by epoll_wait(2), for 10 ms at most. Before
the group is gone, that thread must have begun another turn, and then one in which nothing has happened. With two
groups the other ranks of a round would wait for 20 ms or more. epoll_wait(2) also ends when its thread handles a
signal, also if that signal's handler does nothing.

The kernel tells which thread waits at which descriptor. One of two signals is sent that are ignored by processes
without a handler, and nothing if both have one: in a worker SIGURG dumps its stacks, see ``elastic_launch.stack_dump``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from elastic_launch.system.forks import not_inherited

_SIGNALS = signal.SIGURG, signal.SIGWINCH

_CALLS = {"x86_64": (232, 281, 441), "aarch64": (22, 441)}.get(platform.machine(), ())
"""The numbers of epoll_wait(2), epoll_pwait(2) and epoll_pwait2(2); none: nothing is sent."""

_EVERY = 0.0005
"""Seconds between two signals."""

_ENDING = 10.0
"""Seconds in which the thread that sends them must end."""


@contextmanager
def quick_turns(epolls: Collection[int]) -> Iterator[None]:
    """Within this context, no thread waits for long at these epoll descriptors."""
    libc, over = ctypes.CDLL(None), threading.Event()
    free = _without_handler(_SIGNALS) if epolls and hasattr(libc, "tgkill") else []
    if not free:
        yield
        return
    number = int(free[0])
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    # A handler that does nothing. One of Python's would have to run in the main thread, and at once.
    handler = ctypes.cast(libc.getpid, ctypes.c_void_p).value
    before = libc.signal(number, handler)
    withdraw = not_inherited(number, lambda: libc.signal(number, before))  # another thread may fork meanwhile

    def interrupt() -> None:
        while not over.wait(_EVERY):
            for thread in _waiting_at(epolls):
                libc.tgkill(os.getpid(), thread, number)

    waker = threading.Thread(target=interrupt, name="elastic-launch leave", daemon=True)
    try:
        with suppress(RuntimeError):  # no more threads: gloo's take their time
            waker.start()
        yield
    finally:
        over.set()
        if waker.ident is not None:
            waker.join(_ENDING)
        withdraw()
        now = libc.signal(number, before)
        if now != handler:  # the script has installed one meanwhile
            libc.signal(number, now)


def _without_handler(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    try:
        with open("/proc/self/status") as file:
            caught = int(re.findall(r"^SigCgt:\s*([0-9a-f]+)$", file.read(), re.MULTILINE)[0], 16)
    except (OSError, IndexError):
        return []
    return [each for each in signals if not caught >> (each - 1) & 1]


def _waiting_at(descriptors: Collection[int]) -> list[int]:
    """Return the threads of this process that wait for events at one of these."""
    found = []
    with suppress(OSError):
        for thread in map(int, os.listdir("/proc/self/task")):
            # It may have ended, or run.
            with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{thread}/syscall") as file:
                number, first, *_ = file.read().split()
                if int(number) in _CALLS and int(first, 16) in descriptors:
                    found.append(thread)
    return found
