"""Converts plain nested values to JSON and back; needs no torch.

Dicts with string keys, lists, strings, integers, finite floats, booleans and None are written as they are. Every other
value is an object whose keys start with ``$`` (and so is a dict that has such a key):

==============================================  =====================================================
``{"$tensor": name, "dtype": .., "shape": ..}``  a tensor; only in ``tree``, which stores it separately by name
``{"$tuple": [..]}``                             a tuple
``{"$dict": [[key, value], ..]}``                a dict with string and integer keys, in order
``{"$ordered": [[key, value], ..]}``             an OrderedDict; a further ``$metadata`` is a state_dict's ``_metadata``
``{"$counter": [[key, value], ..]}``             a collections.Counter, as used by MultiStepLR
``{"$defaultdict": [..], "factory": "list"}``    a defaultdict; the factory is None or one of a few types
``{"$named": [..], "fields": .., "type": ..}``   a named tuple; its class if that is loaded, else a similar class
``{"$set": [..]}``, ``{"$frozenset": [..]}``     a set
``{"$deque": [..], "maxlen": 3}``                a deque
``{"$complex": [1.0, "nan"]}``                   a complex number
``{"$float": "nan"}``                            nan, inf or -inf
``{"$bytes": "aGk="}``                           bytes, in base64
``{"$text": "7aC97biA"}``                        a string with a pair of surrogates, as UTF-8 in base64
==============================================  =====================================================

``small`` has paths, times, exact numbers, ranges and enums; ``tree`` adds what torch and NumPy have. Nothing is
imported, and nothing called, by a name that a file holds, but for the class of a named tuple or an enum that is
loaded.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from contextlib import suppress
from inspect import getattr_static
from typing import Any, NoReturn

from elastic_launch.snapshot.errors import MalformedError, UnsupportedStateError
from elastic_launch.snapshot.format import small_values as small

MAX_DEPTH = 64
"""Maximum nesting depth, well below the depth at which Python's JSON parser would exhaust the stack."""

_MAX_INT_BITS = 8192
"""Maximum size of an integer. Python itself refuses to parse integers of more than 4300 digits."""

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""What JSON does not distinguish from one character."""

_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}

_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple, Counter, OrderedDict)
}
_MAX_FIELDS = 1000
_BESIDE = {
    "$tensor": ("dtype", "shape"),
    "$array": ("dtype", "shape"),
    "$scalar": ("dtype",),
    "$ordered": ("$metadata",),
    "$defaultdict": ("factory",),
    "$named": ("fields", "type"),
    "$deque": ("maxlen",),
    small.MEMBER: ("name", "type"),
}
"""Keys that an object may have besides the one that gives its kind."""

Path = tuple[str | int, ...]


def show(path: Path) -> str:
    """Describe a place in the state."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class Encoder:
    """Turns values into JSON; subclasses may support more kinds of values."""

    def encode(self, value: Any, path: Path = ()) -> Any:
        """Turn a value into JSON."""
        if len(path) > MAX_DEPTH:
            self.refuse(f"nesting deeper than {MAX_DEPTH}", path, "Does the state contain itself?")
        if type(value) is str and not value.isascii() and _PAIR.search(value):
            return {"$text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii")}
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int and value.bit_length() <= _MAX_INT_BITS:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if type(value) in (list, tuple):
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if type(value) in _DICTS:
            return self._mapping(value, path)
        return self._rare(value, path)

    def _rare(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return self._member(value, path)
        if kind is small.UnknownMember:  # it was read, and is now sent to another process
            return {small.MEMBER: self.encode(value.value, (*path, "value")), "name": value.name, "type": value.type}
        if kind is complex:
            return {"$complex": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if kind in (set, frozenset):
            # Sorted, so that all processes write the same bytes.
            items = [self.encode(item, (*path, "{...}")) for item in value]
            return {f"${kind.__name__}": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
        if kind is deque:
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return {"$deque": items, "maxlen": value.maxlen}
        if kind is defaultdict:
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                what = f"a defaultdict with the default_factory {getattr(factory, '__qualname__', factory)!s}"
                self.refuse(what, path, f"It holds those of None, {', '.join(_FACTORIES)}. Or save a dict.")
            name = None if factory is None else factory.__name__
            return {"$defaultdict": self._pairs(value, path), "factory": name}
        if isinstance(value, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return {"$named": items, "fields": list(kind._fields), "type": f"{kind.__module__}:{kind.__qualname__}"}
        if (coded := small.written(value)) is not None:
            return {coded[0]: coded[1]}
        return self.other(value, path)

    def _member(self, value: enum.Enum, path: Path) -> dict[str, Any]:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        coded = {small.MEMBER: self.encode(value.value, (*path, "value")), "name": value.name or "", "type": name}
        if small.member(name, value.name or "", value.value) is not value:
            what = f"{type(value).__qualname__}.{value.name}, a member of an enum that is not found by its name"
            self.refuse(what, path, "Define the enum at the top level of a module, or save the member's value.")
        return coded

    def other(self, value: Any, path: Path) -> Any:
        """Turn a value of another kind into JSON, or refuse it."""
        self.refuse(type_name(value), path)

    def _pairs(self, value: dict[Any, Any], path: Path) -> list[list[Any]]:
        for key in value:
            if type(key) not in (str, int) or (type(key) is int and key.bit_length() > _MAX_INT_BITS):
                self.refuse(f"a dict key of type {type_name(key)}", path, "Keys are strings or integers.")
        return [[key, self.encode(item, (*path, key))] for key, item in value.items()]

    def _mapping(self, value: dict[Any, Any], path: Path) -> dict[str, Any]:
        pairs = self._pairs(value, path)
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        coded: dict[str, Any] = {_DICTS[type(value)]: pairs}
        # Modules use these versions to decide how to load states of older versions.
        metadata = getattr(value, "_metadata", None)
        if type(value) is OrderedDict and metadata is not None:
            coded["$metadata"] = self.encode(metadata, (*path, "_metadata"))
        return coded

    def refuse(self, what: str, path: Path, hint: str = "") -> NoReturn:
        """Raise an UnsupportedStateError for a value."""
        raise UnsupportedStateError(
            f"A checkpoint cannot hold {what}, found at {show(path)}.",
            hint
            or "It holds tensors, NumPy arrays and scalars, dicts, lists, tuples, sets, deques, strings, bytes, "
            "numbers, None, enums, paths and times: convert it in state_dict() and load_state_dict().",
        )


class Decoder:
    """Turns JSON back into values."""

    def decode(self, tree: Any, path: Path = ()) -> Any:
        """Turn JSON into a value."""
        if len(path) > MAX_DEPTH:
            raise MalformedError(f"nesting deeper than {MAX_DEPTH} at {show(path)}")
        if isinstance(tree, list):
            return [self.decode(item, (*path, index)) for index, item in enumerate(tree)]
        if isinstance(tree, dict):
            tags = tuple(key for key in tree if key.startswith("$"))
            if not tags:
                return {key: self.decode(item, (*path, key)) for key, item in tree.items()}
            return self._tagged(tags[0], tree, path)
        if isinstance(tree, float) and not math.isfinite(tree):
            raise MalformedError(f"a float out of range at {show(path)}")
        return tree

    def _tagged(self, tag: str, tree: dict[str, Any], path: Path) -> Any:
        readers = self.readers()
        if tag not in readers or not tree.keys() <= {tag, *_BESIDE.get(tag, ())}:
            raise MalformedError(f"unknown keys {sorted(tree)[:4]} at {show(path)}")
        return readers[tag](tree, path)

    def readers(self) -> dict[str, Callable[[dict[str, Any], Path], Any]]:
        """Return the function that reads each kind of tagged object, by tag."""
        return {
            "$ordered": self._ordered,
            "$tuple": lambda tree, path: tuple(self._items(tree["$tuple"], path)),
            "$dict": lambda tree, path: dict(self._pairs(tree["$dict"], path)),
            "$counter": lambda tree, path: Counter(dict(self._pairs(tree["$counter"], path))),
            "$defaultdict": self._defaultdict,
            "$named": self._named,
            "$set": lambda tree, path: set(self._members(tree["$set"], path)),
            "$frozenset": lambda tree, path: frozenset(self._members(tree["$frozenset"], path)),
            "$deque": self._deque,
            "$complex": self._complex,
            "$float": lambda tree, path: _float(tree["$float"], path),
            "$bytes": lambda tree, path: base64_bytes(tree["$bytes"], path),
            "$text": lambda tree, path: _text(tree["$text"], path),
            small.MEMBER: self._member,
            **dict.fromkeys(small.READERS, self._small),
        }

    def _small(self, tree: dict[str, Any], path: Path) -> Any:
        ((tag, value),) = tree.items()
        try:
            return small.READERS[tag](value)
        except small.ERRORS as error:
            raise MalformedError(f"no {tag[1:]} at {show(path)}") from error

    def _member(self, tree: dict[str, Any], path: Path) -> Any:
        name, kind = tree.get("name"), tree.get("type")
        if not isinstance(name, str) or not isinstance(kind, str):
            raise MalformedError(f"no member of an enum at {show(path)}")
        return small.member(kind, name, self.decode(tree[small.MEMBER], (*path, "value")))

    def _items(self, items: Any, path: Path) -> list[Any]:
        decoded: list[Any] = self.decode(_list(items, path), path)
        return decoded

    def _pairs(self, items: Any, path: Path) -> Iterable[tuple[str | int, Any]]:
        seen = set()
        for pair in _list(items, path):
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
                raise MalformedError(f"no pair of key and value at {show(path)}")
            key = pair[0]
            if key in seen:
                raise MalformedError(f"the key {key!r} twice at {show(path)}")
            seen.add(key)
            yield key, self.decode(pair[1], (*path, key))

    def _ordered(self, tree: dict[str, Any], path: Path) -> OrderedDict[str | int, Any]:
        value = OrderedDict(self._pairs(tree.get("$ordered"), path))
        if "$metadata" in tree:
            value._metadata = self.decode(tree["$metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
        return value

    def _members(self, items: Any, path: Path) -> list[Any]:
        members = self._items(items, path)
        try:
            unique = len(set(members)) == len(members)
        except TypeError:
            unique = False
        if not unique:
            raise MalformedError(f"no members of a set at {show(path)}")
        return members

    def _defaultdict(self, tree: dict[str, Any], path: Path) -> defaultdict[Any, Any]:
        name = tree.get("factory")
        if name is not None and (not isinstance(name, str) or name not in _FACTORIES):
            raise MalformedError(f"an unknown default_factory at {show(path)}")
        return defaultdict(None if name is None else _FACTORIES[name], self._pairs(tree["$defaultdict"], path))

    def _deque(self, tree: dict[str, Any], path: Path) -> deque[Any]:
        items, longest = self._items(tree["$deque"], path), tree.get("maxlen")
        if longest is not None and (type(longest) is not int or not len(items) <= longest <= sys.maxsize):
            raise MalformedError(f"no deque at {show(path)}")
        return deque(items, longest)

    def _complex(self, tree: dict[str, Any], path: Path) -> complex:
        parts = self._items(tree["$complex"], path)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            raise MalformedError(f"no complex number at {show(path)}")
        return complex(*parts)

    def _named(self, tree: dict[str, Any], path: Path) -> Any:
        items, fields, name = self._items(tree["$named"], path), tree.get("fields"), tree.get("type")
        if (
            not isinstance(name, str)
            or not isinstance(fields, list)
            or not all(type(field) is str for field in fields)
            or not len(fields) == len(items) <= _MAX_FIELDS
        ):
            raise MalformedError(f"no named tuple at {show(path)}")
        kind: Any = _loaded_class(name, tuple(fields))
        try:
            return (kind or _like(name, fields))._make(items)
        except ValueError as error:
            raise MalformedError(f"no named tuple at {show(path)}: {error}") from error


def type_name(value: Any) -> str:
    """Return the full name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _loaded_class(name: str, fields: tuple[str, ...]) -> Any:
    """Return a loaded class of named tuples with this name and these fields; None if there is none."""
    found = small.find_class(name)
    made_by = getattr_static(found, "_make", None) if isinstance(found, type) and issubclass(found, tuple) else None
    return found if isinstance(made_by, classmethod) and getattr(found, "_fields", None) == fields else None


def _like(name: str, fields: list[str]) -> Any:
    """Return a new class of named tuples; raise a ValueError if a name is invalid."""
    module, _, qualified = name.partition(":")
    kind = namedtuple(qualified.rpartition(".")[2], fields, module=module)  # type: ignore[misc]
    kind.__qualname__ = qualified
    return kind


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedError(f"a list was expected at {show(path)}")
    return value


def _float(value: Any, path: Path) -> float:
    if not isinstance(value, str) or value not in _SPECIAL_FLOATS:
        raise MalformedError(f"no special float at {show(path)}")
    return _SPECIAL_FLOATS[value]


def _text(value: Any, path: Path) -> str:
    try:
        return base64_bytes(value, path).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise MalformedError(f"no text at {show(path)}") from error


def base64_bytes(value: Any, path: Path) -> bytes:
    """Decode a text in base64; raise a MalformedError for anything else."""
    if isinstance(value, str) and value.isascii():
        with suppress(binascii.Error):
            return base64.b64decode(value, validate=True)
    raise MalformedError(f"no base64 at {show(path)}")
