"""Where the workers' output and error files go in each round, and the link to the newest run's directory."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from elastic_agents.workers.logs_specs import NamedLogs
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.output import LATEST, Route
from elastic_launch.contract import NoPlacement, Placement
from elastic_launch.error_file import MOST_BYTES
from elastic_launch.system.private_files import make_private, open_private, read_small
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch.agent")

P = TypeVar("P", Placement, NoPlacement)

PREFIX = f"elastic-launch-errors-{os.uname().nodename.replace('/', '-')}-"
"""How the names of this host's directories for the exceptions of running workers begin."""

PATIENCE = 3.0
"""Seconds that workers wait for their directories to be made."""


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """Where one worker's output goes, and its exception if it uses torch's ``@record``.

    Attributes:
        error_file: where the worker writes its exception.
        kept_error: where :func:`keep_error` copies it, so that no worker waits for that file system; None: nowhere.
    """

    stdout: Route
    stderr: Route
    error_file: Path
    kept_error: Path | None = None

    @property
    def directory(self) -> Path | None:
        """The directory with what the worker printed, if it is kept."""
        path = self.stderr.path or self.stdout.path
        return None if path is None else path.parent


class LogPlaces:
    """Determines where workers' output goes: ``<run>/round_<n>/<rank>/{stdout.log,stderr.log,error.json}``.

    For a worker that is started ahead of a round this is ``<run>/ahead_<n>/<node>/<local rank>/...``, n counting these.

    Owns a local directory for the exceptions of running workers, which would block if log directories hang. It holds a
    lock on it, since nothing removes it if the agent is killed together with its guard: the next agent of this user
    removes those that are not locked.

    Attributes:
        local: that directory; None until workers are to start, and if no file system has room.
        made: called with it once it is made.
        ahead: how often workers were started ahead.

    Args:
        files: makes the directories and copies exceptions there, which may hang.

    Raises:
        UsageError: if the named logs specs are unavailable.
    """

    def __init__(self, config: LaunchConfig, files: Writer) -> None:
        self._config = config
        self._files = files
        named = config.output.logs_specs or config.output.specs is not None
        self._named = NamedLogs(config) if named else None
        self.local: Path | None = None
        self._lock = -1  # a descriptor of it
        self.made: Callable[[Path], None] = lambda local: None
        self._tried = False
        self.ahead = 0
        self._names: set[str] = set()  # of the directories in the local one

    def prepare(
        self,
        number: int,
        placements: Sequence[P],
        environment: Callable[[P, str], dict[str, str]],
        kept: Mapping[int, WorkerLogs],
    ) -> tuple[dict[int, WorkerLogs], dict[int, dict[str, str]]]:
        """Make a round's directories; return the workers' logs, and the environments of new ones, both by local rank.

        Args:
            number: the round's number; 0 for workers that are started ahead of one.
            environment: makes the environment of a worker from its placement and error file.
            kept: logs of workers that run, or are about to be started, by local rank; they remain the same.

        Raises:
            LogsSpecsFailed: if the named logs specs fail.
        """
        if not self._tried:  # not before: a node that gets no worker leaves nothing behind
            self._tried = True
            self.local, self._lock = _local_directory()
            if self.local is not None:
                self.made(self.local)
                self._files.put(partial(_remove_left, self.local.parent))
        if not number:
            self.ahead += 1
        name = self._config.output.round_directory(number) if number else f"ahead_{self.ahead}"
        new = {place.local_rank: self._own(name, place) for place in placements if place.local_rank not in kept}
        if self.local is not None and number:
            used = {logs.error_file.relative_to(self.local).parts[0] for logs in kept.values() if logs.kept_error}
            for unused in self._names - used:
                self._files.put(partial(_remove, self.local / unused))
            self._names &= used
        if self.local is not None:
            self._names.add(name)
            with suppress(OSError):  # then workers leave no exceptions
                for own in new.values():
                    make_private(own.error_file.parent)
        try:
            if new:
                room = partial(_make_room, [own.kept_error or own.error_file for own in new.values()])
                self._files.ask(room, PATIENCE)
        except OSError as error:  # such as a full disk: the workers run without
            whose = f"round {number}" if number else "workers that start ahead"
            _log.warning("no logs are kept of %s: %s", whose, error)
        if self._named is None and new:  # no worker waits for it
            self._files.put(partial(_make_files, list(new.values())))
        logs = {**kept, **new}
        described = [place for place in placements if self._named is not None or place.local_rank in new]
        envs = {place.local_rank: environment(place, str(logs[place.local_rank].error_file)) for place in described}
        if self._named is not None:
            for local_rank, (out, err, error_file) in self._named.places(placements, envs).items():
                if local_rank in kept:
                    continue
                own = logs[local_rank]
                logs[local_rank] = (
                    WorkerLogs(out, err, error_file) if error_file else replace(own, stdout=out, stderr=err)
                )
        return logs, envs

    def close(self) -> None:
        """Remove the local directory, once all exceptions are copied or the file system does not answer."""
        if self.local is not None:
            self._files.flush()
            shutil.rmtree(self.local, ignore_errors=True)
            os.close(self._lock)
            self.local = None

    def _own(self, name: str, placement: Placement | NoPlacement) -> WorkerLogs:
        config = self._config
        directory = config.run_directory / name
        if placement.rank is None:
            directory /= config.node_id  # nodes may share the run's directory
        out, err = config.output.routes(placement, directory, role=config.role, node_id=config.node_id)
        error_file = directory / config.output.worker_directory(placement) / "error.json"
        if self.local is None:
            return WorkerLogs(out, err, error_file)
        local = self.local / error_file.relative_to(config.run_directory)
        return WorkerLogs(out, err, local, error_file)


def keep_error(logs: WorkerLogs) -> None:
    """Copy a worker's exception, if there is one, to where it is kept; may hang."""
    if logs.kept_error is None:
        return
    with suppress(OSError, ValueError):  # there is none; or the disk is full
        data = read_small(logs.error_file, MOST_BYTES)
        make_private(logs.kept_error.parent)
        with open(open_private(logs.kept_error, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(data)


def _local_directory() -> tuple[Path | None, int]:
    """Make a directory that is likely on a local file system, and lock it; None if that is possible nowhere."""
    for parent in (None, "/dev/shm"):
        with suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # file systems without locks: others cannot lock it, and leave it alone, too
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if path.exists():  # else another agent found it before it was locked
                return path, descriptor
            os.close(descriptor)
    return None, -1


def _remove_left(parent: Path, data: bytes) -> None:
    """Remove what agents of this user have left that were killed with all their processes."""
    for path in parent.iterdir():
        with suppress(OSError):
            if not path.name.startswith(PREFIX):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(directory: Path, data: bytes) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _make_room(error_files: Sequence[Path]) -> None:
    for path in error_files:
        make_private(path.parent)
        path.unlink(missing_ok=True)


def _make_files(logs: Sequence[WorkerLogs], data: bytes) -> None:
    """Create the files of all streams that are kept, so that each exists even if nothing is written to it."""
    for route in (route for own in logs for route in (own.stdout, own.stderr)):
        if route.path is not None:
            with suppress(OSError):  # it exists; or it cannot be written, which is reported on the first write
                os.close(os.open(route.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def link_latest(config: LaunchConfig) -> None:
    """Make the link to the newest run's directory, atomically, so that it always points to one.

    Agents of one run make the same link. Anything else with this name is left alone.
    """
    base = config.link_dir or config.log_dir
    link = base / LATEST
    temporary = base / f".{LATEST}-{secrets.token_hex(8)}"
    try:
        make_private(config.run_directory)
        if link.is_symlink() or not link.exists():
            temporary.symlink_to(os.path.relpath(config.run_directory, base))
            temporary.replace(link)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        _log.debug("no link %s: %s", link, error)
