"""The arithmetic of the global batch: pure, no torch.

The unit of work is the micro-batch. A global batch of G samples is a list of M = ceil(G / micro) micro-batches, the
same list at every world size; a rank takes a contiguous slice of it, and the slice's length is the rank's number of
accumulation steps. Fewer ranks mean longer slices and the same training, which Composer calls space-time equivalence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_launch.errors import UsageError


class BatchError(UsageError, ValueError):
    """An invalid global batch, world or rank."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        index: its position in the global batch, 0 to M - 1, independent of the rank that computes it.
        start, stop: its samples, as positions in the global batch.
    """

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One rank's share of one global batch.

    Attributes:
        micro_batches: the rank's micro-batches, in order; empty on an idle rank.
        total: M, the number of micro-batches of all ranks.
        weights: for each of the rank's micro-batches, its samples / the global batch's samples. The sum over all ranks
            of weight times mean loss is the mean loss over the global batch.
    """

    micro_batches: tuple[MicroBatch, ...]
    total: int
    weights: tuple[float, ...]

    @property
    def grad_accum(self) -> int:
        """Number of the rank's micro-batches, which may differ between ranks."""
        return len(self.micro_batches)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A global batch of ``size`` samples, processed ``micro`` samples at a time.

    Args:
        size: G, samples in each optimizer step over all ranks, 1 or more.
        micro: samples in each forward and backward pass, 1 to G; or ``"auto"``, to let a trainer determine how many fit
            into memory.

    Raises:
        BatchError: naming the field; also raised by methods that need the micro-batches while ``"auto"`` is unresolved.
    """

    size: int
    micro: int | Literal["auto"]

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise BatchError(
                f"GlobalBatch(size={self.size!r}): a global batch holds a whole number of samples, 1 or more."
            )
        if self.micro != "auto" and (not isinstance(self.micro, int) or not 1 <= self.micro <= self.size):
            raise BatchError(
                f"GlobalBatch(size={self.size}, micro={self.micro!r}): a micro-batch holds 1 to {self.size} samples, "
                'or "auto".'
            )

    @property
    def _each(self) -> int:
        """Return the number of samples in each micro-batch except the last."""
        if self.micro == "auto":
            raise BatchError(
                f'GlobalBatch(size={self.size}, micro="auto"): only el.Trainer finds out how many samples fit; '
                "give micro a number."
            )
        return self.micro

    def micro_batches(self, samples: int | None = None) -> tuple[MicroBatch, ...]:
        """Return all micro-batches of a global batch, or of a short last one with ``samples`` samples."""
        count = self._count(samples)
        return self._cut(0, self._parts(count), count)

    def plan(self, world_size: int, rank: int, samples: int | None = None) -> BatchPlan:
        """Return a rank's share.

        Args:
            samples: samples in this batch if it is a short last one, else None.

        Raises:
            BatchError: if the rank or the number of samples is invalid.
        """
        count = self._count(samples)
        total = self._parts(count)
        mine = self._cut(*slice_of(total, world_size, rank), count)
        return BatchPlan(mine, total, tuple(len(micro) / count for micro in mine))

    def idle_ranks(self, world_size: int) -> int:
        """Return how many ranks have no micro-batch in a full global batch."""
        return max(0, world_size - self._parts(self.size))

    def micro_for(self, world_size: int) -> int | None:
        """Return the largest micro-batch size that gives every rank work; None if there are more ranks than samples."""
        if world_size > self.size:
            return None
        # ceil(G / micro) >= W holds exactly for micro <= (G - 1) / (W - 1).
        return self.size if world_size == 1 else (self.size - 1) // (world_size - 1)

    def _parts(self, count: int) -> int:
        """Return the number of micro-batches of ``count`` samples."""
        return -(-count // self._each)

    def _cut(self, first: int, last: int, count: int) -> tuple[MicroBatch, ...]:
        """Return the micro-batches from ``first`` up to but excluding ``last``, of ``count`` samples."""
        each = self._each
        return tuple(MicroBatch(i, i * each, min((i + 1) * each, count)) for i in range(first, last))

    def _count(self, samples: int | None) -> int:
        count = self.size if samples is None else samples
        if not 1 <= count <= self.size:
            raise BatchError(f"samples={count}: a global batch of size {self.size} holds 1 to {self.size} samples.")
        return count


def slice_of(items: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the half-open range of items that a rank takes.

    Ranges are contiguous, in rank order, differ by at most 1 in length, and start at floor(rank * items / world_size).
    If world_size divides items, they are equal, and aligned in the reduction's tree if their length is a power of 2.

    Raises:
        BatchError: if the rank is invalid.
    """
    if not 0 <= rank < world_size:
        raise BatchError(f"rank={rank}: a world of {world_size} has the ranks 0 to {world_size - 1}.")
    return rank * items // world_size, (rank + 1) * items // world_size


def settled(batch: GlobalBatch, world_size: int) -> GlobalBatch:
    """Return a batch with the initial micro-batches of ``"auto"``, one for each rank; itself if it has a size."""
    return GlobalBatch(batch.size, -(-batch.size // world_size)) if batch.micro == "auto" else batch


def halved(batch: GlobalBatch) -> GlobalBatch:
    """Return a batch with micro-batches of half the size, rounded up.

    Raises:
        BatchError: if they have only 1 sample.
    """
    if batch._each == 1:
        raise BatchError(f"GlobalBatch(size={batch.size}, micro=1): a micro-batch of 1 sample cannot be halved.")
    return GlobalBatch(batch.size, -(-batch._each // 2))
