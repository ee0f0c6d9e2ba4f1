"""Versionable JSON for frozen dataclasses: strict on types, bounded in size, never a pickle.

Messages between nodes and between agent and worker, records and copy jobs are encoded here. Unknown fields are ignored
and missing ones take their defaults, so the output of a newer version can be read. The bounds of a field are part of
its type: ``Annotated[int, rule]``, where the rule returns the value to use, or raises ValueError with the values
it allows.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Annotated, Any, Generic, TypeVar

from elastic_launch.errors import ProtocolError

MAX_BYTES = 4 * 1024 * 1024
"""Size limit of a value or line when reading, in bytes; about 16,000 members of 250 bytes."""

T = TypeVar("T")


def dumps(value: Any, **extra: str) -> bytes:
    """Encode a dataclass as one line of JSON without the line end; ``extra`` keys come first."""
    return _ENCODER.encode({**extra, **_shallow(value)}).encode()


def loads(data: bytes, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Parse one JSON object of at most ``limit`` bytes.

    Raises:
        ProtocolError: if data is too large, not JSON, or not an object.
    """
    if len(data) > limit:
        raise ProtocolError(f"A value of {len(data)} bytes exceeds the limit of {limit}.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A value is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"A JSON object was expected, found {type(value).__name__}.")
    return value


def decode(kind: type[T], value: Any) -> T:
    """Build a dataclass of type ``kind`` from parsed JSON, checking every field's type.

    Raises:
        ProtocolError: if a field is missing or has the wrong type; it names the field.
    """
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind.__name__}: an object was expected, found {type(value).__name__}.")
    arguments: dict[str, Any] = {}
    for name, hint, required in _fields(kind):  # type: ignore[arg-type]
        if name in value:
            item = value[name]
            # This check alone is enough for nearly all of a long list of members.
            plain = type(item) is hint
            arguments[name] = item if plain else _convert(hint, item, f"{kind.__name__}.{name}")
        elif required:
            raise ProtocolError(f"{kind.__name__}.{name} is missing.")
    return kind(**arguments)


def _shallow(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; nested dataclasses are left to the encoder's next call."""
    return {name: getattr(value, name) for name, _, _ in _fields(type(value))}  # type: ignore[arg-type]


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_shallow)  # json.dumps would make one for each message


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return tuple(
        (item.name, hints[item.name], item.default is missing and item.default_factory is missing)
        for item in dataclasses.fields(kind)
    )


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        inner, rule = typing.get_args(hint)
        value = _convert(inner, value, where)
        try:
            return rule(value)
        except ValueError as error:
            raise ProtocolError(f"{where} is {str(value)[:100]!r}, not {error}.") from None
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        return _convert(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where}: a list was expected, found {type(value).__name__}.")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, where) for item in value)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return decode(hint, value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ProtocolError(f"{where}: the number is too large.") from error
    if type(value) is not hint:
        raise ProtocolError(f"{where}: {hint.__name__} was expected, found {type(value).__name__}.")
    return value


def between(low: int, end: int, allowed: str) -> Callable[[float], float]:
    """Return a rule: a number from ``low`` on and below ``end``, which are ``allowed``."""

    def rule(value: float) -> float:
        if not low <= value < end:
            raise ValueError(allowed)
        return value

    return rule


class Messages(Generic[T]):
    """Messages of several classes, one per line; each begins with a ``type``, the name of its class in lower case.

    Args:
        limit: longest line in bytes.
    """

    def __init__(self, kinds: Iterable[type[T]], limit: int = MAX_BYTES) -> None:
        self._kinds = {kind.__name__.lower(): kind for kind in kinds}
        self._limit = limit

    def pack(self, message: T) -> bytes:
        """Encode a message as one line."""
        return dumps(message, type=type(message).__name__.lower()) + b"\n"

    def unpack(self, line: bytes, kinds: Collection[type[T]] = ()) -> T:
        """Read one untrusted line.

        Args:
            kinds: the classes that are expected; all if empty.

        Raises:
            ProtocolError: if it is not a message of these classes; it names the field that is wrong.
        """
        value = loads(line, self._limit)
        name = value.get("type")
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None or (kinds and kind not in kinds):
            raise ProtocolError(f"A message of the unexpected type {str(name)[:50]!r} arrived.")
        return decode(kind, value)


class LineReader:
    """Splits a byte stream into lines, buffering at most ``limit`` bytes of an unfinished one."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received data and return the lines that it completes.

        Raises:
            ProtocolError: if a line exceeds the limit.
        """
        self._pending += data
        lines: list[bytes] = []
        # Only new data can end a line: searching the whole buffer would make each single byte cost a whole line.
        if b"\n" in data:
            *whole, self._pending = self._pending.split(b"\n")
            lines = [bytes(line) for line in whole if line]
        if len(self._pending) > self.limit:
            raise ProtocolError(f"A line of more than {self.limit} bytes came over a link.")
        return lines
