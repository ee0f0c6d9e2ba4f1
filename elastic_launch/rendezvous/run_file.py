"""The file ``run.json``, which each agent writes to its run's directory: how to reach the run.

An agent holds a lock on the file and on its directory while it lives, and the locks end with its process; so a locked
file or directory means a live run. The directory counts for an agent whose file another node has replaced, where the
file system can lock directories. The file contains no secret. If the agent generated a token, it is next to it, in the
file ``token``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.secret import Token, read_token
from elastic_launch.system.private_files import make_private, open_private, read_small
from elastic_launch.system.whole_writes import write_whole

_log = logging.getLogger(__name__)

FILE = "run.json"

TOKEN_FILE = "token"
"""File with the generated token of a run that was given none: readable only by its user, and there while the run is."""

MAX_BYTES = 65536
"""Largest size of such a file."""

_TRIES, _PAUSE = 20, 0.01
"""How often an agent tries to lock the directory, and how many seconds it waits in between."""


@dataclass(frozen=True, slots=True)
class RunAddress:
    """How to reach a run.

    Attributes:
        endpoint: in the format of ``--rdzv-endpoint``.
        node_id: the node id of the agent that wrote the file.
        leader: the last known address of the leader's links, or empty. A client that finds the leader there need not
            ask the store.
        code, cause: how that agent ended; None while it runs.
    """

    run_id: str
    backend: str
    endpoint: str
    node_id: str
    leader: str = ""
    code: int | None = None
    cause: str = ""


class RunFile:
    """An agent's file in its run's directory. Failing to write it is not an error.

    If nodes share the directory, the last writer's file stays; so only a node that belongs to the run may write. The
    node whose agent ends last records its end.

    Args:
        token: the token that the agent generated; None if the user supplied it, or if there is none.
    """

    def __init__(self, directory: Path, token: Token | None = None) -> None:
        self._path = directory / FILE
        self._token = token
        self._lock = -1
        self._directory_lock = -1
        self._written: RunAddress | None = None
        self._unwritable = False

    def write(self, run_address: RunAddress) -> None:
        """Write the file atomically and locked, unless it already has this content."""
        if self._unwritable or run_address == self._written:
            return
        self._unlock()
        new = self._path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        try:
            make_private(self._path.parent)
            if self._written is None:
                self._warn_of_others(run_address)
                if self._token is not None:
                    self._put_token(self._token)
            self._lock = open_private(new, os.O_WRONLY | os.O_EXCL)
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            write_whole(self._lock, json.dumps(asdict(run_address)).encode() + b"\n")
            os.rename(new, self._path)
            self._written = run_address
            if self._directory_lock < 0:
                self._directory_lock = _held(self._path.parent)
        except OSError as error:
            self._unwritable = True
            then = "elasticctl needs the run's endpoint" if self._token is None else "elasticctl cannot reach this run"
            _log.warning("%s cannot be written, so %s: %s", self._path, then, error)
            with contextlib.suppress(OSError):
                new.unlink()

    def _warn_of_others(self, mine: RunAddress) -> None:
        found = _read(self._path)
        if found is not None and _are_two_runs(found, mine) and _locked(self._path):
            _log.warning(
                "another run with the id %s, at %s, is alive and has the same directory, %s: their logs, events and "
                "reports are mixed, and elasticctl finds only the last one by it. "
                "Give each run its own --rdzv-id or --log-dir",
                found.run_id,
                found.endpoint,
                self._path.parent,
            )

    def _put_token(self, token: Token) -> None:
        path = self._path.with_name(TOKEN_FILE)
        path.unlink(missing_ok=True)  # left by an agent that was killed
        with open(open_private(path, os.O_WRONLY | os.O_EXCL), "w") as file:
            file.write(token.reveal() + "\n")

    def end(self, code: int, cause: str) -> None:
        """Record how this agent ended, unless another agent has replaced the file and is alive."""
        mine, self._written = self._written, None
        if mine is not None and self._is_free(mine):
            token, self._token = self._token, None
            self.write(replace(mine, code=code, cause=cause))
            if token is not None:
                with contextlib.suppress(OSError):
                    self._path.with_name(TOKEN_FILE).unlink(missing_ok=True)
        self.close()

    def _is_free(self, mine: RunAddress) -> bool:
        """Whether the file is this agent's, or that of another node of the run whose agent has ended.

        An agent that is locked out of sight, on another host, may be alive; so its file must say that it has ended.
        """
        found = _read(self._path)
        if found is None or found == mine:
            return found is not None
        same = (found.run_id, found.backend, found.endpoint) == (mine.run_id, mine.backend, mine.endpoint)
        ended = found.code is not None and not _locked(self._path)
        return same and found.node_id != mine.node_id and ended

    def close(self) -> None:
        self._unlock()
        lock, self._directory_lock = self._directory_lock, -1
        if lock >= 0:
            os.close(lock)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):  # network file systems may report a full disk only now
                os.close(lock)


class FoundRun(NamedTuple):
    """A run found by the file that one of its agents wrote."""

    run: RunAddress
    directory: Path

    def token(self) -> Token | None:
        """The token that the run's agent generated, or None.

        Raises:
            UsageError: if this user may not read it.
        """
        path = self.directory / TOKEN_FILE
        return read_token(str(path), {}) if os.path.lexists(path) else None


def find(base: Path, run_id: str | None, depth: int) -> tuple[list[FoundRun], bool]:
    """Return the runs whose files are ``<base>/<depth - 1 directories>/<run id>/run.json``, each once.

    If any has a live agent on a host whose locks are visible here, return only those; else all, the newest first.

    Args:
        run_id: the run to look for, or None for any.

    Returns:
        The runs, and whether they are alive.
    """
    dated = sorted(((_changed(path), path) for path in _files(base, depth)), reverse=True)
    read = [(_read(path), path) for _, path in dated]
    found = [FoundRun(run, path.parent) for run, path in read if run and run_id in (None, run.run_id)]
    # How one node's agent has ended says nothing about a run in which others are alive.
    alive = _distinct(
        each._replace(run=replace(each.run, code=None, cause="")) for each in found if is_inhabited(each.directory)
    )
    return (alive, True) if alive else (_distinct(found), False)


def damaged(base: Path, depth: int) -> list[Path]:
    """Return the files in which :func:`find` would look for a run, but which do not hold one or cannot be read."""
    return sorted(path for path in _files(base, depth) if _read(path) is None)


def _files(base: Path, depth: int) -> Iterable[Path]:
    return base.glob("/".join(["*"] * depth + [FILE]))


def _are_two_runs(one: RunAddress, other: RunAddress) -> bool:
    """Whether two agents of one host belong to two runs of the same id; an endpoint can be written in several ways."""
    if one.endpoint == other.endpoint or not one.leader or not other.leader:
        return False
    return one.backend == other.backend and one.leader.rpartition(":")[2] != other.leader.rpartition(":")[2]


def _distinct(runs: Iterable[FoundRun]) -> list[FoundRun]:
    """Drop duplicates: several agents of one run on one host have a file each."""
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


def _held(directory: Path) -> int:
    """Lock a directory together with the run's other agents; return its descriptor, or -1 if that is not possible."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # a reader looks whether it is locked
            time.sleep(_PAUSE)
        except OSError:  # some network file systems have no locks
            break
        else:
            return descriptor
    os.close(descriptor)
    return -1


def is_inhabited(directory: Path) -> bool:
    """Whether an agent of the run with this directory is alive on a host whose locks are visible here."""
    return _locked(directory / FILE) or _locked(directory)


def _locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
