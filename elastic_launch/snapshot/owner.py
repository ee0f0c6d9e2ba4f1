"""Which run a URL belongs to, so that two runs do not write to one. Needs no torch.

A run that reads its checkpoints takes the URL, by putting its id and a random token there. Whoever is about to
commit a checkpoint looks whether that was the last to take it. It is a check, not a lock, which object stores do not
have: of two runs that live the later one goes on saving, and the earlier one is told.
"""

from __future__ import annotations

import json
import secrets
import socket
from typing import Any

from elastic_launch.snapshot.errors import CheckpointWriteError, MalformedError
from elastic_launch.snapshot.place import Url
from elastic_launch.snapshot.storage import Storage, saving

__all__ = ["OWNER", "check", "claim", "owned_by"]

OWNER = "owner.json"
_FORMAT = "elastic-launch owner"
_LIMIT = 16 * 1024


def claim(url: Url, run: str) -> str:
    """Take a URL; return what :func:`check` asks for.

    Args:
        run: id of the run; may be empty.

    Raises:
        CheckpointWriteError: if nothing can be written there.
    """
    token = secrets.token_hex(8)
    _put(url, run, token)
    return f"{token} {run}"


def owned_by(run: str) -> str:
    """Return what :func:`check` asks for where this run took a URL before; its id must tell it from others."""
    return f" {run}"


def check(url: Url, owner: str) -> None:
    """Refuse to write to a URL that another run has taken; one that nobody has is taken.

    Args:
        owner: from :func:`claim` or :func:`owned_by`; empty: anybody.

    Raises:
        CheckpointWriteError: naming the other run.
    """
    if not owner:
        return
    token, _, run = owner.partition(" ")
    found = _read(url)
    if found is None:
        _put(url, run, token or secrets.token_hex(8))
    elif (token and found.get("token") != token) or (not token and found.get("run") != run):
        raise CheckpointWriteError(
            f"Two runs write to one directory: {url} was taken since by run {found.get('run')!r:.80} "
            f"on {found.get('host')!r:.80}; this is run {run!r}.",
            "Give each run a directory of its own, or end one of them.",
        )


def _put(url: Url, run: str, token: str) -> None:
    marker = {"format": _FORMAT, "run": run, "token": token, "host": socket.gethostname()}
    with saving(url, "write to"):
        Storage(url).put(url / OWNER, json.dumps(marker, indent=1).encode() + b"\n")


def _read(url: Url) -> dict[str, Any] | None:
    """Return the mark; None if there is none that makes sense."""
    with saving(url, "read the owner of"):
        try:
            return _parse(Storage(url).read(url / OWNER, _LIMIT))
        except (FileNotFoundError, MalformedError):
            return None


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value.get("format") == _FORMAT else None
