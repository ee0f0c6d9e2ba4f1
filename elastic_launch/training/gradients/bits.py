"""Checksums of what a micro-batch gives: whether it gives the same when it is computed again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastic_launch.training.ranks.checksum import checksums


@dataclass
class Bits:
    """Checksums of a micro-batch's loss and of its gradients, by parameter; each may come in several parts."""

    loss: Tensor | None = None
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, which: int, gradient: Tensor) -> None:
        self.gradients.setdefault(which, []).append(checksums([gradient]))

    def differing(self, other: Bits) -> int | None:
        """Return the first parameter whose gradient differs; -1 if the loss does, None if nothing does."""
        if self.loss is None or other.loss is None or not torch.equal(self.loss, other.loss):
            return -1
        for which in sorted(self.gradients.keys() | other.gradients.keys()):
            mine, theirs = self.gradients.get(which, []), other.gradients.get(which, [])
            if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
                return which
        return None
