"""Sources of preemption notices: clouds, Slurm, a file, a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
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
        kind: one of KINDS.
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


def parse_source(text: str) -> NoticeSource | None:
    """Parse one source of ``--notice``; ``none`` gives None.

    Raises:
        UsageError: if it is not a source.
    """
    kind, colon, rest = text.strip().partition(":")
    kind = kind.lower()
    if kind == "none" and not colon:
        return None
    parse = KINDS[kind][1] if kind in KINDS else None
    found = parse(kind, rest if colon else None) if parse is not None else None
    if found is None:
        hint = f"Write {', '.join(spellings())} or none; several with commas."
        raise UsageError(f"--notice {text.strip()!r} is not a source of notices.", hint)
    return found


def spellings() -> list[str]:
    """Return how sources are written, ``none`` apart."""
    return [spelling for examples, _ in KINDS.values() for spelling in examples]


def _alone(kind: str, rest: str | None) -> NoticeSource | None:
    return NoticeSource(kind) if rest is None else None


def _aws(kind: str, rest: str | None) -> NoticeSource | None:
    return NoticeSource(kind, early=True) if rest == "rebalance" else _alone(kind, rest)


def _slurm(kind: str, rest: str | None) -> NoticeSource | None:
    # The most common choice for sbatch's --signal; another signal is given by signal:.
    return NoticeSource(kind, number=signal.SIGUSR1) if rest is None else None


def _file(kind: str, rest: str | None) -> NoticeSource | None:
    return NoticeSource(kind, path=rest) if rest else None


def _signal(kind: str, rest: str | None) -> NoticeSource | None:
    if not rest:
        return None
    name, at, left = rest.partition("@")
    full = name.strip().upper()
    full = full if full.startswith("SIG") else f"SIG{full}"
    number = signal.Signals.__members__.get(full)
    if number is None or number in UNTOUCHABLE:
        problem = "which is not a signal" if number is None else "which cannot be a notice"
        raise UsageError(f"--notice signal:{rest} names {full}, {problem}.", "Write signal:USR1, for example.")
    if at and not (left.isascii() and left.isdigit() and len(left) <= 7 and 0 < int(left) <= 10**6):
        problem = f"--notice signal:{rest} gives {left!r} as the seconds that it leaves."
        raise UsageError(problem, "Write signal:USR1@60, for example.")
    return NoticeSource(kind, number=number, seconds=float(left) if at else None)


KINDS: dict[str, tuple[tuple[str, ...], Callable[[str, str | None], NoticeSource | None]]] = {
    "auto": (("auto",), _alone),
    "aws": (("aws", "aws:rebalance"), _aws),
    "gcp": (("gcp",), _alone),
    "azure": (("azure",), _alone),
    "slurm": (("slurm",), _slurm),
    "file": (("file:PATH",), _file),
    "signal": (("signal:USR1",), _signal),
}
"""For each kind: how sources are written, and a function that makes one from the kind and what follows its colon, if
there is one; it returns None if that is not a source.

The module ``elastic_agents.notices.<kind>`` watches a source. The agent handles ``signal``; ``auto`` stands for others.
"""
