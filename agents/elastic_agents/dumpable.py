"""Whether other processes of the same user may inspect this one: prctl(2), PR_SET_DUMPABLE."""

from __future__ import annotations

import ctypes

__all__ = ["set_dumpable"]

PR_SET_DUMPABLE = 4


def set_dumpable(yes: bool) -> None:
    """Allow or forbid processes without capabilities to trace this one, and to read its memory, environment and files.

    The setting belongs to this process: a fork inherits it, and an exec resets it. If forbidden, no core is dumped.
    """
    # Fails only where a system call filter forbids it; this process is then as inspectable as any other.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(yes), 0, 0, 0)
