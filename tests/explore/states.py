"""Copies of object graphs, which share what cannot change, and what identifies a graph apart from names and times."""

from __future__ import annotations

import dataclasses
import math
import types
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

__all__ = ["EPOCH", "Identity", "drop", "fork"]

EPOCH = 1_000_000.0
"""When the clocks of worlds begin. A float of more than a tenth of this is a time, any other one a duration."""

OLD = 60.0
"""Ages above this many seconds are not told apart."""

TEXTS = frozenset({"nonce", "cause", "reason", "detail", "outlook", "text", "error", "log", "ends", "why"})
"""Fields that no decision reads other than whether they are empty, and what is random."""

_ATOMS = (str, int, float, bool, type(None), bytes, Enum, type, types.FunctionType, types.BuiltinFunctionType)


def _is_frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _attributes(kind: type) -> tuple[str, ...] | None:
    """The slots of a class, or None if its objects have a dictionary."""
    names: list[str] = []
    for base in kind.__mro__[:-1]:
        if "__slots__" not in vars(base):
            return None
        names += [name for name in vars(base)["__slots__"] if name != "__weakref__"]
    return tuple(names)


# Copying.

_SHARED: set[type] = {str, int, float, bool, type(None), bytes, frozenset}
_COPIED: set[type] = {dict, list, deque, set, tuple, types.MethodType}
_SLOTS: dict[type, tuple[str, ...] | None] = {}


def fork(root: Any) -> tuple[Any, list[Any]]:
    """Return a copy of all that can change, and all objects made for it, for :func:`drop`.

    Objects that are one in the original are one in the copy.
    """
    made: dict[int, Any] = {}
    return _fork(root, made), list(made.values())


def drop(made: list[Any]) -> None:
    """Free a copy: its objects refer to each other, and to look for such circles takes longer than to make them."""
    for thing in made:
        if type(thing) in (dict, list, deque, set):
            thing.clear()
        elif hasattr(thing, "__dict__"):
            vars(thing).clear()


def _is_shared(kind: type) -> bool:
    if kind in _COPIED:
        return False
    if issubclass(kind, (*_ATOMS, frozenset)) or _is_frozen(kind):
        _SHARED.add(kind)
        return True
    _COPIED.add(kind)
    _SLOTS[kind] = _attributes(kind)
    return False


def _fork(value: Any, made: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _SHARED or _is_shared(kind):
        return value
    if kind is tuple:
        parts = [part if type(part) in _SHARED else _fork(part, made) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else tuple(parts)
    known = made.get(id(value))
    if known is not None:
        return known
    copy: Any
    if kind is dict:
        copy = made[id(value)] = {}
        for key, part in value.items():
            copy[key if type(key) in _SHARED else _fork(key, made)] = (
                part if type(part) in _SHARED else _fork(part, made)
            )
        return copy
    if kind is list:
        copy = made[id(value)] = []
        copy += [part if type(part) in _SHARED else _fork(part, made) for part in value]
        return copy
    if kind is deque:
        copy = made[id(value)] = deque()
        copy.extend([part if type(part) in _SHARED else _fork(part, made) for part in value])
        return copy
    if kind is set:
        copy = made[id(value)] = set()
        copy.update([part if type(part) in _SHARED else _fork(part, made) for part in value])
        return copy
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _fork(value.__self__, made))
    copy = made[id(value)] = object.__new__(kind)
    names = _SLOTS[kind]
    if names is None:
        held = vars(copy)
        for name, part in vars(value).items():
            held[name] = part if type(part) in _SHARED else _fork(part, made)
    else:
        for name in names:
            part = getattr(value, name)
            setattr(copy, name, part if type(part) in _SHARED else _fork(part, made))
    return copy


# Identity.

_FIELDS: dict[type, tuple[tuple[str, bool], ...]] = {}


_PLAIN = frozenset({bool, type(None)})


class Identity:
    """Reduces object graphs to values that are equal if the graphs behave alike.

    Args:
        special: by class, what to use instead of an object.
        ignored: attributes that are left out wherever they are.
    """

    def __init__(
        self, special: Mapping[type, Callable[[Any], Any]] | None = None, ignored: frozenset[str] = frozenset()
    ) -> None:
        self._special = dict(special or {})
        self._ignored = ignored
        self._known: dict[tuple[int, tuple[str, ...]], tuple[Any, Any]] = {}  # of objects that cannot change
        self._kinds: dict[type, Callable[[Any], Any]] = {
            str: self._name,
            bool: _itself,
            type(None): _itself,
            bytes: _itself,
            int: _whole,
            float: self._moment,
            tuple: self._row,
            frozenset: self._group,
        }

    def of(self, root: Any, now: float, names: Mapping[str, str]) -> int:
        """Return the identity of a graph at a time, with its names replaced."""
        self._now, self._names, self._timed = now, names, False
        self._key = tuple(names.values())
        self._seen: dict[int, int] = {}
        return hash(self._reduce(root))

    def _reduce(self, value: Any) -> Any:
        kind = type(value)
        reduce = self._kinds.get(kind)
        if reduce is None:
            reduce = self._kinds[kind] = self._reducer(kind)
        return reduce(value)

    def _reducer(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, (Enum, type)):
            return _itself
        if _is_frozen(kind):
            return lambda value: self._fixed(value, kind)
        if kind is types.MethodType:
            return lambda value: value.__func__.__name__
        if issubclass(kind, _ATOMS):
            return lambda value: value.__qualname__
        if kind in self._special:
            chosen = self._special[kind]
            return lambda value: self._once(value, lambda each: self._reduce(chosen(each)))
        if kind is dict:
            return lambda value: self._once(value, self._mapping)
        if kind is list or kind is deque:
            return lambda value: self._once(value, self._row)
        if kind is set:
            return lambda value: self._once(value, self._group)
        names = self._names_of(kind)
        if names is None:
            return lambda value: self._once(value, self._loose)
        return lambda value: self._once(value, lambda each: self._object(each, names))

    def _once(self, value: Any, reduce: Callable[[Any], Any]) -> Any:
        seen = self._seen.get(id(value))
        if seen is not None:
            return "seen", seen
        self._seen[id(value)] = len(self._seen)
        return reduce(value)

    def _name(self, value: str) -> str:
        return self._names.get(value, value)

    def _moment(self, value: float) -> Any:
        if math.isinf(value):
            return value
        if value < EPOCH / 10:
            return ("f", round(value * 1000)) if value >= 0 else ("-f", round(-value * 1000))
        self._timed = True
        return "t", round(max(value - self._now, -OLD) * 1000) + 10**9

    def _row(self, value: Any) -> Any:
        return tuple([part if type(part) in _PLAIN else self._reduce(part) for part in value])

    def _group(self, value: Any) -> Any:
        return frozenset([part if type(part) in _PLAIN else self._reduce(part) for part in value])

    def _mapping(self, value: Any) -> Any:
        return frozenset(
            [(self._reduce(key), part if type(part) in _PLAIN else self._reduce(part)) for key, part in value.items()]
        )

    def _loose(self, value: Any) -> Any:
        held = vars(value)
        return tuple(
            [
                part if type(part) in _PLAIN else bool(part) if name in TEXTS else self._reduce(part)
                for name, part in held.items()
                if name not in self._ignored
            ]
        )

    def _object(self, value: Any, names: tuple[tuple[str, bool], ...]) -> Any:
        parts: list[Any] = [type(value).__name__]
        for name, text in names:
            part = getattr(value, name)
            parts.append(part if type(part) in _PLAIN else bool(part) if text else self._reduce(part))
        return tuple(parts)

    def _names_of(self, kind: type) -> tuple[tuple[str, bool], ...] | None:
        if dataclasses.is_dataclass(kind):
            names: tuple[str, ...] | None = tuple(item.name for item in dataclasses.fields(kind))
        else:
            names = _attributes(kind)
        if names is None:
            return None
        return tuple((name, name in TEXTS) for name in names if name not in self._ignored)

    def _fixed(self, value: Any, kind: type) -> Any:
        key = id(value), self._key
        known = self._known.get(key)
        if known is not None:
            return known[1]
        timed, self._timed = self._timed, False
        names = self._names_of(kind)
        assert names is not None
        reduced = self._object(value, names)
        if not self._timed:
            reduced = ("fixed", hash(reduced))
            self._known[key] = value, reduced
        self._timed = timed or self._timed
        return reduced


def _itself(value: Any) -> Any:
    return value


def _whole(value: int) -> Any:
    return value if value >= 0 else ("-", -value)  # -1 and -2 have the same hash
