"""``elasticctl logs``: what a rank prints, from the files that the agents on this host have written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_launch.cli.event_lines import LOOK_EVERY
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle
from elastic_launch.observe.reading import begins_another, event_files, node_of, of_last_run, parse, read
from elastic_launch.system.plain_text import plain

PIECE = 1024 * 1024
"""Bytes that are read at a time."""

KINDS = ('"event": "worker_', '"event": "round_formed"', '"event": "order_received"')
"""What the lines have that tell of a worker, or where a further run begins; a file is read again when it grows."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A worker of the rank that ended by itself and unsuccessfully; ``place`` is None if no file has its output."""

    round: int
    pid: int
    code: int
    place: Path | None

    def line(self, rank: int) -> str:
        how = f"with exit code {self.code}" if self.code > 0 else f"by signal {-self.code}"
        where = "is not in a file here" if self.place is None else f"is in {self.place}"
        return f"elasticctl: rank {rank} of round {self.round} (pid {self.pid}) ended {how}; its output {where}"


@dataclass(frozen=True, slots=True)
class _Told:
    """What one file tells of the rank: the round of its newest worker, 0 if it has none, and where its output is."""

    round: int = 0
    place: Path | None = None
    failed: _Failed | None = None


class _Files:
    """Finds the directory with the output of the newest worker of a rank.

    Attributes:
        failed: the last worker of the rank that failed, None if none did.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._sizes: dict[Path, int] = {}
        files = event_files(directory)
        kept = {host.node for host in of_last_run([read(path) for path in files])} if len(files) > 1 else set()
        self._earlier = {path for path in files if kept and node_of(path) not in kept}
        self._told: dict[Path, _Told] = {}
        self.failed: _Failed | None = None

    def newest(self) -> tuple[int, Path | None]:
        """Return the round, 0 if there is none; and the directory, None if the output is not in a file here."""
        for path in event_files(self._directory):
            if path in self._earlier:
                continue
            try:
                size = path.stat().st_size
                if size != self._sizes.get(path):
                    self._sizes[path] = size
                    self._told[path] = self._read(path)
            except OSError as error:
                print(plain(f"{path} cannot be read: {error.strerror}"), file=sys.stderr)
        told = self._told.values()
        self.failed = max((x.failed for x in told if x.failed), key=lambda failed: failed.round, default=None)
        newest = max(told, key=lambda x: x.round, default=_Told())
        return newest.round, newest.place

    def _read(self, path: Path) -> _Told:
        node = node_of(path)
        found, chronicle = _Told(), Chronicle()
        started: dict[int, ev.WorkerStarted] = {}  # by pid
        with path.open(errors="replace") as file:
            for line in file:
                if not any(kind in line for kind in KINDS):
                    continue
                try:
                    told = parse(line)
                except ValueError:
                    continue  # ``elasticctl events`` names it
                if told is None:
                    continue
                if begins_another(chronicle, *told):  # its rounds have numbers of their own
                    found, chronicle, started = _Told(), Chronicle(), {}
                chronicle.add(*told)
                match told[1]:
                    case ev.WorkerStarted() as event:
                        started[event.pid] = event
                    case ev.WorkerKept() | ev.WorkerPlaced() as event:
                        pass
                    case ev.WorkerExited(rank=self._rank, stopped=False, exit_code=code) as ended if code:
                        began = started.get(ended.pid)
                        place = self._place(node, began) if began else None
                        if found.failed is None or ended.round >= found.failed.round:
                            found = replace(found, failed=_Failed(ended.round, ended.pid, code, place))
                        continue
                    case _:
                        continue
                # A worker that stays prints where it did in the round in which it was started.
                if event.rank == self._rank and event.round >= found.round and (first := started.get(event.pid)):
                    found = replace(found, round=event.round, place=self._place(node, first))
        return found

    def _place(self, node: str, first: ev.WorkerStarted) -> Path | None:
        local, number = str(first.local_rank), first.round
        if number:
            places = [Path(f"round_{number}", str(first.rank)), Path(f"attempt_{number - 1}", local)]
            found = [path for place in places if (path := self._directory / place).is_dir()]
        elif first.ahead:
            path = self._directory / f"ahead_{first.ahead}" / node / local
            found = [path] if path.is_dir() else []
        else:  # a version that did not number them
            found = [path for path in self._directory.glob(f"ahead_*/{node}/{local}") if path.is_dir()]
            found.sort(key=lambda path: -int(path.parts[-3].removeprefix("ahead_")))
        return found[0] if found else None


def show_logs(directory: Path, rank: int, *, follow: bool, alive: Callable[[], bool]) -> int:
    """Print what the newest worker of a rank has printed, stdout to stdout and stderr to stderr; return the exit code.

    Args:
        follow: go on while the run has an agent on this host, and with the next worker of this rank in a later round.
    """
    files = _Files(directory, rank)
    number, place = files.newest()
    if not number:
        raise UsageError(
            f"The event files in {directory} have no worker of rank {rank}.", "Ask on the host of its node."
        )
    if place is None:
        hint = "It is kept unless --log-dir is /dev/null or --logs-specs says otherwise; ask on the host of its node."
        raise UsageError(f"The output of rank {rank} in round {number} is not in {directory}.", hint)
    if files.failed is not None and files.failed.place != place:
        print(plain(files.failed.line(rank)), file=sys.stderr, flush=True)
    read: dict[Path, int] = {}
    while True:
        living = follow and alive()
        _pour(place, read)
        if not living:
            return ExitCode.DONE
        time.sleep(LOOK_EVERY)
        now, following = files.newest()
        if following is not None and following != place:
            _pour(place, read)
            if files.failed is not None and files.failed.place == place:
                print(plain(files.failed.line(rank)), file=sys.stderr, flush=True)
            place = following
            print(plain(f"elasticctl: rank {rank} is another worker in round {now}"), file=sys.stderr, flush=True)


def _pour(place: Path, read: dict[Path, int]) -> None:
    """Print what was added to the files since the last call."""
    for name, out in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
        path = place / name
        try:
            with path.open("rb") as file:
                file.seek(read.get(path, 0))
                while data := file.read(PIECE):
                    out.buffer.write(data)
                read[path] = file.tell()
        except FileNotFoundError:
            continue
        except OSError as error:
            print(plain(f"{path} cannot be read: {error.strerror}"), file=sys.stderr)
        out.flush()
