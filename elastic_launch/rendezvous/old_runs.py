"""Removes the directories of runs that are over, except for the newest ones.

What is removed was written by agents: a directory that has anything else stays whole. A run is over if no agent holds a
lock there, and each node has recorded its end, or nothing has changed for a week: an agent that is killed records none,
and some network file systems have no locks.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from elastic_launch.rendezvous.run_file import FILE, is_inhabited

SILENCE = 7 * 86400.0
"""Seconds without a change after which a run is over whose nodes have not recorded their end."""

_START = re.compile(r"\d{8}T\d{6}Z-\d+")
"""The directory of a launch without ``--log-dir``."""

_WRITTEN = re.compile(
    r"""(?:
        run\.json | \.run\.json\.[0-9a-f]+ | token | events-[^/]+\.jsonl | imports-[^/]+\.log
      | (?:round|ahead)_\d+
        (?:/(?:filtered_std(?:out|err)-[^/]+\.log | stacks-[^/]+\.txt))?
      | (?:round_\d+ | ahead_\d+/[^/]+)
        (?:/\d+(?:/(?:std(?:out|err)\.log | error\.json | stacks\.txt | collectives\.(?:json|json\.tmp|fifo)))?)?
    )""",
    re.VERBOSE,
)
"""Paths in a run's directory that an agent makes, see docs/reference/files.md."""

_LAST_LINE = 1 << 18
"""Bytes in which the last event of a node is; that of its end has the root cause, with lines of a worker's output."""


def runs_in(base: Path, *, named: bool) -> list[Path]:
    """Return the directories of launches, the newest first.

    Args:
        named: whether ``base`` was named by ``--log-dir``, so that it has a directory for each run. Else it has one for
            each launch.

    Raises:
        OSError: if they cannot be listed.
    """
    found = []
    for entry in os.scandir(base):
        if entry.is_dir(follow_symlinks=False) and (named or _START.fullmatch(entry.name)):
            path = Path(entry.path)
            if not named:
                found.append((entry.name, path))
            elif (path / FILE).is_file():
                found.append((f"{(path / FILE).stat().st_mtime:020.3f}", path))
    return [path for _, path in sorted(found, reverse=True)]


def prune(base: Path, keep: int, *, named: bool, own: Path | None = None, now: float | None = None) -> Iterator[Path]:
    """Remove the directories of runs that are over, except for the newest ones; yield each that was removed.

    Args:
        keep: number of launches that stay.
        named: see :func:`runs_in`.
        own: the directory of the calling one, which is among those that stay.
        now: the time since the epoch, in seconds; None for that of the clock.

    Raises:
        OSError: at the end, if a directory could not be read or removed.
    """
    failed: OSError | None = None
    now = time.time() if now is None else now
    others = [path for path in runs_in(base, named=named) if path != own]
    for path in others[keep if own is None else keep - 1 :]:
        try:
            runs = [path] if named else [Path(each.path) for each in os.scandir(path)]
            if not runs and now - path.stat().st_mtime <= SILENCE:
                continue  # its agent has only just made it
            written = {run: _if_over(run, now) for run in runs}
            if None in written.values():
                continue
            for run, paths in written.items():
                _remove(run, paths or [])
            if not named:
                path.rmdir()
        except FileNotFoundError:
            continue  # another agent removes it, too
        except OSError as error:
            failed = failed or error
            continue
        yield path
    if failed is not None:
        raise failed


def _if_over(run: Path, now: float) -> list[Path] | None:
    """Return what is below a run's directory if only agents made it, and none of them lives; else None."""
    if run.is_symlink() or not run.is_dir() or is_inhabited(run):
        return None
    newest, paths = run.stat().st_mtime, list(_walk(run))
    for path in paths:
        found = path.lstat()
        regular = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISFIFO(found.st_mode)
        if not regular or not _WRITTEN.fullmatch(str(path.relative_to(run))):
            return None
        newest = max(newest, found.st_mtime)
    nodes = list(run.glob("events-*.jsonl"))
    over = (bool(nodes) and all(map(_has_ended, nodes))) or now - newest > SILENCE
    return paths if over else None


def _walk(run: Path) -> Iterator[Path]:
    """Yield everything below a directory, each directory after what is in it; links are not followed."""
    for directory, directories, files in os.walk(run, topdown=False):
        yield from (Path(directory, name) for name in (*files, *directories))


def _has_ended(events: Path) -> bool:
    with open(events, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_LINE))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    return last.startswith(b'{"event": "node_ended"')


def _remove(run: Path, paths: list[Path]) -> None:
    """Remove what a run has left; ``run.json``, by which the directory is known as a run's, at the end."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif path != run / FILE:
            path.unlink(missing_ok=True)
    (run / FILE).unlink(missing_ok=True)
    run.rmdir()
