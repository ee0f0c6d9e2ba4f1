"""Where a run can be reached, as each agent leaves it in its run's directory: the file ``run.json``.

An agent locks the file for as long as it lives, and no lock outlives its process: that tells a run that is there
from one that was. The file holds no secret. A token that the agent has made itself is beside it, in the file ``token``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.wire import codec
from elastic_launch.secret import Token, read_token
from elastic_launch.system.private_files import make_private, open_private, read_small

__all__ = ["FILE", "TOKEN_FILE", "FoundRun", "RunAddress", "RunFile", "find"]

_log = logging.getLogger(__name__)

FILE = "run.json"

TOKEN_FILE = "token"
"""The token of a run that was given none, for its user alone; there as long as the run is."""

MAX_BYTES = 65536
"""Of such a file."""


@dataclass(frozen=True, slots=True)
class RunAddress:
    """Where a run can be reached.

    Attributes:
        endpoint: as ``--rdzv-endpoint`` takes it.
        node_id: of the agent that wrote this.
        leader: where the leader's links listened last, empty if that was not known: who finds one there need not ask
            the store.
        code, cause: how that agent ended, None while it is there.
    """

    run_id: str
    backend: str
    endpoint: str
    node_id: str
    leader: str = ""
    code: int | None = None
    cause: str = ""


class RunFile:
    """An agent's file in its run's directory; a directory that cannot be written stops nothing.

    Where nodes share the directory, the last one's file stays; so only a node that belongs to the run may write.

    Args:
        token: of a run that nobody else could know it of; None: the user has it, if there is one.
    """

    def __init__(self, directory: Path, token: Token | None = None) -> None:
        self._path = directory / FILE
        self._token = token
        self._lock = -1
        self._written: RunAddress | None = None
        self._unwritable = False

    def write(self, whereabouts: RunAddress) -> None:
        """Put the file there in one go, locked, unless it says so already."""
        if self._unwritable or whereabouts == self._written:
            return
        self.close()
        new = self._path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        try:
            make_private(self._path.parent)
            if self._token is not None and self._written is None:
                self._put_token(self._token)
            self._lock = open_private(new, os.O_WRONLY | os.O_EXCL)
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.write(self._lock, json.dumps(asdict(whereabouts)).encode() + b"\n")
            os.rename(new, self._path)
            self._written = whereabouts
        except OSError as error:
            self._unwritable = True
            then = "elasticctl needs the run's endpoint" if self._token is None else "elasticctl cannot reach this run"
            _log.warning("%s cannot be written, so %s: %s", self._path, then, error)
            with contextlib.suppress(OSError):
                new.unlink()

    def _put_token(self, token: Token) -> None:
        path = self._path.with_name(TOKEN_FILE)
        path.unlink(missing_ok=True)  # of an agent that was killed
        with open(open_private(path, os.O_WRONLY | os.O_EXCL), "w") as file:
            file.write(token.reveal() + "\n")

    def end(self, code: int, cause: str) -> None:
        """Note how this agent ended, unless another agent's file is there by now."""
        mine, self._written = self._written, None
        if mine is not None and _read(self._path) == mine:
            token, self._token = self._token, None
            self.write(replace(mine, code=code, cause=cause))
            if token is not None:
                with contextlib.suppress(OSError):
                    self._path.with_name(TOKEN_FILE).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):  # network file systems may say only now that there was no room
                os.close(lock)


class FoundRun(NamedTuple):
    """A run by the file that an agent has left in a directory."""

    run: RunAddress
    directory: Path

    def token(self) -> Token | None:
        """The token that the run's agent has made, if it has.

        Raises:
            UsageError: if this user may not read it.
        """
        path = self.directory / TOKEN_FILE
        return read_token(str(path), {}) if os.path.lexists(path) else None


def find(base: Path, run_id: str | None, depth: int) -> tuple[list[FoundRun], bool]:
    """Return the runs whose files are in ``<base>/<depth - 1 directories>/<run id>/run.json``, each once.

    Those with a live agent on a host whose locks are seen here, if there are any; else all, the newest first.

    Args:
        run_id: the one that is looked for, or None.

    Returns:
        the runs, and whether they are alive.
    """
    paths = list(base.glob("/".join(["*"] * depth + [FILE])))
    dated = sorted(((_changed(path), path) for path in paths), reverse=True)
    read = [(_read(path), path) for _, path in dated]
    found = [FoundRun(run, path.parent) for run, path in read if run and run_id in (None, run.run_id)]
    alive = _distinct(each for each in found if _locked(each.directory / FILE))
    return (alive, True) if alive else (_distinct(found), False)


def _distinct(runs: Iterable[FoundRun]) -> list[FoundRun]:
    """Several agents of a run on one host have a file each."""
    seen = {(each.run.run_id, each.run.backend, each.run.endpoint): each for each in reversed(list(runs))}
    return list(seen.values())[::-1]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> RunAddress | None:
    try:
        return codec.decode(RunAddress, codec.loads(read_small(path, MAX_BYTES)))
    except (OSError, ValueError, ProtocolError):
        return None


def _locked(path: Path) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
