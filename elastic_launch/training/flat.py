"""Tensors of several shapes as one flat order of elements for each dtype and device, cut into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bucket", "Part", "Place", "Values", "layout"]

BUCKET_BYTES = 16 * 1024 * 1024
"""Bytes of one node that cross the ranks at a time: with what is under way it bounds the memory of the exchange."""

Values = list[Tensor | None]
"""A value, or None, for each tensor."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its part's flat order, and how its elements lie in memory: densely, in some order."""

    which: int
    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]

    def new(self, part: Part) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=part.dtype, device=part.device)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of a part, cut into equal shards, the last of which may be padded."""

    start: int
    stop: int
    shard: int


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one dtype and device, in one flat order."""

    dtype: torch.dtype
    device: torch.device
    tensors: tuple[Place, ...]

    def buckets(self, world_size: int) -> Iterator[Bucket]:
        length = self.tensors[-1].stop
        step = max(1, BUCKET_BYTES // self.dtype.itemsize)
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield Bucket(start, stop, -(-(stop - start) // world_size))

    def pack(self, bucket: Bucket, values: Values, flat: Tensor) -> None:
        """Copy a bucket of values into a flat tensor, zero where there are none."""
        for place, inside, outside in self._pieces(bucket):
            value = values[place.which]
            if value is None:
                flat[outside].zero_()
            else:
                flat[outside].copy_(_in_memory(value)[inside])
        flat[bucket.stop - bucket.start :].zero_()

    def unpack(self, bucket: Bucket, flat: Tensor, values: Values) -> None:
        """Copy a flat tensor into a bucket of values."""
        for place, inside, outside in self._pieces(bucket):
            value = values[place.which]
            if value is not None:
                _in_memory(value)[inside].copy_(flat[outside])

    def _pieces(self, bucket: Bucket) -> Iterator[tuple[Place, slice, slice]]:
        """Yield what of each tensor lies in a bucket: its range in the tensor, and in the bucket."""
        for place in self.tensors:
            start, stop = max(place.start, bucket.start), min(place.stop, bucket.stop)
            if start < stop:
                inside = slice(start - place.start, stop - place.start)
                yield place, inside, slice(start - bucket.start, stop - bucket.start)


def _in_memory(value: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order in which they lie in memory, as a view."""
    return value.as_strided((value.numel(),), (1,))


def layout(like: Sequence[Tensor]) -> list[Part]:
    """Return the parts that tensors like these make.

    Raises:
        ValueError: if one is sparse.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for which, tensor in enumerate(like):
        if tensor.layout != torch.strided:
            raise ValueError(f"tensor {which} is sparse; an exact reduction takes dense ones only")
        kinds.setdefault((tensor.dtype, tensor.device), []).append(which)
    parts = []
    for (dtype, device), members in kinds.items():
        places: list[Place] = []
        for which in members:
            start = places[-1].stop if places else 0
            # Of a layout with gaps or overlaps this makes a dense one.
            stride = torch.empty_like(like[which], device="meta").stride()
            places.append(Place(which, start, start + like[which].numel(), like[which].shape, stride))
        parts.append(Part(dtype, device, tuple(places)))
    return parts
