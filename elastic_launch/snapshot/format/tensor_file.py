"""Tensors in a safetensors file, written by this module and read by the safetensors library.

The library's own writer would need numpy and a second copy or a second pass for the checksum, and hides the operating
system's errors; its parser is well hardened by wide use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from elastic_launch.snapshot.errors import MalformedError, UnsupportedStateError
from elastic_launch.snapshot.format.dtypes import DTYPES, bytes_of, dense, is_possible, safetensors_type, stored_shape
from elastic_launch.snapshot.format.files import MAX_HEADER, safetensors_header
from elastic_launch.snapshot.stall import advanced

_PIECE = 2**22
"""Elements copied at a time; reading a large tensor is slow if the file is not in the page cache."""

_ELEMENTS = {safetensors_type(dtype) for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor file."""

    header: bytes  # the file's first bytes
    places: list[tuple[str, int, int]]  # name, offset and size in bytes of each tensor, in the order of the file
    size: int  # of the file, in bytes


def parts(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of the file that :func:`layout` describes; at most one tensor at a time is copied."""
    found = layout(tensors, metadata)
    yield found.header
    for name, _, _ in found.places:
        tensor = dense(tensors[name])
        yield bytes_of(tensor)


def layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a file with these tensors.

    Args:
        metadata: what the file says of itself, for other programs.

    Raises:
        UnsupportedStateError: if there are more tensors than a file can hold, about half a million.
    """
    # Widest elements first, so that each tensor is aligned to its elements without gaps, which the format forbids.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": safetensors_type(tensor.dtype),
            "shape": stored_shape(tensor.dtype, tuple(tensor.shape)),
            "data_offsets": [offset, end],
        }
        offset = end
    beginning = safetensors_header(header)
    if len(beginning) - 8 > MAX_HEADER:
        raise UnsupportedStateError(f"A checkpoint cannot hold {len(names)} tensors: their names take too much room.")
    ends = {name: header[name]["data_offsets"] for name in names}
    places = [(name, len(beginning) + ends[name][0], ends[name][1] - ends[name][0]) for name in names]
    return Layout(beginning, places, len(beginning) + offset)


def read(descriptor: int, only: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of an open file, each in its own memory; arguments and errors as for :func:`mapped`."""
    return {name: copied(tensor) for name, tensor in mapped(descriptor, only).items()}


def mapped(descriptor: int, only: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of an open file, or some, in mapped memory, which changes with the file and ends with it.

    What is kept must therefore be copied at once. Tensors take memory only where they are read.

    Raises:
        MalformedError: if it is not a safetensors file, or has element types that this format does not use.
    """
    # By descriptor: the file whose checksum was verified, even if another file now has its name.
    path = f"/proc/self/fd/{descriptor}"
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118
            return {name: _map_one(file, name) for name in names}
    except SafetensorError as error:
        raise MalformedError(f"it is not a safetensors file: {error}") from error


def _map_one(file: Any, name: str) -> torch.Tensor:
    described = file.get_slice(name)
    if described.get_dtype() not in _ELEMENTS:
        raise MalformedError(f"the tensor {name!r} has elements of type {described.get_dtype()}")
    if not is_possible(described.get_shape()):
        raise MalformedError(f"the tensor {name!r} has an impossible shape")
    found: torch.Tensor = file.get_tensor(name)
    return found


def copied(mapped: torch.Tensor) -> torch.Tensor:
    """Return a tensor in its own memory."""
    advanced()
    if mapped.numel() <= _PIECE:
        return mapped.clone()
    tensor = torch.empty_like(mapped)
    source, target = mapped.reshape(-1), tensor.reshape(-1)
    for start in range(0, source.numel(), _PIECE):
        target[start : start + _PIECE].copy_(source[start : start + _PIECE])
        advanced()
    return tensor
