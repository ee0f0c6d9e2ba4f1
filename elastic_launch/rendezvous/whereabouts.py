"""Where a run can be reached, as each agent leaves it in its run's directory: the file ``run.json``.

An agent locks the file for as long as it lives, and no lock outlives its process: that tells a run that is there
from one that was. The file holds no secret.
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

from elastic_launch.errors import ProtocolError
from elastic_launch.private import make_private, open_private, read_small
from elastic_launch.rendezvous import codec

__all__ = ["FILE", "RunFile", "Whereabouts", "find"]

_log = logging.getLogger(__name__)

FILE = "run.json"

MAX_BYTES = 65536
"""Of such a file."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
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

    Where nodes share the directory, the last one's file stays.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = -1
        self._written: Whereabouts | None = None

    def write(self, whereabouts: Whereabouts) -> None:
        """Put the file there in one go, locked."""
        self.close()
        new = self._path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        try:
            make_private(self._path.parent)
            self._lock = open_private(new, os.O_WRONLY | os.O_EXCL)
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.write(self._lock, json.dumps(asdict(whereabouts)).encode() + b"\n")
            os.rename(new, self._path)
            self._written = whereabouts
        except OSError as error:
            _log.warning("%s cannot be written, so elasticctl needs the run's endpoint: %s", self._path, error)
            with contextlib.suppress(OSError):
                new.unlink()

    def led_from(self, leader: str) -> None:
        """Note where the leader is."""
        if self._written is not None and self._written.leader != leader:
            self.write(replace(self._written, leader=leader))

    def end(self, code: int, cause: str) -> None:
        """Note how this agent ended, unless another agent's file is there by now."""
        mine, self._written = self._written, None
        if mine is not None and _read(self._path) == mine:
            self.write(replace(mine, code=code, cause=cause))
        self.close()

    def close(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):  # network file systems may say only now that there was no room
                os.close(lock)


def find(base: Path, run_id: str | None, depth: int) -> tuple[list[Whereabouts], bool]:
    """Return the runs whose files are in ``<base>/<depth - 1 directories>/<run id>/run.json``, each once.

    Those with a live agent on a host whose locks are seen here, if there are any; else all, the newest first.

    Args:
        run_id: the one that is looked for, or None.

    Returns:
        the runs, and whether they are alive.
    """
    paths = list(base.glob("/".join(["*"] * depth + [FILE])))
    dated = sorted(((_changed(path), path) for path in paths), reverse=True)
    found = [(path, run) for _, path in dated if (run := _read(path)) and run_id in (None, run.run_id)]
    alive = _distinct(run for path, run in found if _locked(path))
    return (alive, True) if alive else (_distinct(run for _, run in found), False)


def _distinct(runs: Iterable[Whereabouts]) -> list[Whereabouts]:
    """Several agents of a run on one host have a file each."""
    return list({(run.run_id, run.backend, run.endpoint): run for run in reversed(list(runs))}.values())[::-1]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> Whereabouts | None:
    try:
        return codec.decode(Whereabouts, codec.loads(read_small(path, MAX_BYTES)))
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
