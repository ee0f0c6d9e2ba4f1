"""Why a node's part of a run ended, for Kubernetes: it shows what a container left in its termination log."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence

__all__ = ["ENV_TERMINATION_LOG", "LIMIT", "termination_message", "write_termination_log"]

ENV_TERMINATION_LOG = "ELASTIC_LAUNCH_TERMINATION_LOG"
"""Names the file, as a pod's ``terminationMessagePath`` may."""

DEFAULT = "/dev/termination-log"

LIMIT = 4096
"""Bytes of one container's message that the kubelet reads."""


def write_termination_log(
    message: str, environ: Mapping[str, str] | None = None, *, unless_written: bool = False
) -> None:
    """Leave a message where Kubernetes looks for it, if it does: the file is there before the container starts.

    Args:
        environ: the variables to go by; None: those of this process.
        unless_written: leave what is there, if anything is.
    """
    path = (os.environ if environ is None else environ).get(ENV_TERMINATION_LOG) or DEFAULT
    try:
        # Opened first and looked at then: what has this name may be anything, a pipe that nobody reads, too.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and not (unless_written and found.st_size):
                file.truncate()
                file.write(_shortened(message).encode(errors="replace"))
        except OSError:
            return


def termination_message(head: Sequence[str], detail: Sequence[str]) -> str:
    """Return head and as much of the detail's end as fits; an exception is at the end of a traceback."""
    left = LIMIT - sum(_size(line) for line in head) - _size("...")
    kept: list[str] = []
    for line in reversed(detail):
        left -= _size(line)
        if left < 0:
            kept.append("...")
            break
        kept.append(line)
    return _shortened("".join(f"{line}\n" for line in [*head, *reversed(kept)]))


def _size(line: str) -> int:
    return len(line.encode(errors="replace")) + 1


def _shortened(text: str) -> str:
    return text.encode(errors="replace")[:LIMIT].decode(errors="ignore")
