"""Records which run a directory or URL belongs to, so that two runs do not write to one. Needs no torch.

A run takes a location when it reads its checkpoints there, by writing a mark with its id and a random token. Before a
run commits a checkpoint, it checks that it was the last to take the location. This is a check, not a lock, which object
stores do not have: of two active runs, the later one continues to save, and the earlier one gets an error.
"""

from __future__ import annotations

import json
import secrets
import socket
from typing import Any

from elastic_launch.snapshot.errors import MalformedError, TakenError, writing
from elastic_launch.snapshot.location import Place
from elastic_launch.snapshot.storage.listing import storage_at

OWNER = "owner.json"
_FORMAT = "elastic-launch owner"
_LIMIT = 16 * 1024


def claim(where: Place, run: str, *, again: bool = False, epoch: int = 0) -> str:
    """Take a directory or URL as the run's training with that epoch; return the ``owner`` to pass to :func:`check`.

    ``again``: the id is unique, and earlier processes of the run may have taken the location: then their token stays,
    since copies that they have requested may be under way.
    """
    if again and (found := _read(where)) is not None and found.get("run") == run:
        if found["epoch"] < epoch:
            _put(where, run, str(found["token"]), epoch)
        return owned_by(run)
    token = secrets.token_hex(8)
    _put(where, run, token, epoch)
    return f"{token} {run}"


def owned_by(run: str) -> str:
    """Return the ``owner`` to pass to :func:`check` if this run took the location before; its id must be unique."""
    return f" {run}"


def epoch_in(where: Place) -> int:
    """Return how many trainings have taken a directory or URL; 0 if that is not recorded."""
    found = _read(where)
    return 0 if found is None else int(found["epoch"])


def other_owner(where: Place, run: str) -> str:
    """Return the id of the run that took a directory or URL last; empty if it was this run or none."""
    found = _read(where)
    return "" if found is None or found.get("run") == run else f"{found.get('run')!r:.80}"


def check(where: Place, owner: str, *, take: bool = False, epoch: int | None = None, claims: bool = True) -> None:
    """Check that no other run has taken a location; if no run has, take it.

    Args:
        owner: from :func:`claim` or :func:`owned_by`; empty: any run may write.
        take: take the location from another run, unless ``owner`` is from :func:`claim`.
        epoch: that of the state to be saved. If a later training has taken the location, this one has been resumed
            or begun anew since, maybe under the same id.
        claims: whether to take it; else it is only checked.

    Raises:
        TakenError: if another run has taken it; the message names that run.
        CheckpointWriteError: if the mark cannot be read or written.
    """
    if not owner:
        return
    token, _, run = owner.partition(" ")
    found = _read(where)
    others = found is not None and (found.get("token") != token if token else found.get("run") != run)
    if found is None or (others and take and not token):
        if claims:
            _put(where, run, token or secrets.token_hex(8), epoch or 0)
    elif others or (epoch is not None and found["epoch"] > epoch):
        raise TakenError(
            f"Two runs write to one directory: {where} was taken since by run {found.get('run')!r:.80} "
            f"on {found.get('host')!r:.80}; this is run {run!r}.",
            "Give each run a directory of its own, or end one of them.",
        )


def _put(where: Place, run: str, token: str, epoch: int) -> None:
    marker = {"format": _FORMAT, "run": run, "token": token, "host": socket.gethostname(), "epoch": epoch}
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
    known = isinstance(value, dict) and value.get("format") == _FORMAT and isinstance(value.get("epoch"), int)
    return value if known else None
