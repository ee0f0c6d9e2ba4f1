"""Which signals a process survives, and which have no effect on it."""

from __future__ import annotations

import re
import signal

from elastic_agents.workers.sessions import read_proc

__all__ = ["heeds", "ignores"]

_HARMLESS = (signal.SIGURG, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Signals that do not end a process without a handler for them (signal(7))."""


def heeds(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal or ignores it; its default action would end most workers."""
    return _in_mask("Ign", pid, number) or _in_mask("Cgt", pid, number)


def ignores(pid: int, number: int) -> bool:
    """Whether a signal would have no effect on a process."""
    return _in_mask("Ign", pid, number) or (number in _HARMLESS and not _in_mask("Cgt", pid, number))


def _in_mask(name: str, pid: int, number: int) -> bool:
    """Check a mask of ``/proc/<pid>/status`` (proc(5)), in which bit N - 1 stands for signal N."""
    found = re.search(rf"^Sig{name}:\s*([0-9a-f]+)$", read_proc(f"/proc/{pid}/status"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)
