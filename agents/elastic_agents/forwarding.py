"""Which signals a process takes without ending."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["heeds"]


def heeds(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal or ignores it; its default action would end most workers.

    Read from the masks of ``/proc/<pid>/status`` (proc(5)), in which bit N - 1 stands for signal N.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
