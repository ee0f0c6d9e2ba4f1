"""Hashes of a few samples of a dataset, by which ranks notice that theirs has other content of the same length.

What may differ between nodes by right does not count: the directory of a file, the last bits of computed numbers, and
objects whose content is not known. What a hash does not tell apart is only missed; a false difference would end a run.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic_launch.batch import MicroBatch
from elastic_launch.training.data.batches import Batches, MicroBatchRequest
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.ranks.same_arguments import APART, LEAF, NOT_COMPARED, SAMPLE

ONCE_MORE, ROUNDS = 0.1, 8
"""Each sample is read twice, and then again within so many seconds, up to so many times: it may be random by design."""

LATER = 1.1
"""Seconds after that at which they are read once more if ranks differ: they may contain the time."""

LONGEST = 2.0
"""Seconds after which no further sample is read. Then none is compared."""

PARTS, BINS = 8, 7.3
"""Parts of an array of inexact numbers, and how finely the mean of each is told apart; not a ratio that means have."""

SHIFTS = 0.0, 1 / 3, 2 / 3
"""How far the borders of roundings are shifted: numbers near one of them are nearly the same on two nodes."""

LEAST = 1e-6
"""Mean size of numbers up to which they may be the rest of sums that should be zero."""

LEAVES = 64
"""Arrays and numbers of a sample whose roundings are hashed, the first ones: each is compared alone, at 20 bytes."""

ELEMENTS = 10_000
"""Elements of a collection that are looked at, the first ones."""

VALUES = 200_000
"""Values of a sample that are looked at, the first ones: each takes about a microsecond."""

MANY = 64
"""Numbers of 8 or 16 bits, in one tensor or array, from which on they are taken for decoded sound or pixels."""

CHUNK = 2**20
"""Numbers that are converted at a time."""

PATH = 4096
"""Longest text that may be a path."""


class Content(Dataset[dict[int, str]]):
    """The hashes of samples, by index, as one item, so that a loader can compute them in a process of its own.

    Args:
        batches: reads a sample, with the same random numbers each time and in any process.
    """

    def __init__(self, batches: Batches, indices: Sequence[int]) -> None:
        self._batches, self._indices = batches, indices

    def __getitem__(self, index: int) -> dict[int, str]:
        began, found = time.monotonic(), dict[int, str]()
        for again in range(ROUNDS):
            for place in self._indices:
                spent = time.monotonic() - began
                if again > 1 and spent > ONCE_MORE:
                    return found
                if spent > LONGEST:
                    return {}
                text = digest(self._batches[MicroBatchRequest(0, 0, place, MicroBatch(0, 0, 1), [place])])
                if found.setdefault(place, text) != text:
                    return {}  # with a sample that is random, others are, too
        return found


def chosen(length: int, seed: int) -> list[int]:
    """Return the indices of the samples to compare: the first, the last, and one by the seed."""
    return sorted({0, length - 1, seed % length})


def compared(indices: Sequence[int], found: Mapping[int, str]) -> dict[str, str]:
    """Return hashes by the names used in errors."""
    return {f"{SAMPLE}{index} (as a hash; see compare_samples)": found.get(index, NOT_COMPARED) for index in indices}


def digest(sample: Any) -> str:
    """Return the hashes of a sample: of what must be equal, and of each inexact part one for each of ``SHIFTS``.

    Each part is compared alone: of several, some are near one border and some near another. What counts:

    - integers, booleans, bytes, text and the structure of lists, tuples, sets, mappings and dataclasses: exactly. Of a
      text of one line with a ``/``, which may be a path, only what follows the last one.
    - floats, complex numbers, and 64 or more numbers of 8 or 16 bits, which may be pixels or sound: shape, type and,
      of the first ``LEAVES``, roughly the size of the numbers in each of some parts. Their last bits depend on the CPU
      and on the decoder.
    - tensors, NumPy arrays and what NumPy reads as one, such as PIL's images: likewise.
    - other objects: the name of their type.
    """
    hashes = _hashed(sample)
    return LEAF.join([hashes.exact.hexdigest()[:12], *map(APART.join, hashes.leaves)])


def _hashed(sample: Any) -> _Hashes:
    hashes = _Hashes()
    _add(hashes, sample, count(1))
    return hashes


class _Hashes:
    """A hash of what must be equal, and for each inexact part one for each way to round its numbers."""

    def __init__(self) -> None:
        self.exact = hashlib.sha256()
        self.leaves: list[list[str]] = []

    def __call__(self, data: Any) -> None:
        self.exact.update(data)

    def add_rounded(self, values: Sequence[float]) -> None:
        self._add_leaf([str([round(value + shift) for value in values]) for shift in SHIFTS])

    def add_unordered(self, parts: Sequence[_Hashes]) -> None:
        self("".join(sorted(part.exact.hexdigest() for part in parts)).encode())
        if any(part.leaves for part in parts):
            rounded = (
                sorted("".join(leaf[shift] for leaf in part.leaves) for part in parts) for shift in range(len(SHIFTS))
            )
            self._add_leaf([" ".join(each) for each in rounded])

    def _add_leaf(self, texts: Sequence[str]) -> None:
        if len(self.leaves) < LEAVES:
            self.leaves.append([hashlib.sha256(text.encode()).hexdigest()[:6] for text in texts])


def _add(update: _Hashes, value: Any, number: Iterator[int]) -> None:
    """Add a value to a hash, unless so many were added already."""
    if next(number) > VALUES:
        return
    update(f"<{type(value).__name__} ".encode())
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_quantized and not value.is_nested:
            _add_tensor(update, value.detach().cpu().resolve_conj().resolve_neg())
    elif isinstance(value, str):
        path = len(value) <= PATH and "\n" not in value
        update((value.rpartition("/")[2] if path else value).encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        update(value.rpartition(b"/")[2] if len(value) <= PATH and b"\n" not in value else value)
    elif value is None or isinstance(value, int):
        update(repr(value).encode())
    elif isinstance(value, float | complex):
        _add_roughly(update, [abs(value.real), abs(value.imag)])
    elif hasattr(value, "__array_interface__"):
        _add_array(update, value, number)
    elif isinstance(value, Mapping | Set | list | tuple):
        update(str(len(value)).encode())
        parts = list(islice(value.items() if isinstance(value, Mapping) else value, ELEMENTS))
        if len(parts) >= MANY and all(type(part) is float for part in parts):
            _add_tensor(update, torch.tensor(parts, dtype=torch.float64, device="cpu"))
        elif isinstance(value, list | tuple):
            for each in parts:
                _add(update, each, number)
        elif len(parts) == len(value):  # of a larger one, the first may be others in another process
            if isinstance(value, Mapping) and all(isinstance(key, str | bytes | int) for key in value):
                for key, each in sorted(parts, key=lambda item: digest(item[0])):
                    _add(update, key, number)
                    _add(update, each, number)
            else:
                update.add_unordered([_hashed(part) for part in parts])
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add(update, getattr(value, field.name, None), number)
    update(b">")


def _add_tensor(update: _Hashes, tensor: Tensor) -> None:
    update(f"{tensor.dtype} {[*tensor.shape]} ".encode())
    if tensor.is_complex() or tensor.is_floating_point() or (tensor.itemsize <= 2 and tensor.numel() >= MANY):
        numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)

        def size(part: Tensor) -> float:
            chunks = (part[at : at + CHUNK].to(torch.float64).abs().sum() for at in range(0, len(part), CHUNK))
            return float(sum(chunks)) / len(part)

        _add_roughly(update, [size(part) for part in numbers.tensor_split(PARTS) if len(part)])
    else:
        update(str(checksums([tensor]).tolist()).encode())


def _add_array(update: _Hashes, value: Any, number: Iterator[int]) -> None:
    import numpy  # torch may be there without it

    array = numpy.asarray(value)
    kind = array.dtype.kind
    # Of text, not its length: it may be that of a directory.
    update(f"{kind if kind in 'USV' else array.dtype} {array.dtype.names} {[*array.shape]} ".encode())
    if array.dtype.names is not None:
        for name in array.dtype.names:  # one by one, since between them may be anything
            _add_array(update, array[name], number)
    elif kind in "fc" or (kind in "iu" and array.dtype.itemsize <= 2 and array.size >= MANY):
        flat = array.reshape(-1)
        flat = flat.view(flat.real.dtype) if kind == "c" else flat

        def size(part: Any) -> float:
            chunks = (part[at : at + CHUNK] for at in range(0, len(part), CHUNK))
            return float(sum(numpy.abs(chunk.astype("f8")).sum() for chunk in chunks)) / len(part)

        _add_roughly(update, [size(part) for part in numpy.array_split(flat, PARTS) if len(part)])
    elif kind in "biumM":
        update(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8))
    elif kind != "V":  # text and objects
        _add(update, array.reshape(-1)[:ELEMENTS].tolist(), number)


def _add_roughly(update: _Hashes, sizes: Sequence[float]) -> None:
    """Add the mean sizes of the numbers in some parts."""
    largest = max(sizes, default=0.0)
    if not math.isfinite(sum(sizes)):
        update(str([math.isfinite(each) for each in sizes]).encode())
    elif largest > LEAST:
        # What is small beside the others may be the rest of a sum that should be zero.
        update.add_rounded([4 * math.log2(largest), *(each / largest * BINS for each in sizes)])
