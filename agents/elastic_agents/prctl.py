"""What the kernel does for this process on request: prctl(2)."""

from __future__ import annotations

import ctypes

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(number: int) -> None:
    """Get a signal when the thread that started this process ends, at the latest with its process."""
    _prctl(PR_SET_PDEATHSIG, number)


def set_dumpable(yes: bool) -> None:
    """Allow or forbid processes without capabilities to trace this one, and to read its memory, environment and files.

    The setting belongs to this process: a fork inherits it, and an exec resets it. If forbidden, no core is dumped.
    """
    # Fails only where a system call filter forbids it; this process is then as inspectable as any other.
    _prctl(PR_SET_DUMPABLE, int(yes))


def become_subreaper(yes: bool) -> None:
    """Have orphans among the descendants of this process become its children, or no longer.

    Raises:
        OSError: if the kernel refuses.
    """
    if _prctl(PR_SET_CHILD_SUBREAPER, int(yes)) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot become a subreaper")


def _prctl(option: int, argument: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0))
