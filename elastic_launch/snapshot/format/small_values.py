"""Converts small values of the standard library to JSON and back: paths, times, exact numbers, ranges, enum members.

==========================================================  ========================================================
``{"$path": "runs/a"}``                                      a ``pathlib.Path``
``{"$datetime": "2026-01-02T03:04:05"}``, ``$date``, ``$time``  of ``datetime``; a time zone is a fixed offset
``{"$timedelta": [days, seconds, microseconds]}``            a timedelta
``{"$decimal": "0.10"}``, ``{"$fraction": [1, 3]}``          a Decimal, a Fraction
``{"$range": [0, 9, 2]}``, ``{"$slice": [null, 9, null]}``   a range, a slice of integers and None
``{"$enum": 1, "name": "WARM", "type": "__main__:Phase"}``   a member of an enum, by its value
==========================================================  ========================================================

An enum member is restored if its class is loaded and has a member of that name and value; otherwise it becomes an
:class:`UnknownMember`, and a training refuses to resume from such a state. No class is imported.
"""

from __future__ import annotations

import datetime
import enum
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

MEMBER = "$enum"
"""The tag of an enum member; the encoder and the decoder handle its value."""

_MOST_DIGITS = 4000
"""Maximum number of digits of a Decimal, as many as Python parses of an integer."""


@dataclass(frozen=True, slots=True)
class UnknownMember:
    """Stands for an enum member that this process does not know."""

    type: str  # module and qualified name of the enum
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.type.replace(':', '.')}.{self.name} with the value {self.value!r}"


def _iso(kind: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return lambda value: value.isoformat(), lambda text: kind.fromisoformat(_text(text))


def _parts(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_DIGITS:
        raise ValueError("no text")
    return value


def _integers(value: Any, count: int, *, none: bool = False) -> list[Any]:
    kinds = (int, type(None)) if none else (int,)
    if not isinstance(value, list) or len(value) != count or any(type(x) not in kinds for x in value):
        raise ValueError(f"not {count} integers")
    return value


_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    type(Path()): ("$path", str, lambda value: Path(_text(value))),
    datetime.datetime: ("$datetime", *_iso(datetime.datetime)),
    datetime.date: ("$date", *_iso(datetime.date)),
    datetime.time: ("$time", *_iso(datetime.time)),
    datetime.timedelta: (
        "$timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda value: datetime.timedelta(*_integers(value, 3)),
    ),
    Decimal: ("$decimal", str, lambda value: Decimal(_text(value))),
    Fraction: ("$fraction", lambda x: [x.numerator, x.denominator], lambda value: Fraction(*_integers(value, 2))),
    range: ("$range", _parts, lambda value: range(*_integers(value, 3))),
    slice: ("$slice", _parts, lambda value: slice(*_integers(value, 3, none=True))),
}
"""The tag of each type, and what makes its JSON of a value, and a value of its JSON."""

READERS = {tag: read for tag, _, read in _KINDS.values()}

ERRORS = (ValueError, OverflowError, ZeroDivisionError, InvalidOperation)
"""Errors that these functions raise for JSON that this package has not written."""


def written(value: Any) -> tuple[str, Any] | None:
    """Return a value's tag and its JSON; None if it would not be restored exactly."""
    if type(value) not in _KINDS:
        return None
    tag, write, read = _KINDS[type(value)]
    try:
        text = write(value)
        same = repr(read(text)) == repr(value)
    except ERRORS:
        return None
    return (tag, text) if same else None


def find_class(name: str) -> Any:
    """Return the object of a loaded module with a name such as ``module:Class.Inner``; None if there is none."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    return found


def member(kind: str, name: str, value: Any) -> enum.Enum | UnknownMember:
    """Return the member of a loaded enum, or an ``UnknownMember`` if there is none of that name and value.

    For a Flag, any combination of members counts as a member, by its value.
    """
    known = find_class(kind)
    if not isinstance(known, enum.EnumType):
        return UnknownMember(kind, name, value)
    found: Any = None
    if issubclass(known, enum.Flag):
        with suppress(ValueError, TypeError, KeyError):
            found = known(value)
    else:
        found = vars(known)["_member_map_"].get(name)
    same = type(found) is known and found.name == (name or None) and type(found.value) is type(value)
    return found if same and repr(found.value) == repr(value) else UnknownMember(kind, name, value)
