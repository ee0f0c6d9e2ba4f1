"""Records which run a directory or URL belongs to, so that two runs do not write to one. Needs no torch.

A run takes a location when it begins, or when a node joins that brings one: it writes a mark with its number, those of
the runs that had it before, and what it resumes from. Before a run commits a checkpoint, it checks that the mark is
still its own. This is a check, not a lock, which object stores do not have: of two active runs, the later one continues
to save, and the earlier one gets an error.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

from elastic_launch.snapshot.errors import MalformedError, TakenError, writing
from elastic_launch.snapshot.location import Place
from elastic_launch.snapshot.storage.lineage import MOST_EPOCHS
from elastic_launch.snapshot.storage.listing import storage_at

OWNER = "owner.json"
_FORMAT = "elastic-launch owner"
_LIMIT = 16 * 1024

_MOST = 256
"""How many earlier runs a mark names."""

_LONGEST = 32
"""Characters of a run's number."""


@dataclass(frozen=True, slots=True)
class OwnerMark:
    """Which run has taken a location.

    Attributes:
        token: the run's number.
        run, host: the run's id, and the host that wrote the mark.
        epoch: how many trainings have taken the location.
        before: numbers of the runs that had it before.
        base: digest of the checkpoint that the run began with; empty if it began with none, None if that is not known.
    """

    token: str
    run: str
    host: str
    epoch: int
    before: tuple[str, ...] = ()
    base: str | None = None


def owned_by(number: str, run: str, *, replaces: str = "") -> str:
    """Return the ``owner`` to pass to the functions below: the run's number and its id.

    Args:
        replaces: number of the run that had the location when this one came to it, and could not write its mark.
    """
    return f"{number}/{replaces} {run}"


def look(where: Place) -> OwnerMark | None:
    """Return the mark of a directory or URL; None if it has no valid mark."""
    with writing(where, "read the owner of"):
        try:
            return parse_mark(storage_at(where).read(OWNER, _LIMIT))
        except (FileNotFoundError, NotADirectoryError, MalformedError):
            return None


def claim(where: Place, owner: str, *, epoch: int = 0, base: str | None = None) -> bool:
    """Take a directory or URL for a run's training with that epoch, unless another run has taken it from this one.

    Args:
        base: see :class:`OwnerMark`; it stays if the run has taken the location before.

    Returns:
        Whether this run had taken it before.
    """
    number, found = _number(owner), look(where)
    if found is not None and number in found.before:
        return True
    again = found is not None and number == found.token
    if found is None or not again or found.epoch < epoch:
        _put(where, owner, epoch, found, base)
    return again


def check(where: Place, owner: str, *, epoch: int = 0, claims: bool = True) -> None:
    """Check that a run owns a location; if nothing is marked, or the run that it replaces is, take it.

    Args:
        owner: from :func:`owned_by`; empty: any run may write.
        epoch: that of the state to be saved.
        claims: whether to take it; else it is only checked.

    Raises:
        TakenError: if another run has taken it; the message names that run.
        CheckpointWriteError: if the mark cannot be read or written.
    """
    if not owner:
        return
    number, found = _number(owner), look(where)
    if found is not None and found.token not in (number, owner.partition(" ")[0].partition("/")[2]):
        raise taken(where, found, owner)
    if claims and (found is None or found.token != number or found.epoch < epoch):
        _put(where, owner, epoch, found, None)


def taken(where: Place, found: OwnerMark, owner: str) -> TakenError:
    """Return the error of a run whose location another one has taken."""
    return TakenError(
        f"Two runs write to one directory: {where} was taken since by run {found.run!r:.80} on {found.host!r:.80}; "
        f"this is run {owner.partition(' ')[2]!r}.",
        "Give each run a directory of its own, or end one of them.",
    )


def _number(owner: str) -> str:
    return owner.partition("/")[0]


def _put(where: Place, owner: str, epoch: int, found: OwnerMark | None, base: str | None) -> None:
    number, run = _number(owner), owner.partition(" ")[2]
    before: tuple[str, ...] = ()
    if found is not None:
        epoch, before = max(epoch, found.epoch), tuple(x for x in (*found.before, found.token) if x and x != number)
        base = found.base if found.token == number else base
    mark = OwnerMark(number, run, socket.gethostname(), epoch, before[-_MOST:], base)
    with writing(where, "write to"):
        storage_at(where).put(OWNER, json.dumps({"format": _FORMAT, **asdict(mark)}, indent=1).encode() + b"\n")


def parse_mark(data: bytes) -> OwnerMark | None:
    """Return a mark; None if it is not valid. Those of earlier versions have neither ``before`` nor ``base``."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        return None
    token, epoch, before, base = (value.get(key) for key in ("token", "epoch", "before", "base"))
    texts: list[Any] = [token, *(before if isinstance(before, list) else [])]
    known = all(isinstance(each, str) and len(each) <= _LONGEST for each in texts)
    if not known or (before is not None and not isinstance(before, list)) or type(epoch) is not int:
        return None
    if not 0 <= epoch < MOST_EPOCHS or not isinstance(base, str | None):
        return None
    return OwnerMark(texts[0], str(value.get("run")), str(value.get("host")), epoch, tuple(texts[1:]), base)
