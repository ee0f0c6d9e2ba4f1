"""Reads the event files of a run's directory."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from elastic_launch.errors import UsageError
from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle

__all__ = ["Host", "event_files", "parse", "read"]

LONGEST_LINE = 4 * 1024 * 1024
"""Longest line that is read, in characters; a round of 16,000 nodes has fewer."""

CLOCK_SLACK = 1.0
"""Seconds by which the clock may fall: threads may write in a different order than they read it."""

KINDS = {
    ev.event_name(kind): kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event)
}

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "bool": (bool,),
    "tuple[str, ...]": (list,),
}


@dataclass(frozen=True, slots=True)
class Host:
    """One host's event file.

    Attributes:
        node: the node id.
        chronicle: the events of the last run in the file, if there are several.
        told: these events with the host's clock.
        complaints: what could not be used, and where.
    """

    node: str
    chronicle: Chronicle
    complaints: tuple[str, ...]
    told: tuple[tuple[float, ev.Event], ...] = ()


def event_files(directory: Path) -> list[Path]:
    """Return the event files of a run's directory, or of the only one in a log directory.

    Raises:
        UsageError: if there are none, or those of several runs.
    """
    asked = f"{directory}"
    hint = "Give the directory that elastic-launch names in its first line and in its last."
    if not directory.is_dir():
        raise UsageError(f"{asked} is no directory.", hint)
    found = sorted(directory.glob("events-*.jsonl"))
    if found:
        return found
    # The link to the newest run would make it appear twice.
    runs = sorted({path.parent for path in directory.glob("*/events-*.jsonl") if not path.parent.is_symlink()})
    if len(runs) > 1:
        names = ", ".join(path.name for path in runs[:8]) + (", ..." if len(runs) > 8 else "")
        raise UsageError(f"{asked} has the events of {len(runs)} runs: {names}.", f"Give one of them: {runs[-1]}")
    if not runs:
        raise UsageError(f"{asked} has no events-*.jsonl.", hint)
    return sorted(runs[0].glob("events-*.jsonl"))


def read(path: Path) -> Host:
    """Read one file; unusable lines are left out and listed as complaints.

    A run id can be reused, and a host can be restarted: where the clock or the number of a formed round decreases,
    another run begins. Everything before that is left out.
    """
    node = path.name.removeprefix("events-").removesuffix(".jsonl")
    chronicle, complaints = Chronicle(), []
    told: list[tuple[float, ev.Event]] = []
    try:
        with path.open(errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = parse(line)
                except ValueError as error:
                    complaints.append(f"{path}, line {number}: {error}")
                    continue
                if found is None:
                    continue
                clock, event = found
                if _begins_another(chronicle, clock, event):
                    complaints.append(f"{path}: a further run begins in line {number}; what is before is left out")
                    chronicle, told = Chronicle(), []
                chronicle.add(clock, event)
                told.append(found)
    except OSError as error:
        complaints.append(f"{path} cannot be read: {error.strerror}")
    return Host(node, chronicle, tuple(complaints), tuple(told))


def parse(line: str) -> tuple[float, ev.Event] | None:
    """Parse one line: the host's clock and the event; None for an event that this version does not know.

    Raises:
        ValueError: if it is not an event, or a field is missing or has the wrong type.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE} characters")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"no JSON: {line.strip()[:60]!r}") from None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        raise ValueError(f"no event: {line.strip()[:60]!r}")
    clock = _checked("clock", "float", value.get("clock"))
    kind = KINDS.get(value["event"])
    if kind is None:
        return None
    found: dict[str, Any] = {}
    for item in fields(kind):
        if item.name in value:
            found[item.name] = _checked(f"{value['event']}.{item.name}", str(item.type), value[item.name])
        elif item.default is MISSING:
            raise ValueError(f"{value['event']} has no {item.name}")
    return clock, kind(**found)


def _checked(name: str, hint: str, found: Any) -> Any:
    fits = isinstance(found, _TYPES[hint]) and (hint == "bool" or not isinstance(found, bool))
    if isinstance(found, float):
        fits = fits and -1e300 < found < 1e300  # excludes infinity and NaN
    if not fits:
        raise ValueError(f"{name} is {str(found)[:60]!r}, not of type {hint}")
    return tuple(map(str, found)) if isinstance(found, list) else found


def _begins_another(chronicle: Chronicle, clock: float, event: ev.Event) -> bool:
    if chronicle.since is None:
        return False
    again = False
    match event:
        case ev.RoundFormed(round=number):
            again = number <= max((x.number for x in chronicle.rounds.values() if x.led), default=0)
        case ev.OrderReceived(order="form", round=number):
            again = number <= max((x.number for x in chronicle.rounds.values() if x.mine), default=0)
    return again or clock < chronicle.until - CLOCK_SLACK
