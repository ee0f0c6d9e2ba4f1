"""The files of torch.distributed.checkpoint: tensors, each as ``torch.save`` writes it, and a pickle about them.

Torch's readers find tensors by name. A checkpoint has the names of torchtitan, ``<name>`` for the model's, and those of
``torch.distributed.checkpoint.state_dict``, ``model.<name>``; for the optimizer both ``param_groups.<name>.lr`` and
``param_groups.0.lr``. Several names may have one place in the file. Of two places that would have the same name, as in
``{"a.b": 1, "a": {"b": 2}}``, the second one has another: ``a.b~2``.

A pickle may call any function. Here it is read with an unpickler that knows only the classes in it, and what it says is
checked; tensors are read with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.dtypes import DTYPES, dense, is_possible, name_of
from elastic_launch.snapshot.format.manifest import DATA, METADATA
from elastic_launch.snapshot.format.plain import Path
from elastic_launch.snapshot.stall import advanced

MAX_METADATA_BYTES = 2**30

_VERSION = "1.0.0"
"""The version that torch's own writer gives."""

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    _METADATA: {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *DTYPES},
}
"""What the pickle may name, by module."""

_PATHS = {"pathlib", "pathlib._local"}

Read = Callable[[str, int, int], bytes]
"""Returns so many bytes of a file, from an offset on."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What ``torch.save`` has written, in a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, of which different blobs may have different boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], Blob]]  # where it begins, its shape, and where it is stored

    def read(self, read: Read) -> Tensor:
        """Return the whole tensor; raise a MalformedError if a blob does not have it."""
        whole: Tensor | None = None
        for begin, shape, blob in self.chunks:
            found = loaded(blob, read)
            if not isinstance(found, Tensor) or found.dtype is not self.dtype or tuple(found.shape) != shape:
                raise MalformedError(f"a tensor in {blob.file} is not what {METADATA} says")
            if shape == self.shape:
                return found.contiguous()
            whole = torch.empty(self.shape, dtype=self.dtype) if whole is None else whole
            whole[tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))].copy_(found)
        return torch.empty(self.shape, dtype=self.dtype) if whole is None else whole


def loaded(blob: Blob, read: Read) -> Any:
    """Return what a blob has: tensors and plain values, of which nothing is called."""
    data = read(blob.file, blob.offset, blob.length)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise MalformedError(f"{blob.file} cannot be read at {blob.offset}: {text}") from error


def files(
    rest: Any, tensors: Mapping[str, Tensor], orders: Mapping[str, list[list[str]]]
) -> dict[str, Iterator[memoryview]]:
    """Return the contents of the two files by name, to be written in this order. One tensor at a time is copied.

    Args:
        rest, tensors: a state, as ``tree.encode`` returns it.
        orders: names of each optimizer's parameters by group, such as ``model.0.weight``.
    """
    stored: list[tuple[Path, Tensor]] = []

    def take(path: Path, tensor: Tensor) -> Tensor:
        stored.append((path, tensor))
        return tensor

    state = tree.decode(rest, {name: tensors[name] for name in tree.tensor_names(rest)}, take)
    groups = {part: found for part in orders if (found := _numbers(state, part, orders[part]))}
    names: dict[Path, list[Path]] = {path: _names(path, groups) for path, _ in stored}
    # An empty tensor is stored once for each of its places.
    shared = {id(tensor): names[path] for path, tensor in stored}
    values: list[tuple[list[Path], Any]] = []
    for path, value in _leaves(state, ()):
        if isinstance(value, Tensor):
            if path not in names:
                shared[id(value)] += [name for name in _names(path, groups) if name not in shared[id(value)]]
        elif path[0] == "model" or _group(path, groups) is not None:
            if path in names:  # an array; torch's readers expect it under its name, and not its elements
                names[path] = [(*path, "data")]
            values.append((_names(path, groups), _plain_tuples(value)))
    values += [
        ([(*part.split("/"), "param_groups", number, "params")], list(group.values()))
        for part, found in groups.items()
        for number, group in enumerate(found)
    ]
    blobs: list[tuple[list[Path], Any]] = [*((names[path], tensor) for path, tensor in stored), *values]
    # Of a model with a part that is itself called model, the names in the model count.
    first: set[str] = set()
    for paths, _ in blobs:
        paths[0] = _unused(paths[0], first)
        first.add(_dotted(paths[0]))
    described = importlib.import_module(_METADATA)  # slow to import
    metadata = described.Metadata({}, {}, {})
    metadata.version = _VERSION

    def data() -> Iterator[memoryview]:
        offset = 0
        for paths, value in blobs:
            blob = _saved(value)
            others = [path for path in paths[1:] if _dotted(path) not in first]
            _describe(metadata, [paths[0], *others], value, (offset, len(blob)))
            offset += len(blob)
            yield blob

    def about() -> Iterator[memoryview]:
        yield memoryview(pickle.dumps(metadata))

    return {DATA: data(), METADATA: about()}


def _plain_tuples(value: Any) -> Any:
    """Return a value without named tuples, whose classes may have no name to pickle; the state's JSON has them."""
    if isinstance(value, tuple):
        return tuple(map(_plain_tuples, value))
    if type(value) in (list, dict):
        return [*map(_plain_tuples, value)] if type(value) is list else {k: _plain_tuples(x) for k, x in value.items()}
    return value


def _saved(value: Any) -> memoryview:
    file = io.BytesIO()
    # A clone: of a tensor in a larger memory, torch would save all of that.
    torch.save(dense(value).clone() if isinstance(value, Tensor) else value, file)
    return file.getbuffer()


def _describe(metadata: Any, paths: list[Path], value: Any, place: tuple[int, int]) -> None:
    """Add a blob to the metadata under each of its names."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    for path in paths:
        name = _dotted(path)
        if name in metadata.state_dict_metadata:
            continue
        index = MetadataIndex(name)
        found: Any = BytesStorageMetadata()
        if isinstance(value, Tensor):
            begin = torch.Size([0] * value.dim())
            chunk = ChunkStorageMetadata(begin, value.shape)
            found = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [chunk])
            index = MetadataIndex(name, begin, 0)
        metadata.state_dict_metadata[name] = found
        metadata.storage_data[index] = _StorageInfo(DATA, *place)
        metadata.planner_data[name] = path


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _unused(path: Path, names: set[str]) -> Path:
    """Return the name of a place that differs from others, as of ``a.b`` in a state that has a ``b`` in an ``a``."""
    name, count = path, 1
    while _dotted(name) in names:
        count += 1
        name = (*path[:-1], f"{path[-1]}~{count}")
    return name


def _numbers(state: Any, part: str, order: list[list[str]]) -> list[dict[int, str]]:
    """Return the names of an optimizer's parameters by their numbers in its state, for each group."""
    for key in part.split("/"):
        state = state.get(key) if isinstance(state, dict) else None
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or [len(group["params"]) for group in groups] != list(map(len, order)):
        return []
    return [
        dict(zip(group["params"], [name.removeprefix("model.") for name in names], strict=True))
        for group, names in zip(groups, order, strict=True)
    ]


def _group(path: Path, groups: Mapping[str, list[dict[int, str]]]) -> tuple[str, Path] | None:
    """Return the optimizer to whose options a place belongs, and the rest of the path."""
    for part in groups:
        depth = part.count("/") + 1
        if "/".join(map(str, path[:depth])) == part and path[depth : depth + 1] == ("param_groups",):
            return (part, path[depth + 1 :]) if "params" not in path[depth + 2 :] else None
    return None


def _names(path: Path, groups: Mapping[str, list[dict[int, str]]]) -> list[Path]:
    """Return the names of a place in the state, as paths of keys; the first is the one that no other place has."""
    if path[0] == "model" and len(path) > 1:
        name = _dotted(path[1:])
        return [(name,), ("model", name)]
    if (found := _group(path, groups)) is not None:
        part, (number, *rest) = found
        named = [f"param_groups.{name}.{_dotted(tuple(rest))}" for name in groups[part][int(number)].values()]
        return [path, *((*part.split("/"), name) for name in named)]
    for part, numbered in groups.items():
        depth = part.count("/") + 1
        if "/".join(map(str, path[:depth])) == part and path[depth : depth + 1] == ("state",):
            of = {number: name for group in numbered for number, name in group.items()}
            if path[depth + 1] in of:
                return [(*path[:depth], "state", of[int(path[depth + 1])], *path[depth + 2 :])]
    return [path]


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, (*path, key))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module in _PATHS and name.endswith("Path"):  # where it was written
            return lambda *parts: "/".join(map(str, parts))
        raise MalformedError(f"its {METADATA} names {module}.{name}, which is not for a checkpoint to name")


def parse(data: bytes) -> tuple[dict[str, StoredTensor], dict[str, Blob]]:
    """Return the tensors and the other values that a checkpoint's pickle describes, by name.

    Raises:
        MalformedError: if it names anything but torch's classes for this, or does not describe a checkpoint.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        stored = {(key.fqn, _offset(key)): _blob(info) for key, info in found.storage_data.items()}
        tensors, values = {}, {}
        for name, described in found.state_dict_metadata.items():
            if type(described).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor(name, described, stored)
            else:
                values[name] = stored[name, None]
    except MalformedError:
        raise
    except Exception as error:
        raise MalformedError(f"its {METADATA} does not describe a checkpoint: {error!r:.200}") from error
    return tensors, values


def _offset(key: Any) -> tuple[int, ...] | None:
    return None if key.offset is None else _sizes(key.offset)


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and size >= 0 for size in sizes) or not is_possible(sizes):
        raise MalformedError(f"its {METADATA} has an impossible shape")
    return sizes


def _blob(info: Any) -> Blob:
    file, offset, length = info.relative_path, info.offset, info.length
    plain = isinstance(file, str) and file not in ("", ".", "..") and not {"/", "\\", "\0"} & set(file)
    if not plain or any(type(number) is not int or number < 0 for number in (offset, length)):
        raise MalformedError(f"its {METADATA} names {file!r:.80}, which is not a file in it")
    if getattr(info, "transform_descriptors", None):
        raise MalformedError(f"{file} is compressed or encrypted ({info.transform_descriptors}), which is not read")
    return Blob(file, offset, length)


def _tensor(name: str, described: Any, stored: Mapping[Any, Blob]) -> StoredTensor:
    dtype, shape = described.properties.dtype, _sizes(described.size)
    if not isinstance(dtype, torch.dtype) or name_of(dtype) not in DTYPES:
        raise MalformedError(f"{name} has elements of type {dtype!r:.40}")
    chunks = []
    for chunk in described.chunks:
        begin, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
        if any(at + size > length for at, size, length in zip(begin, sizes, shape, strict=True)):
            raise MalformedError(f"a part of {name} is outside of it")
        chunks.append((begin, sizes, stored[name, begin]))
    if sum(math.prod(sizes) for _, sizes, _ in chunks) != math.prod(shape):
        raise MalformedError(f"parts of {name} are missing")
    return StoredTensor(dtype, shape, chunks)


class OwnTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint that :func:`files` has written, each read when it is looked up.

    Args:
        rest: the state's JSON, all of it.
        metadata: content of the pickle's file.
        read: reads the other file.
    """

    def __init__(self, rest: Any, metadata: bytes, read: Read) -> None:
        self._read = read
        # In the file they are in the order of the JSON, whatever names they have there.
        found = {tensor.chunks[0][2].offset: tensor for tensor in parse(metadata)[0].values()}
        names = tree.tensor_names(rest)
        if len(names) != len(found):
            raise MalformedError(f"{DATA} has {len(found)} tensors, and the state {len(names)}")
        self._found = {name: found[offset] for name, offset in zip(names, sorted(found), strict=True)}

    def __getitem__(self, name: str) -> Tensor:
        advanced()
        return self._found[name].read(self._read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def only(self, names: dict[str, None] | None) -> OwnTensors:
        """Return these without all but some."""
        some = object.__new__(OwnTensors)
        some._read = self._read
        some._found = {name: each for name, each in self._found.items() if names is None or name in names}
        return some
