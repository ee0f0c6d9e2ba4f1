"""What a notice is, and how times of documents are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

__all__ = [
    "LATE",
    "SOON",
    "Notice",
    "Source",
    "Trouble",
    "dated",
    "decoded",
    "moment",
    "plain",
    "promised",
    "seconds_until",
]

SOON = 120.0
"""Seconds before a planned maintenance at which a node leaves: what AWS gives for a spot interruption."""


LATE = 5.0
"""Seconds to count on when the moment that was named has passed, and the machine still runs."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine, or this node's part of it, is to go.

    Attributes:
        source: who says so, in words: AWS, GCP, Azure, Slurm, file, signal.
        kind: ``preemption``, ``maintenance``, ``rebalance``, ``scale-in``, ``time limit`` or ``request``.
        why: in words.
        seconds: that are left; None: not known.
        leaves: whether the node leaves because of it, or only says so.
        id: what tells it from others of its kind.
        alone: whether it concerns this machine only.
        begun: whether it has begun by now, as far as is known. What an agent finds like that at its first look is past
            for it: it is the agent of a machine that has come back.
    """

    source: str
    kind: str
    why: str
    seconds: float | None = None
    leaves: bool = True
    id: str = ""
    alone: bool = True
    begun: bool = False

    @property
    def key(self) -> str:
        """What tells it from the others of its source."""
        return f"{self.kind} {self.id} {self.why}"

    @property
    def reason(self) -> str:
        """Why the node leaves, as after ``stopped by``."""
        return self.why if self.source == "signal" else f"{self.source} notice: {self.why}"


class Trouble(Exception):
    """A source cannot be asked, or answers what it should not.

    Args:
        what: is wrong; said once for each text.
        detail: what was found this time.
    """

    def __init__(self, what: str, detail: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.detail = detail


class Source(Protocol):
    """Something that is asked for notices, again and again, by a thread of its own.

    Attributes:
        name: as in :class:`Notice`.
        watched: what is watched, in words.
        pause: seconds between two turns.
    """

    name: str
    watched: str
    pause: float

    def poll(self) -> Sequence[Notice]:
        """Return all notices that hold at present; one that was returned before does no harm.

        Raises:
            Trouble: if that cannot be known.
        """
        ...

    def farewell(self, notice: Notice) -> str:
        """The node has left because of the notice and has no further use of its time; return what was done, in words.

        Raises:
            Trouble: if that failed.
        """
        ...

    def close(self) -> None:
        """End a poll that is under way, and let no other begin; called from another thread."""
        ...


def decoded(what: str, body: bytes) -> Any:
    """Return the JSON in a body.

    Args:
        what: it is, for the error.

    Raises:
        Trouble: if there is none.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Trouble(f"{what} is no JSON", repr(body[:60])) from None


def plain(value: object, most: int = 40) -> str:
    """Return a word of a document as it may stand in a line of ours."""
    return "".join(character for character in str(value)[:most] if character.isprintable())


def moment(text: object) -> datetime | None:
    """Read a time as the clouds write it: ``2017-09-18T08:22:00Z``, ``[Mon, ]19 Sep 2016 18:29:47 GMT``; else None."""
    from email.utils import parsedate_to_datetime  # which imports much, and only clouds need it

    if not isinstance(text, str) or len(text) > 64:
        return None
    try:
        found = datetime.fromisoformat(text) if text[:4].isdigit() else parsedate_to_datetime(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def seconds_until(text: object, now: datetime) -> float | None:
    """Return the seconds from now until a time that a document names, negative if it has passed; None if it is none.

    Args:
        now: by the clock of whoever wrote the document, if that is known.
    """
    found = moment(text)
    return None if found is None else (found - now).total_seconds()


def promised(left: float | None, promise: float) -> float:
    """Return the seconds to count on where a cloud promises so many; a few if its time has passed by its own clock."""
    if left is None or not math.isfinite(left):
        return promise
    return min(left if left > 0 else LATE, promise)


def dated(headers: Mapping[str, str]) -> datetime:
    """Return the time by the clock of whoever answered: two hosts' clocks are never compared if that can be helped."""
    return moment(headers.get("date")) or datetime.now(UTC)
