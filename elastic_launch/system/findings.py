"""What ``elasticctl doctor`` finds, and the bound of its waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from elastic_launch.system.threads import within

T = TypeVar("T")

SLOW = 1.0
"""Seconds after which an answer is slow: of the resolver, which torch asks for each connection to its store, or of
storage that takes little."""

PATIENCE = 5.0
"""Seconds that the resolver, the endpoint or a directory has to answer."""

CLOCK_OFF = 2.0
"""Seconds by which a clock may differ from the leader's: people who compare two logs do not notice less."""


class Level(Enum):
    GOOD = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found.

    Attributes:
        remedy: what to do; empty if all is well.
    """

    level: Level
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


def good(text: str) -> Finding:
    return Finding(Level.GOOD, text)


def warning(text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, text, remedy)


def error(text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, text, remedy)


def clock(ahead: float, unsure: float, whose: str, meaning: str, remedy: str) -> Finding:
    """Return by how much this host's clock is off.

    Args:
        ahead: seconds by which it is ahead of another one.
        unsure: by how much that may be wrong.
        whose: that of the other one, as text; ``meaning`` follows it.
    """
    if abs(ahead) - unsure <= CLOCK_OFF:
        return good(f"this host's clock is within {abs(ahead) + unsure:.1f} s of {whose}")
    how = "ahead of" if ahead > 0 else "behind"
    return warning(f"this host's clock is {abs(ahead):.1f} s {how} {whose}{meaning}", remedy)


def timed(act: Callable[[], T], patience: float = PATIENCE) -> tuple[T, float]:
    """Return a result and the seconds that it took, ``patience`` at most.

    Raises:
        TimeoutError: if it takes more.
    """
    began = time.monotonic()
    return within(patience, "it", act), time.monotonic() - began
