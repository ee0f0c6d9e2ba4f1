"""Writes why a node's part of a run ended to the termination log, which Kubernetes shows for a container."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

ENV_TERMINATION_LOG = "ELASTIC_LAUNCH_TERMINATION_LOG"
"""Variable with the file's path, which a pod may also set as ``terminationMessagePath``."""

DEFAULT = "/dev/termination-log"

LIMIT = 4096
"""Bytes of a container's message that the kubelet reads."""


def write_termination_log(message: str, *, unless_written: bool = False) -> None:
    """Write a message where Kubernetes reads it, if the file exists: Kubernetes creates it before the container starts.

    Args:
        unless_written: do not overwrite an existing message.
    """
    path = os.environ.get(ENV_TERMINATION_LOG) or DEFAULT
    try:
        # Open first, then check: the path may be anything, such as a pipe without a reader.
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
    """Return ``head`` and as much of the end of ``detail`` as fits; a traceback ends with the exception."""
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
