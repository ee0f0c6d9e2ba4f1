"""``elasticctl events``: what happened, from the event files of a run's directory, as lines for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from elastic_launch.errors import ExitCode
from elastic_launch.events.sentences import sentence
from elastic_launch.observe.reading import UnusableLines, event_files, node_of
from elastic_launch.system.plain_text import one_line, plain

LOOK_EVERY = 0.5
"""Seconds between two looks at the files while they are followed."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An event; ``time`` is its own in UTC, as it is written: such texts sort by time."""

    time: str
    node: str
    raw: str
    text: str


class _Tail:
    """Reads what is added to one node's file; a line counts once it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refused = UnusableLines(path)
        self._complained = False
        self._offset = 0
        self._pending = b""

    def read(self) -> Iterator[_Line]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            if not self._complained:
                self._complained = True
                print(plain(f"{self.path} cannot be read: {error.strerror}"), file=sys.stderr)
            return
        self._offset += len(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if (parsed := self._refused.parse(text)) is None:
                continue
            value, found = parsed
            words = sentence(found[1]) if found is not None else "an event of another version"
            said = f"{value['event']}: {one_line(words)}"
            yield _Line(str(value.get("time", "")), node_of(self.path), text, said)

    def complain(self) -> None:
        """Say what could not be used, in one line."""
        if not self._refused.lines and self._pending:
            self._refused.parse(self._pending.decode(errors="replace"))  # of another file, which has no lines
        text = self._refused.text()
        if not (text or self._refused.lines or self._complained):
            text = f"{self.path} is empty"
        if text:
            print(plain(text), file=sys.stderr)


def show_events(directory: Path, *, since: float | None, follow: bool, as_json: bool, alive: Callable[[], bool]) -> int:
    """Print the events of a run's directory in the order of their times; return the exit code.

    Args:
        since: only those of so many last seconds; None: all.
        follow: go on until no agent of the run is alive on this host.
        as_json: print the lines as they are in the files.
        alive: whether one is.
    """
    tails = {path: _Tail(path) for path in event_files(directory)}
    first = "" if since is None else (datetime.now(UTC) - timedelta(seconds=since)).isoformat(timespec="milliseconds")
    while True:
        ends = not follow or not alive()  # before the files are read, so that the last lines are not missed
        _print([line for tail in tails.values() for line in tail.read() if line.time >= first], as_json=as_json)
        if ends:
            for tail in tails.values():
                tail.complain()
            return ExitCode.DONE
        time.sleep(LOOK_EVERY)
        tails |= {path: _Tail(path) for path in directory.glob("events-*.jsonl") if path not in tails}


def _print(lines: Sequence[_Line], *, as_json: bool) -> None:
    for line in sorted(lines, key=lambda line: line.time):
        print(line.raw if as_json else plain(f"{line.time[:23]}Z  {line.node}  {line.text}"), flush=True)
