"""Records which run a directory or URL belongs to, so that two runs do not write to one. Needs no torch.

A run takes a location when it reads its checkpoints there, or with its first checkpoint on a node that has come to it
later: it writes a mark with its number, and those of the runs that had it before. Before a run commits a checkpoint, it
checks that no other one has taken the location since. This is a check, not a lock, which object stores do not have: of
two active runs, the later one continues to save, and the earlier one gets an error.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from elastic_launch.snapshot.errors import MalformedError, TakenError, writing
from elastic_launch.snapshot.location import Place
from elastic_launch.snapshot.storage.listing import storage_at

OWNER = "owner.json"
_FORMAT = "elastic-launch owner"
_LIMIT = 16 * 1024

_MOST = 256
"""How many earlier runs a mark names."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """How a run stands to a location.

    Attributes:
        epoch: how many trainings have taken it, without those of a run that has taken it from this one.
        taken: whether this run has taken it.
        lost_to: id of the run that has taken it since, as text; empty if none has.
    """

    epoch: int = 0
    taken: bool = False
    lost_to: str = ""


def owned_by(number: str, run: str) -> str:
    """Return the ``owner`` to pass to the functions below: the run's number and its id."""
    return f"{number} {run}"


def ownership(where: Place, owner: str) -> Ownership:
    """Return how a run stands to a directory or URL."""
    number = owner.partition(" ")[0]
    found = _read(where)
    if found is None:
        return Ownership()
    if number in found["before"]:
        return Ownership(taken=True, lost_to=f"{found.get('run')!r:.80}")
    return Ownership(found["epoch"], found.get("token") == number)


def claim(where: Place, owner: str, *, epoch: int = 0) -> bool:
    """Take a directory or URL for a run's training with that epoch, unless another run has taken it since.

    Returns:
        Whether this run had taken it before.
    """
    number = owner.partition(" ")[0]
    found = _read(where)
    again = found is not None and number in (found.get("token"), *found["before"])
    if found is None or not again or (found.get("token") == number and found["epoch"] < epoch):
        _put(where, owner, epoch, found)
    return again


def check(where: Place, owner: str, *, epoch: int | None = None, claims: bool = True) -> None:
    """Check that no other run has taken a location from this one; if this one has never had it, take it.

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
    number, _, run = owner.partition(" ")
    found = _read(where)
    if found is not None and number in found["before"]:
        raise TakenError(
            f"Two runs write to one directory: {where} was taken since by run {found.get('run')!r:.80} "
            f"on {found.get('host')!r:.80}; this is run {run!r}.",
            "Give each run a directory of its own, or end one of them.",
        )
    if claims and (found is None or found.get("token") != number or found["epoch"] < (epoch or 0)):
        _put(where, owner, epoch or 0, found)


def _put(where: Place, owner: str, epoch: int, found: dict[str, Any] | None) -> None:
    number, _, run = owner.partition(" ")
    before = [] if found is None else [*found["before"], str(found.get("token", ""))]
    epoch = epoch if found is None else max(epoch, found["epoch"])
    marker: dict[str, Any] = {
        "format": _FORMAT,
        "run": run,
        "token": number,
        "host": socket.gethostname(),
        "epoch": epoch,
    }
    marker["before"] = [each for each in before if each != number][-_MOST:]
    with writing(where, "write to"):
        storage_at(where).put(OWNER, json.dumps(marker, indent=1).encode() + b"\n")


def _read(where: Place) -> dict[str, Any] | None:
    """Return the mark; None if there is no valid one."""
    with writing(where, "read the owner of"):
        try:
            return parse_mark(storage_at(where).read(OWNER, _LIMIT))
        except (FileNotFoundError, NotADirectoryError, MalformedError):
            return None


def parse_mark(data: bytes) -> dict[str, Any] | None:
    """Return the content of a mark; None if it is not valid."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("format") != _FORMAT or not isinstance(value.get("epoch"), int):
        return None
    before = value.setdefault("before", [])  # marks of earlier versions have none
    return value if isinstance(before, list) and all(isinstance(each, str) for each in before) else None
