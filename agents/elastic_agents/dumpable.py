"""Whether other processes of the same user may look into this one: prctl(2), PR_SET_DUMPABLE."""

from __future__ import annotations

import ctypes

__all__ = ["set_dumpable"]

PR_SET_DUMPABLE = 4


def set_dumpable(yes: bool) -> None:
    """Allow or forbid processes without capabilities to trace this one, and to read its memory, environment and files.

    What forbids it is this process' own; a fork inherits it, and an exec resets it. With it, no core is dumped.
    """
    # It fails only where a filter of system calls forbids it; then all is as with any other process.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(yes), 0, 0, 0)
