"""Sources of preemption notices: clouds, Slurm, a file, a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_launch.errors import UsageError

__all__ = ["AUTO", "CLOUDS", "KINDS", "UNTOUCHABLE", "NoticeSource", "claimed", "parse_source"]

CLOUDS = ("aws", "gcp", "azure")

KINDS = ("auto", *CLOUDS, "slurm", "file", "signal", "none")

EXAMPLE = "Write auto, aws, gcp, azure, slurm, file:PATH, signal:USR1 or none; several with commas."

UNTOUCHABLE = (
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)
"""Signals that no process can handle, or that concern the process itself."""


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """One source of notices.

    Attributes:
        kind: one of KINDS but ``none``.
        path: the path, for ``file``.
        number: the signal that this source reserves; None for no signal.
        seconds: time between the signal and the end; None if not given.
        early: also leave on a recommendation, before the interruption is certain; AWS only.
    """

    kind: str
    path: str = ""
    number: signal.Signals | None = None
    seconds: float | None = None
    early: bool = False


AUTO = NoticeSource("auto")


def claimed(sources: Iterable[NoticeSource]) -> tuple[signal.Signals, ...]:
    """Return the signals that are reserved for notices."""
    return tuple(dict.fromkeys(source.number for source in sources if source.number is not None))


def parse_source(asked: str, text: str) -> NoticeSource | None:
    """Parse one source; ``none`` gives None.

    Args:
        asked: the flag, for errors.

    Raises:
        UsageError: if it is not a source.
    """
    kind, colon, rest = text.strip().partition(":")
    kind = kind.lower()
    match kind, rest:
        case "file", path if path:
            return NoticeSource(kind, path=path)
        case "signal", name if name:
            return _signal(asked, name)
        case "aws", "rebalance":
            return NoticeSource(kind, early=True)
        case "slurm", "" if not colon:
            # The most common choice for sbatch's --signal; another signal is given by signal:.
            return NoticeSource(kind, number=signal.SIGUSR1)
        case (("auto" | "aws" | "gcp" | "azure"), "") if not colon:
            return NoticeSource(kind)
        case "none", "" if not colon:
            return None
    raise UsageError(f"{asked} {text.strip()!r} is not a source of notices.", EXAMPLE)


def _signal(asked: str, text: str) -> NoticeSource:
    name, at, left = text.partition("@")
    full = name.strip().upper()
    full = full if full.startswith("SIG") else f"SIG{full}"
    number = signal.Signals.__members__.get(full)
    if number is None or number in UNTOUCHABLE:
        problem = "which is not a signal" if number is None else "which cannot be a notice"
        raise UsageError(f"{asked} signal:{text} names {full}, {problem}.", "Write signal:USR1, for example.")
    if at and not (left.isascii() and left.isdigit() and len(left) <= 7 and 0 < int(left) <= 10**6):
        raise UsageError(
            f"{asked} signal:{text} gives {left!r} as the seconds that it leaves.", "Write signal:USR1@60, for example."
        )
    return NoticeSource("signal", number=number, seconds=float(left) if at else None)
