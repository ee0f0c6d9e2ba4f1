"""Which run a place for checkpoints belongs to, so that two runs do not write to one. Needs no torch.

A run that reads its checkpoints takes the place, by putting its id and a random token there. Whoever is about to
commit a checkpoint looks whether that was the last to take it. It is a check, not a lock, which object stores do not
have: of two runs that live the later one goes on saving, and the earlier one is told.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from typing import Any

from elastic_launch.snapshot.errors import CheckpointWriteError, MalformedError, writing
from elastic_launch.snapshot.files import read_small
from elastic_launch.snapshot.place import Place, Url
from elastic_launch.snapshot.storage import Storage, saving

__all__ = ["OWNER", "check", "claim", "owned_by"]

OWNER = "owner.json"
_FORMAT = "elastic-launch owner"
_LIMIT = 16 * 1024


def claim(place: Place, run: str) -> str:
    """Take a place, which must be there if it is a directory; return what :func:`check` asks for.

    Args:
        run: id of the run; may be empty.

    Raises:
        CheckpointWriteError: if nothing can be written there.
    """
    token = secrets.token_hex(8)
    _put(place, run, token)
    return f"{token} {run}"


def owned_by(run: str) -> str:
    """Return what :func:`check` asks for where this run took a place before; its id must tell it from others."""
    return f" {run}"


def check(place: Place, owner: str) -> None:
    """Refuse to write to a place that another run has taken; one that nobody has is taken.

    Args:
        owner: from :func:`claim` or :func:`owned_by`; empty: anybody.

    Raises:
        CheckpointWriteError: naming the other run.
    """
    if not owner:
        return
    token, _, run = owner.partition(" ")
    found = _read(place)
    if found is None:
        _put(place, run, token or secrets.token_hex(8))
    elif (token and found.get("token") != token) or (not token and found.get("run") != run):
        raise CheckpointWriteError(
            f"Two runs write to one directory: {place} was taken since by run {found.get('run')!r:.80} "
            f"on {found.get('host')!r:.80}; this is run {run!r}.",
            "Give each run a directory of its own, or end one of them.",
        )


def _put(place: Place, run: str, token: str) -> None:
    marker = {"format": _FORMAT, "run": run, "token": token, "host": socket.gethostname()}
    data = json.dumps(marker, indent=1).encode() + b"\n"
    if isinstance(place, Url):
        with saving(place, "write to"):
            Storage(place).put(place / OWNER, data)
        return
    with writing(place, "write to"):
        new = place / f".{OWNER}-{secrets.token_hex(8)}"
        try:
            new.write_bytes(data)
            os.replace(new, place / OWNER)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def _read(place: Place) -> dict[str, Any] | None:
    """Return the marker; None if there is none that makes sense."""
    try:
        if isinstance(place, Url):
            with saving(place, "read the owner of"), suppress(FileNotFoundError):
                return _parse(Storage(place).read(place / OWNER, _LIMIT))
        else:
            with writing(place, "read the owner of"), suppress(FileNotFoundError):
                return _parse(read_small(place / OWNER, _LIMIT))
    except MalformedError:
        return None
    return None


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value.get("format") == _FORMAT else None
