"""A nested state as named tensors and JSON, and back.

Dicts with string keys, lists, strings, integers, finite floats, booleans and None are themselves in JSON. All else is
an object whose keys start with ``$`` (and so is a dict that has such a key):

==============================================  =====================================================
``{"$tensor": name, "dtype": .., "shape": ..}``  a tensor, kept apart under that name
``{"$tuple": [..]}``                             a tuple
``{"$dict": [[key, value], ..]}``                a dict with string and integer keys, in order
``{"$ordered": [[key, value], ..]}``             an OrderedDict; ``$metadata`` beside it is a state_dict's ``_metadata``
``{"$counter": [[key, value], ..]}``             a collections.Counter, which MultiStepLR has
``{"$float": "nan"}``                            nan, inf or -inf
``{"$bytes": "aGk="}``                           bytes, in base64
==============================================  =====================================================

Tensors come back in host memory, contiguous, without autograd, a Parameter as a plain tensor. Names for one and the
same tensor (tied weights) are stored once and come back as one tensor; tensors that overlap otherwise come back apart.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeGuard

import torch

from elastic_launch.snapshot.dtypes import DTYPES, is_possible, name_of, safetensors_type, stored_shape
from elastic_launch.snapshot.errors import MalformedError, UnsupportedStateError

__all__ = ["MAX_DEPTH", "decode", "encode"]

MAX_DEPTH = 64
"""Deepest nesting that is written or read, well below where Python's JSON parser would exhaust the stack."""

_MAX_INT_BITS = 8192  # Python itself refuses to parse integers of more than 4300 digits.
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def encode(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a state apart.

    Returns:
        The tensors as they are, neither copied nor moved, by a readable name such as ``model/layer/weight``; and the
        JSON value in which references stand for them.

    Raises:
        UnsupportedStateError: with type and place of what the format does not hold.
    """
    encoder = _Encoder()
    tree = encoder.encode(state, ())
    return encoder.tensors, tree


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a state together again.

    Args:
        tensors: by name, with the dtypes and shapes under which they are stored.

    Raises:
        MalformedError: if ``encode`` cannot have made this tree and these tensors, whoever did.
    """
    decoder = _Decoder(tensors)
    state = decoder.decode(tree, ())
    unused = tensors.keys() - decoder.made.keys()
    if unused:
        raise MalformedError(f"nothing refers to the tensor {min(unused)!r}")
    return state


_Path = tuple[str | int, ...]


def _show(path: _Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: _Path) -> Any:
        if len(path) > MAX_DEPTH:
            self._refuse(f"nesting deeper than {MAX_DEPTH}", path, "Does the state contain itself?")
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
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        self._refuse(_type_name(value), path)

    def _mapping(self, value: dict[Any, Any], path: _Path) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int) or (type(key) is int and key.bit_length() > _MAX_INT_BITS):
                self._refuse(f"a dict key of type {_type_name(key)}", path, "Keys are strings or integers.")
        pairs = [[key, self.encode(item, (*path, key))] for key, item in value.items()]
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        coded: dict[str, Any] = {_DICTS[type(value)]: pairs}
        # Modules judge by these versions how to load what older ones saved.
        metadata = getattr(value, "_metadata", None)
        if type(value) is OrderedDict and metadata is not None:
            coded["$metadata"] = self.encode(metadata, (*path, "_metadata"))
        return coded

    def _tensor(self, tensor: torch.Tensor, path: _Path) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self._refuse(_type_name(tensor), path, "Sharded tensors and other subclasses are not replicated state.")
        if tensor.layout is not torch.strided or tensor.is_meta or name_of(tensor.dtype) not in DTYPES:
            self._refuse(f"a tensor ({tensor.dtype}, {tensor.layout}, on {tensor.device})", path)
        identity = _identity(tensor)
        name = self._names.get(identity) if tensor.numel() else None
        if name is None:
            name = self._names[identity] = self._new_name(path)
            self.tensors[name] = tensor
        return {"$tensor": name, "dtype": name_of(tensor.dtype), "shape": list(tensor.shape)}

    def _new_name(self, path: _Path) -> str:
        # A name is UTF-8 in the file; a key may be a string that is not.
        plain = "/".join(str(key) for key in path).encode("utf-8", "backslashreplace").decode() or "state"
        name, count = plain, 1
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{plain}~{count}"
        return name

    def _refuse(self, what: str, path: _Path, hint: str = "") -> NoReturn:
        raise UnsupportedStateError(
            f"A checkpoint cannot hold {what}, found at {_show(path)}.",
            hint or "It holds tensors, dicts, lists, tuples, strings, bytes, ints, floats, bools and None: convert it.",
        )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.is_conj(), tensor.is_neg())
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.made: dict[str, torch.Tensor] = {}

    def decode(self, tree: Any, path: _Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise MalformedError(f"nesting deeper than {MAX_DEPTH} at {_show(path)}")
        if isinstance(tree, list):
            return [self.decode(item, (*path, index)) for index, item in enumerate(tree)]
        if isinstance(tree, dict):
            tags = tuple(key for key in tree if key.startswith("$"))
            if not tags:
                return {key: self.decode(item, (*path, key)) for key, item in tree.items()}
            return self._tagged(tags[0], tree, path)
        if isinstance(tree, float) and not math.isfinite(tree):
            raise MalformedError(f"a float out of range at {_show(path)}")
        return tree

    def _tagged(self, tag: str, tree: dict[str, Any], path: _Path) -> Any:
        readers: dict[str, Callable[[dict[str, Any], _Path], Any]] = {
            "$tensor": self._tensor,
            "$ordered": self._ordered,
            "$tuple": lambda tree, path: tuple(self.decode(_list(tree[tag], path), path)),
            "$dict": lambda tree, path: dict(self._pairs(tree[tag], path)),
            "$counter": lambda tree, path: Counter(dict(self._pairs(tree[tag], path))),
            "$float": lambda tree, path: _float(tree[tag], path),
            "$bytes": lambda tree, path: _bytes(tree[tag], path),
        }
        allowed = {"$tensor": {tag, "dtype", "shape"}, "$ordered": {tag, "$metadata"}}.get(tag, {tag})
        if tag not in readers or not tree.keys() <= allowed:
            raise MalformedError(f"unknown keys {sorted(tree)[:4]} at {_show(path)}")
        return readers[tag](tree, path)

    def _pairs(self, items: Any, path: _Path) -> Iterable[tuple[str | int, Any]]:
        seen = set()
        for pair in _list(items, path):
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
                raise MalformedError(f"no pair of key and value at {_show(path)}")
            key = pair[0]
            if key in seen:
                raise MalformedError(f"the key {key!r} twice at {_show(path)}")
            seen.add(key)
            yield key, self.decode(pair[1], (*path, key))

    def _ordered(self, tree: dict[str, Any], path: _Path) -> OrderedDict[str | int, Any]:
        value = OrderedDict(self._pairs(tree.get("$ordered"), path))
        if "$metadata" in tree:
            value._metadata = self.decode(tree["$metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
        return value

    def _tensor(self, tree: dict[str, Any], path: _Path) -> torch.Tensor:
        name, dtype, shape = tree["$tensor"], tree.get("dtype"), tree.get("shape")
        stored = self._tensors.get(name) if isinstance(name, str) else None
        if stored is None:
            raise MalformedError(f"no tensor {name!r} for {_show(path)}")
        if not isinstance(dtype, str) or dtype not in DTYPES or not _is_shape(shape):
            raise MalformedError(f"an unknown dtype or shape at {_show(path)}")
        made = self.made.get(name)
        if made is None:
            made = self.made[name] = _restore(stored, DTYPES[dtype], tuple(shape), path)
        if made.dtype is not DTYPES[dtype] or list(made.shape) != shape:
            raise MalformedError(f"another dtype or shape of the tensor {name!r} at {_show(path)}")
        return made


def _restore(stored: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], path: _Path) -> torch.Tensor:
    same_type = safetensors_type(stored.dtype) == safetensors_type(dtype)
    if same_type and tuple(stored.shape) == stored_shape(dtype, shape):
        return stored if stored.dtype is dtype else stored.view(dtype).reshape(shape)
    raise MalformedError(f"a tensor of {name_of(stored.dtype)}{list(stored.shape)} for {_show(path)}")


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value) and is_possible(value)


def _list(value: Any, path: _Path) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedError(f"a list was expected at {_show(path)}")
    return value


def _float(value: Any, path: _Path) -> float:
    if not isinstance(value, str) or value not in _SPECIAL_FLOATS:
        raise MalformedError(f"no special float at {_show(path)}")
    return _SPECIAL_FLOATS[value]


def _bytes(value: Any, path: _Path) -> bytes:
    if isinstance(value, str) and value.isascii():
        with suppress(binascii.Error):
            return base64.b64decode(value, validate=True)
    raise MalformedError(f"no base64 at {_show(path)}")
