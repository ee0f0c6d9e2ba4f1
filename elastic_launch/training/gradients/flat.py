"""Views tensors of one dtype and device as flat ones: large ones in their memory order, small ones packed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SMALL = 64 * 1024
"""Elements below which a tensor is packed with others; a message costs about as much as copying so many elements."""

Values = list[Tensor | None]
"""A value, or None, for each tensor."""


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """A tensor's index, and the dense layout of its elements in memory."""

    which: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def small(self) -> bool:
        return self.shape.numel() < SMALL

    def new(self, part: FlatPart) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=part.dtype, device=part.device)


@dataclass(frozen=True, slots=True)
class Flat:
    """One or more tensors in a flat order."""

    nodes: list[Tensor]  # the elements of each of this rank's nodes of the tree; they may be changed
    total: Tensor  # receives their sum over all ranks; may be the memory of the first node
    packed: list[Tensor] = field(default_factory=list)  # what these elements are copies of, if they are copies

    def unpack(self) -> None:
        """Copy the sums to their tensors."""
        if self.packed:
            pieces = torch.split(self.total, [tensor.numel() for tensor in self.packed])
            for tensor, piece in zip(self.packed, pieces, strict=True):
                _in_memory(tensor).copy_(piece)


@dataclass(frozen=True, slots=True)
class FlatPart:
    """The tensors of one dtype and device."""

    dtype: torch.dtype
    device: torch.device
    places: tuple[FlatSlice, ...]

    def flats(self, nodes: list[Values], sums: Values) -> Iterator[Flat]:
        """Yield the nodes' values and the sums as flat tensors.

        Args:
            nodes: the nodes, with a value wherever there is a sum.
            sums: the sums; None entries are left out.
        """
        small = []
        for place in self.places:
            total = sums[place.which]
            if total is None or not total.numel():
                continue
            if place.small:
                small.append(place.which)
            else:
                yield Flat([_in_memory(_present(values, place.which)) for values in nodes], _in_memory(total))
        if small:
            packed = [_present(sums, which) for which in small]
            total = torch.empty(sum(tensor.numel() for tensor in packed), dtype=self.dtype, device=self.device)
            flat = [torch.cat([_in_memory(_present(values, which)) for which in small]) for values in nodes]
            yield Flat(flat, total, packed)


def _present(values: Values, which: int) -> Tensor:
    value = values[which]
    assert value is not None
    return value


def _in_memory(value: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, as a flat view."""
    return value.as_strided((value.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, or those of a dense tensor if it has gaps or overlaps."""
    return torch.empty_like(tensor, device="meta").stride()


def layout(like: Sequence[Tensor]) -> list[FlatPart]:
    """Return the parts into which tensors like these are divided, by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[FlatSlice]] = {}
    for which, tensor in enumerate(like):
        if tensor.layout != torch.strided:
            raise ValueError(f"tensor {which} is sparse; an exact reduction takes dense ones only")
        place = FlatSlice(which, tensor.shape, dense_stride(tensor))
        kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    return [FlatPart(dtype, device, tuple(places)) for (dtype, device), places in kinds.items()]
