"""Detects whether tensors that are copied in the background still have the values of the step boundary.

A script may change a parameter in place at any time, for example by weight normalisation or its own weight decay; the
copy is then neither the old state nor the new one. A tensor's version reveals changes, except those made through
``.data``; a sum over the bits reveals these.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 64 * 1024
"""Bytes below which a tensor is copied at once, since watching it takes as long."""

_PIECE = 1 << 20
"""Bytes of a copy that are moved to aligned memory at a time, so that they stay in the cache."""


class WatchedTensor:
    """A tensor that is read later.

    Args:
        tensor: a contiguous tensor whose size is a multiple of 8 bytes; see :meth:`possible`.
        by_sum: whether to compare a sum over its bits, too.
    """

    def __init__(self, tensor: Tensor, *, by_sum: bool) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._sum = _sum(tensor) if by_sum else None

    @staticmethod
    def possible(tensor: Tensor) -> bool:
        """Whether a tensor can be watched; others must be copied before the script continues."""
        size = tensor.numel() * tensor.element_size()
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        aligned = size % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0
        return size >= SMALL and plain and aligned and not tensor.is_inference()

    def changed(self, copy: Tensor) -> bool:
        """Whether the tensor has changed, or its copy differs from it.

        Args:
            copy: its bytes in memory, at any address, since the tensors of a slot follow each other without gaps.
        """
        if self._tensor._version != self._version:
            return True
        if self._sum is None:
            return False
        if copy.storage_offset() % 8 == 0:
            return int(self._sum) != int(_sum(copy))
        total = sum(int(_sum(piece.clone())) for piece in torch.split(copy, _PIECE))
        return (int(self._sum) - total) % 2**64 != 0


def _sum(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.int64).sum()
