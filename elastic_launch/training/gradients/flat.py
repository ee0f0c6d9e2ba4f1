"""Packs tensors of one dtype and device into one flat tensor: one operation or message then handles all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNED = 16
"""A tensor's offset is a multiple of this number of elements, which is best for an optimizer that reads it."""

MESSAGE = 25 * 1024 * 1024
"""Bytes of tensors that are exchanged together, as in DistributedDataParallel."""

Values = list[Tensor | None]
"""A value, or None, for each tensor."""


def packed(like: Sequence[Tensor], room: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor of zeros, and a view of it for each of some tensors of one dtype and device.

    A view has its tensor's shape and order in memory: sums over all elements, such as a norm, depend on that order to
    the bit.

    Args:
        room: further elements at the end.
    """
    first = like[0]
    width = 2 if first.is_complex() else 1  # not all backends support complex numbers
    sizes = [-(-width * tensor.numel() // ALIGNED) * ALIGNED for tensor in like]
    real = first.real.dtype if first.is_complex() else first.dtype
    flat = torch.zeros(sum(sizes) + room, dtype=real, device=first.device)
    views = []
    for tensor, piece in zip(like, torch.split(flat, [*sizes, room]), strict=False):
        dense = torch.view_as_complex(piece.view(-1, 2)) if width == 2 else piece
        # Without gaps or overlaps, which the tensor may have.
        stride = torch.empty_like(tensor, device="meta").stride()
        views.append(dense.as_strided(tensor.shape, stride, dense.storage_offset()))
    return flat, views


def sharing(flat: Tensor) -> int:
    """Return a number that grows with each tensor that shares a tensor's memory, and each holder of its storage.

    A ``detach()`` of a view is a tensor of its own. So memory of which such were given out may be used again once the
    number is what it was before.
    """
    storage = flat.untyped_storage()
    # Python has one object for it, which torch counts once.
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for which, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(which)
    return [*kinds.values()]


def together(tensors: Sequence[Tensor], exchange: Callable[[Tensor], object]) -> None:
    """Exchange tensors with other ranks; those of the same dtype and device in collectives of about ``MESSAGE``."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    for members in alike(filled):
        these, size = list[Tensor](), 0
        for which in members:
            these.append(filled[which])
            size += filled[which].nbytes
            if size < MESSAGE and which != members[-1]:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in these])
            exchange(flat)
            for tensor, piece in zip(these, torch.split(flat, [x.numel() for x in these]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
            these, size = [], 0


class Reduction:
    """Sums gradients, or other tensors, by their index; this base class sends nothing before all ranks are done."""

    @property
    def early(self) -> bool:
        """Whether something is sent before all ranks have finished their backward passes."""
        return False

    @property
    def room(self) -> int:
        """Number of elements of cargo that are sent with gradients in this step, see ``buckets``; 0: none."""
        return 0

    def reset(self) -> None:
        """Begin a step; drop all values."""

    def begin(self, index: int) -> None:
        """Begin a micro-batch, by its index in the global batch; each rank begins its micro-batches in order."""

    def end(self) -> None:
        """End the current micro-batch."""

    def begin_pass(self, *, last: bool) -> None:
        """Begin a backward pass; ``last`` is whether it is this rank's last one in this step."""

    def end_pass(self) -> None: ...

    def put(self, which: int, value: Tensor) -> None:
        """Add a value, or a part of one."""
        raise NotImplementedError

    def totals(self) -> Values | None:
        """Return the sums so far, None where there is none, to which autograd may add in place; None: to no sum."""
        return None

    def added(self, which: int) -> None:
        """Record that a value, or a part of one, was added to one of :meth:`totals`."""

    def load(self, cargo: Tensor) -> None:
        """Add a cargo to what is sent, to be summed over the ranks; called before the last backward pass."""
        raise NotImplementedError

    def delivered(self) -> Tensor:
        """Return the sums of the cargo, possibly with further elements."""
        raise NotImplementedError

    def send(self) -> None:
        """Send what may be sent before the step's end."""

    @property
    def whole(self) -> bool:
        """Whether this rank has a value of each tensor, so that the others need not report which they have."""
        return False

    def finish(self, total: int, *, whole: bool = False) -> Values:
        """Return the sums over all ranks, None if no micro-batch of any rank had a value.

        Their memory is used again after the next :meth:`reset` unless something still holds one of them then.

        Args:
            total: M, the number of micro-batches of all ranks.
            whole: whether each tensor is known to have a value on some rank; the same on all ranks.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """Give the step up, as all ranks do."""

    def give_up(self) -> None:
        """Give the step up after a failed exchange; nothing refers to the process group any more."""
