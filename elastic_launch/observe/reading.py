"""Reads the event files of a run's directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elastic_launch import __version__, codec
from elastic_launch.errors import ProtocolError, UsageError
from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle

LONGEST_LINE = 4 * 1024 * 1024
"""Longest line that is read, in characters; a round of 16,000 nodes has fewer."""

CLOCK_SLACK = 1.0
"""Seconds by which the clock may fall: threads may write in a different order than they read it."""


@dataclass(frozen=True, slots=True)
class EventLine:
    """What every line has."""

    event: str
    clock: float


@dataclass(frozen=True, slots=True)
class Host:
    """One host's event file.

    Attributes:
        offset: seconds by which Unix time is ahead of the host's clock, by its last event; None if that has no time.
    """

    node: str
    chronicle: Chronicle  # the events of the last run in the file, if there are several
    complaints: tuple[str, ...]  # what could not be used, and where
    told: tuple[tuple[float, ev.Event], ...] = ()  # these events with the host's clock
    offset: float | None = None
    usable: bool = True  # whether most of the file's lines could be used

    def time(self, moment: float) -> datetime | None:
        """Return a moment of the host's clock as UTC."""
        try:
            return None if self.offset is None else datetime.fromtimestamp(moment + self.offset, UTC)
        except (ValueError, OverflowError, OSError):
            return None


class UnusableLines:
    """What could not be used of one file: the first of it is said, and how much there is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = ""
        self._version = ""
        self._unknown: Counter[str] = Counter()
        self.lines = self.bad = 0

    def parse(self, line: str) -> tuple[dict[str, Any], tuple[float, ev.Event] | None] | None:
        """Return a line's object and its event, None if its kind is not known; or None if it cannot be used."""
        self.lines += 1
        try:
            value, found = _parsed(line)
        except ValueError as error:
            self.bad += 1
            self._first = self._first or f"line {self.lines}: {error}"
            return None
        if isinstance(value.get("version"), str):
            self._version = value["version"]
        if found is None:
            self._unknown[value["event"]] += 1
        return value, found

    def text(self) -> str:
        """Return the complaint in one line; empty if there is none."""
        said = []
        if self.bad:
            said.append(f"{self.bad} of {self.lines} lines cannot be used, the first is {self._first}")
        if self._unknown:
            names, count = ev.listed([name[:40] for name in self._unknown], 3), self._unknown.total()
            are = "is" if count == 1 else "are"
            said.append(f"{count} of {self.lines} lines {are} of kinds unknown here ({names})")
        if said and self._version and self._version != __version__:
            said.append(f"the file is of version {self._version[:40]}, this is {__version__}")
        return f"{self._path}: {'; '.join(said)}" if said else ""


def node_of(path: Path) -> str:
    """Return the node whose event file this is."""
    return path.name.removeprefix("events-").removesuffix(".jsonl")


def event_files(directory: Path) -> list[Path]:
    """Return the event files of a run's directory, or of the only one in a log directory.

    Raises:
        UsageError: if there are none, or those of several runs.
    """
    hint = "Give the directory that elastic-launch names in its first line and in its last."
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory.", hint)
    found = sorted(directory.glob("events-*.jsonl"))
    if found:
        return found
    # The link to the newest run would make it appear twice.
    runs = sorted({path.parent for path in directory.glob("*/events-*.jsonl") if not path.parent.is_symlink()})
    if len(runs) > 1:
        names = ev.listed([path.name for path in runs])
        raise UsageError(f"{directory} has the events of {len(runs)} runs: {names}.", f"Give one of them: {runs[-1]}")
    if not runs:
        raise UsageError(f"{directory} has no events-*.jsonl.", hint)
    return sorted(runs[0].glob("events-*.jsonl"))


def read(path: Path) -> Host:
    """Read one file; unusable lines are left out, and counted in a complaint.

    A run id can be reused, and a host can be restarted: where the clock or the number of a formed round decreases, or
    a second first round is formed, another run begins. Everything before that is left out.
    """
    chronicle, further, refused = Chronicle(), [], UnusableLines(path)
    told: list[tuple[float, ev.Event]] = []
    offset: float | None = None
    try:
        with path.open(errors="replace", newline="\n") as file:
            for line in file:
                known = refused.parse(line)
                if known is None or known[1] is None:
                    continue
                value, (clock, event) = known[0], known[1]
                if begins_another(chronicle, clock, event):
                    further.append(f"{path}: a further run begins in line {refused.lines}; what is before is left out")
                    chronicle, told = Chronicle(), []
                chronicle.add(clock, event)
                told.append((clock, event))
                offset = _offset(value.get("time"), clock)
        if not refused.lines:
            further.append(f"{path} is empty")
    except OSError as error:
        further.append(f"{path} cannot be read: {error.strerror}")
    complaints = [text for text in (refused.text(), *further) if text]
    return Host(node_of(path), chronicle, tuple(complaints), tuple(told), offset, 2 * refused.bad <= refused.lines)


def of_last_run(hosts: Sequence[Host]) -> list[Host]:
    """Leave out hosts whose agents had ended before a later run of the same id began in their directory.

    Each run has one first round, which its leader and its members know. One that was formed before a member of another
    came is that of an earlier run, as after a start with the same ``--rdzv-id`` and ``--log-dir``; the node ids of the
    two usually differ. Hosts that a leader names are of its run, however much their clocks differ.
    """
    led = {host.node: rounds for host in hosts if (rounds := _led(host))}
    began = {node: rounds[0] for node, rounds in led.items() if _is_first_round(rounds[0])}
    named = {(node, first.round) for first in began.values() for node in first.nodes}
    firsts: list[tuple[datetime, datetime, str]] = []
    for host in hosts:
        told = next((x for x in host.told if _is_first_round(x[1])), None)
        if told is None:
            continue
        moment, event = told
        if host.node not in began and isinstance(event, ev.OrderReceived) and (host.node, event.round) in named:
            continue  # its leader has recorded the same round, and hosts' clocks may differ
        formed, begun = host.time(moment), host.time(host.told[0][0])
        if formed is None or begun is None:
            return list(hosts)
        firsts.append((formed, begun, host.node))
    if not firsts:
        return list(hosts)
    _, came, _ = max(firsts)
    if all(formed >= came for formed, _, _ in firsts):
        return list(hosts)
    of_last = [(begun, node) for formed, begun, node in firsts if formed >= came]
    last, _ = min(of_last)
    members = {node for _, leader in of_last for formed in led.get(leader, ()) for node in formed.nodes}
    ends = [(host, host.time(host.told[-1][0]) if host.told else None) for host in hosts]
    return [host for host, end in ends if end is None or end >= last or host.node in members]


def _led(host: Host) -> list[ev.RoundFormed]:
    return [event for _, event in host.told if isinstance(event, ev.RoundFormed)]


def _is_first_round(event: ev.Event) -> bool:
    match event:
        case ev.RoundFormed(cause=cause) | ev.OrderReceived(order="form", cause=cause):
            return cause == "first"  # not by its number: one that begins with reuse=true continues the last run's
    return False


def _offset(time: object, clock: float) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp() - clock if isinstance(time, str) else None
    except (ValueError, OverflowError):
        return None


def parse(line: str) -> tuple[float, ev.Event] | None:
    """Parse one line: the host's clock and the event; None for an event that this version does not know.

    Raises:
        ValueError: if it is not an event, or a field is missing or has the wrong type.
    """
    return _parsed(line)[1]


def _parsed(line: str) -> tuple[dict[str, Any], tuple[float, ev.Event] | None]:
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE} characters")
    try:
        value = json.loads(line, parse_float=_number, parse_constant=_number, parse_int=_whole)
    except OverflowError as error:
        raise ValueError(f"it has the number {error}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"no JSON: {line.strip()[:60]!r}") from None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        raise ValueError(f"no event: {line.strip()[:60]!r}")
    try:
        head = codec.decode(EventLine, value)
        kind = ev.KINDS.get(head.event)
        return value, None if kind is None else (head.clock, codec.decode(kind, value))
    except ProtocolError as error:
        raise ValueError(error.message.rstrip(".")) from None


def _number(text: str) -> float:
    """Refuse infinity and NaN, and what becomes one of them in calculations."""
    if not -1e300 < (found := float(text)) < 1e300:
        raise OverflowError(text[:40])
    return found


def _whole(text: str) -> int:
    """Refuse integers that :func:`_number` would refuse as numbers with a point."""
    if len(text) > 300:
        raise OverflowError(text[:40])
    return int(text)


def begins_another(chronicle: Chronicle, clock: float, event: ev.Event) -> bool:
    """Whether an event is of a later run than those before it in its file, which are in the chronicle."""
    if chronicle.since is None:
        return False
    match event:
        case ev.RoundFormed(round=number):
            known = [x.number for x in chronicle.rounds.values() if x.led]
        case ev.OrderReceived(order="form", round=number):
            known = [x.number for x in chronicle.rounds.values() if x.mine]
        case _:
            number, known = 0, []
    again = bool(known) and (_is_first_round(event) or number <= max(known))
    return again or clock < chronicle.until - CLOCK_SLACK
