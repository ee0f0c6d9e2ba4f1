"""Samplers: which sample of a dataset is at each position of an epoch.

A sampler is a function of (seed, epoch, position): the sample at a position is the same in every world and after every
restart. It is called with some thousand positions at a time, never with a whole epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from elastic_launch.errors import UsageError
from elastic_launch.training.data.permutation import Permutation, uniform

__all__ = ["ByLength", "InOrder", "Permutation", "Sampler", "Shuffled", "Weighted", "uniform"]

SAMPLE_ORDER = "order of samples (as a hash)"
"""Name of the sample order in a checkpoint's identity."""


@runtime_checkable
class Sampler(Protocol):
    """Protocol of the samplers that ``ElasticLoader(sampler=...)`` accepts.

    ``len(sampler)`` is the number of samples in an epoch, which may differ from the dataset's length. A sampler must
    not draw from a generator that it keeps: use :class:`Permutation` and :func:`uniform` with seed and epoch as the
    key. This curriculum begins with the easiest tenth of the samples, and uses all of them from step 1000 on::

        class Curriculum:
            def __init__(self, difficulty, batch):
                self.easiest_first = difficulty.argsort(stable=True)
                self.batch = batch

            def __len__(self):
                return len(self.easiest_first)

            def indices(self, seed, epoch, positions):
                step = (epoch * len(self) + positions) // self.batch.size
                allowed = len(self) * (0.1 + 0.9 * step / 1000).clamp(max=1)
                return self.easiest_first[(el.samplers.uniform(positions, seed, epoch) * allowed).long()]
    """

    def __len__(self) -> int: ...

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor | Sequence[int]:
        """Return the dataset's index at each position.

        Args:
            seed: the loader's seed.
            epoch: the epoch, from 0.
            positions: positions in the epoch, 0 to ``len(self) - 1``, in any order; a one-dimensional int64 CPU tensor.

        Returns:
            One integer for each position, 0 to ``len(dataset) - 1``: a tensor of the same shape, or a sequence.
        """


class InOrder:
    """Each sample once per epoch, in the dataset's own order.

    Args:
        length: number of samples in the dataset.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        return positions


class Shuffled:
    """Each sample once per epoch, in a random order; takes constant memory for any length.

    Args:
        length: number of samples in the dataset.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        return Permutation(self._length, seed, epoch)[positions]


class Weighted:
    """Samples drawn with replacement, with probabilities proportional to their weights.

    Args:
        weights: one number for each sample of the dataset, 0 or more.
        length: number of samples in an epoch; None: the number of weights.

    Raises:
        UsageError: if a weight is negative, NaN or infinite, or all are 0.
    """

    def __init__(self, weights: Tensor | Sequence[float], length: int | None = None) -> None:
        each = torch.as_tensor(weights, dtype=torch.float64, device="cpu").flatten()
        wrong = ((each < 0) | ~each.isfinite()).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise UsageError(f"samplers.Weighted: weight {place} is {float(each[place]):g}, not a number of 0 or more.")
        self._length = len(each) if length is None else length
        self._bounds = each.cumsum(0)
        if not len(each) or not self._bounds[-1] > 0:
            raise UsageError("samplers.Weighted: no weight is above 0.")
        # Rounding may bring a number up to the sum itself; it then means the last sample with a weight above 0.
        self._last = int(each.nonzero()[-1])

    def __len__(self) -> int:
        return self._length

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        drawn = uniform(positions, "weighted", seed, epoch) * self._bounds[-1]
        return torch.searchsorted(self._bounds, drawn, right=True).clamp_(max=self._last)


class ByLength:
    """Each sample once per epoch, in groups of samples of similar length, so that little padding is needed.

    The samples are shuffled and cut into pools of 50 groups, but at least four pools; each pool is sorted by length and
    cut into groups; the groups are shuffled. Samples that do not fill a group come last. The order of one epoch is held
    in memory: 8 bytes per sample.

    Args:
        lengths: length of each sample of the dataset, as integers.
        group: number of samples in a group; give the micro-batch size if the global batch is a multiple of it.

    Raises:
        UsageError: if ``lengths`` is empty, or ``group`` is less than 1.
    """

    def __init__(self, lengths: Tensor | Sequence[int], group: int) -> None:
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").flatten()
        if group < 1 or not len(self._lengths):
            raise UsageError(
                f"samplers.ByLength got {len(self._lengths)} lengths and group={group}.",
                "Give at least 1 length, and a group of 1 or more.",
            )
        self._group = group
        self._held: tuple[int, int] | None = None
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        if self._held != (seed, epoch):
            self._order = self._ordered(seed, epoch)
            self._held = (seed, epoch)
        return self._order[positions]

    def _ordered(self, seed: int, epoch: int) -> Tensor:
        places = torch.arange(len(self._lengths), device="cpu")
        shuffled = Permutation(len(self._lengths), "by length", seed, epoch)[places]
        whole = len(shuffled) // self._group
        head, tail = shuffled[: whole * self._group], shuffled[whole * self._group :]
        if not whole:
            return tail
        # By length first, then stably by pool: sorted by length within each pool.
        by_length = self._lengths[head].argsort(stable=True)
        pools = by_length.div(max(1, min(50, whole // 4)) * self._group, rounding_mode="floor")
        groups = head[by_length[pools.argsort(stable=True)]].view(whole, self._group)
        mixed = Permutation(whole, "groups", seed, epoch)[torch.arange(whole, device="cpu")]
        return torch.cat([groups[mixed].flatten(), tail])
