"""Defines a notice, and parses the times in documents."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

SOON = 120.0
"""Seconds before a planned maintenance at which a node leaves: what AWS gives for a spot interruption."""


LATE = 5.0
"""Seconds to assume when the announced moment has passed and the machine still runs."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine, or this node's part of it, will be taken away.

    Attributes:
        source: the notice's origin, in words: AWS, GCP, Azure, Slurm, file, signal.
        kind: ``preemption``, ``maintenance``, ``rebalance``, ``scale-in``, ``time limit`` or ``request``.
        why: the reason, in words.
        seconds: the time left; None: not known.
        leaves: whether the node leaves because of it, or only reports it.
        id: distinguishes it from others of its kind.
        alone: whether it concerns this machine only.
        begun: whether it has already begun, as far as is known. An agent ignores a begun notice that its first poll
            returns: the agent runs on a machine that has come back.
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
        """Distinguishes the notice from others of its source."""
        return f"{self.kind} {self.id} {self.why}"

    @property
    def reason(self) -> str:
        """Why the node leaves, in words that follow ``stopped by``."""
        return self.why if self.source == "signal" else f"{self.source} notice: {self.why}"


class Trouble(Exception):
    """A source cannot be reached, or gives an invalid answer.

    Args:
        what: what is wrong; each text is reported once.
        detail: what was found this time.
    """

    def __init__(self, what: str, detail: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.detail = detail


class Source(ABC):
    """A source of notices, polled repeatedly by its own thread.

    Attributes:
        name: as in :class:`Notice`.
        watched: what is watched, in words.
        pause: seconds between two polls.
    """

    name: str
    watched: str
    pause: float

    @abstractmethod
    def poll(self) -> Sequence[Notice]:
        """Return all current notices; returning one again does no harm.

        Raises:
            Trouble: if they cannot be determined.
        """

    def acknowledge(self, notice: Notice) -> str:
        """The node has left because of the notice and needs no more of its time; return what was done, in words.

        Raises:
            Trouble: if that failed.
        """
        return ""

    def close(self) -> None:  # noqa: B027 - most polls take no time
        """Abort a poll in progress, and let no other begin; called from another thread."""


def decoded(what: str, body: bytes) -> Any:
    """Return the JSON in a body, which an error calls ``what``.

    Raises:
        Trouble: if it is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Trouble(f"{what} is no JSON", repr(body[:60])) from None


def plain(value: object, most: int = 40) -> str:
    """Return a value from a document as text that is safe to print in a log line."""
    return "".join(character for character in str(value)[:most] if character.isprintable())


def moment(text: object) -> datetime | None:
    """Read a time in the clouds' formats: ``2017-09-18T08:22:00Z``, ``[Mon, ]19 Sep 2016 18:29:47 GMT``; else None."""
    from email.utils import parsedate_to_datetime  # expensive to import, and needed on clouds only

    if not isinstance(text, str) or len(text) > 64:
        return None
    try:
        found = datetime.fromisoformat(text) if text[:4].isdigit() else parsedate_to_datetime(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def seconds_until(text: object, now: datetime) -> float | None:
    """Return the seconds from now until the time in a document, negative if it has passed; None if it is not a time.

    Args:
        now: by the clock of the document's author, if that is known.
    """
    found = moment(text)
    return None if found is None else (found - now).total_seconds()


def promised(left: float | None, promise: float) -> float:
    """Return the seconds to assume where a cloud promises a minimum; a few if its time has passed by its own clock."""
    if left is None or not math.isfinite(left):
        return promise
    return min(left if left > 0 else LATE, promise)


def dated(headers: Mapping[str, str]) -> datetime:
    """Return the time by the answering server's clock: two hosts' clocks are not compared if that can be avoided."""
    return moment(headers.get("date")) or datetime.now(UTC)
