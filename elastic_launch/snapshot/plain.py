"""Plain nested values as JSON, and back; needs no torch.

Dicts with string keys, lists, strings, integers, finite floats, booleans and None are themselves in JSON. All else is
an object whose keys start with ``$`` (and so is a dict that has such a key):

==============================================  =====================================================
``{"$tensor": name, "dtype": .., "shape": ..}``  a tensor; only in ``tree``, which keeps it apart under that name
``{"$tuple": [..]}``                             a tuple
``{"$dict": [[key, value], ..]}``                a dict with string and integer keys, in order
``{"$ordered": [[key, value], ..]}``             an OrderedDict; ``$metadata`` beside it is a state_dict's ``_metadata``
``{"$counter": [[key, value], ..]}``             a collections.Counter, which MultiStepLR has
``{"$float": "nan"}``                            nan, inf or -inf
``{"$bytes": "aGk="}``                           bytes, in base64
==============================================  =====================================================
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn

from elastic_launch.snapshot.errors import MalformedError, UnsupportedStateError

__all__ = ["MAX_DEPTH", "Decoder", "Encoder", "Path", "show", "type_name"]

MAX_DEPTH = 64
"""Deepest nesting that is written or read, well below where Python's JSON parser would exhaust the stack."""

_MAX_INT_BITS = 8192  # Python itself refuses to parse integers of more than 4300 digits.
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}

Path = tuple[str | int, ...]


def show(path: Path) -> str:
    """Return a place in words."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class Encoder:
    """Turns values into JSON; a subclass may know more kinds of them."""

    def encode(self, value: Any, path: Path = ()) -> Any:
        """Turn a value into JSON."""
        if len(path) > MAX_DEPTH:
            self.refuse(f"nesting deeper than {MAX_DEPTH}", path, "Does the state contain itself?")
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
        return self.other(value, path)

    def other(self, value: Any, path: Path) -> Any:
        """Turn a value of another kind into JSON.

        Raises:
            UnsupportedStateError: with its type and place.
        """
        self.refuse(type_name(value), path)

    def _mapping(self, value: dict[Any, Any], path: Path) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int) or (type(key) is int and key.bit_length() > _MAX_INT_BITS):
                self.refuse(f"a dict key of type {type_name(key)}", path, "Keys are strings or integers.")
        pairs = [[key, self.encode(item, (*path, key))] for key, item in value.items()]
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        coded: dict[str, Any] = {_DICTS[type(value)]: pairs}
        # Modules judge by these versions how to load what older ones saved.
        metadata = getattr(value, "_metadata", None)
        if type(value) is OrderedDict and metadata is not None:
            coded["$metadata"] = self.encode(metadata, (*path, "_metadata"))
        return coded

    def refuse(self, what: str, path: Path, hint: str = "") -> NoReturn:
        """Say that something cannot be held."""
        raise UnsupportedStateError(
            f"A checkpoint cannot hold {what}, found at {show(path)}.",
            hint or "It holds tensors, dicts, lists, tuples, strings, bytes, ints, floats, bools and None: convert it.",
        )


class Decoder:
    """Turns JSON into the values that it was made from."""

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
        readers: dict[str, Callable[[dict[str, Any], Path], Any]] = {
            "$tensor": self.tensor,
            "$ordered": self._ordered,
            "$tuple": lambda tree, path: tuple(self.decode(_list(tree[tag], path), path)),
            "$dict": lambda tree, path: dict(self._pairs(tree[tag], path)),
            "$counter": lambda tree, path: Counter(dict(self._pairs(tree[tag], path))),
            "$float": lambda tree, path: _float(tree[tag], path),
            "$bytes": lambda tree, path: _bytes(tree[tag], path),
        }
        allowed = {"$tensor": {tag, "dtype", "shape"}, "$ordered": {tag, "$metadata"}}.get(tag, {tag})
        if tag not in readers or not tree.keys() <= allowed:
            raise MalformedError(f"unknown keys {sorted(tree)[:4]} at {show(path)}")
        return readers[tag](tree, path)

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

    def tensor(self, tree: dict[str, Any], path: Path) -> Any:
        """Find a tensor.

        Raises:
            MalformedError: if there is none.
        """
        raise MalformedError(f"no tensor can be at {show(path)}")


def type_name(value: Any) -> str:
    """Return the full name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedError(f"a list was expected at {show(path)}")
    return value


def _float(value: Any, path: Path) -> float:
    if not isinstance(value, str) or value not in _SPECIAL_FLOATS:
        raise MalformedError(f"no special float at {show(path)}")
    return _SPECIAL_FLOATS[value]


def _bytes(value: Any, path: Path) -> bytes:
    if isinstance(value, str) and value.isascii():
        with suppress(binascii.Error):
            return base64.b64decode(value, validate=True)
    raise MalformedError(f"no base64 at {show(path)}")
