"""Sources of preemption notices: clouds, Slurm, a file, a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_launch.errors import UsageError

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
        kind: one of those in SPELLINGS. The module ``elastic_agents.notices.<kind>`` watches it; the agent handles
            ``signal``, and ``auto`` stands for others.
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

SPELLINGS = ("auto", "aws", "aws:rebalance", "gcp", "azure", "slurm", "file:PATH", "signal:USR1")
"""How sources are written, ``none`` apart."""


def named_signal(name: str) -> tuple[str, signal.Signals | None]:
    """Return a signal's full name, and the signal, None if there is none; ``SIG`` may be left out."""
    full = name.strip().upper()
    full = full if full.startswith("SIG") else f"SIG{full}"
    return full, signal.Signals.__members__.get(full)


def claimed(sources: Iterable[NoticeSource]) -> tuple[signal.Signals, ...]:
    """Return the signals that are reserved for notices."""
    return tuple(dict.fromkeys(source.number for source in sources if source.number is not None))


def parse_source(text: str) -> NoticeSource | None:
    """Parse one source of ``--notice``; ``none`` gives None."""
    kind, colon, rest = text.strip().partition(":")
    match kind.lower(), rest if colon else None:
        case "none", None:
            return None
        case "auto" | "aws" | "gcp" | "azure" as cloud, None:
            return NoticeSource(cloud)
        case "aws", "rebalance":
            return NoticeSource("aws", early=True)
        case "slurm", None:
            # The most common choice for sbatch's --signal; another signal is given by signal:.
            return NoticeSource("slurm", number=signal.SIGUSR1)
        case "file", str(path) if path:
            return NoticeSource("file", path=path)
        case "signal", str(words) if words:
            return _signal(words)
    hint = f"Write {', '.join(SPELLINGS)} or none; several with commas."
    raise UsageError(f"--notice {text.strip()!r} is not a source of notices.", hint)


def _signal(rest: str) -> NoticeSource:
    name, at, left = rest.partition("@")
    full, number = named_signal(name)
    if number is None or number in UNTOUCHABLE:
        problem = "which is not a signal" if number is None else "which cannot be a notice"
        raise UsageError(f"--notice signal:{rest} names {full}, {problem}.", "Write signal:USR1, for example.")
    if at and not (left.isascii() and left.isdigit() and len(left) <= 7 and 0 < int(left) <= 10**6):
        problem = f"--notice signal:{rest} gives {left!r} as the seconds that it leaves."
        raise UsageError(problem, "Write signal:USR1@60, for example.")
    return NoticeSource("signal", number=number, seconds=float(left) if at else None)
