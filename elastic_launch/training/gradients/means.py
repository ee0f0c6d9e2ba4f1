"""Means over the micro-batches of all ranks, to the same bits at every world size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.errors import UsageError

__all__ = ["MOST_CARGO", "MeanTable", "Means", "cargo_size"]

_MARK, _SIGNATURE, _WHOLE, _HEAD = 0, 1, 2, 3
_SIZE = 8  # bytes of a number
_FLAGS = 2  # of each rank, in the cargo: that its parameters have changed, that they have not

MOST_CARGO = 1 << 16
"""Elements of a table that go with others: a longer one goes by itself, in an eighth of the bytes."""


def cargo_size(rows: int, columns: int, carried: int) -> int:
    """Return the length of :attr:`MeanTable.cargo`; 0 if it is too long to go with others.

    Args:
        carried: how many further numbers there are.
    """
    size = _FLAGS + carried + _SIZE * rows * (columns + 2)
    return size if size <= MOST_CARGO else 0


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the global batch.

    Attributes:
        values: one for each column.
        correction: what gradients must be multiplied by: samples / sum of the weights, 1 without weights.
    """

    values: list[float]
    correction: float


class MeanTable:
    """A row for each micro-batch of all ranks, of which each rank fills in its own.

    All others are zero, so that adding the ranks' tables is exact, and every rank then sums the rows in the same order.
    A table crosses the ranks by itself, or as the cargo of other values that are added up over them.

    Attributes:
        any_changed, all_changed: whether any rank, and whether each, has said in the cargo that its parameters have
            changed.

    Args:
        rows: number of micro-batches.
        columns: number of values in each.
        carried: further numbers that are added up over the ranks, see :attr:`carried`.
    """

    def __init__(self, rows: int, columns: int, carried: Sequence[float] = ()) -> None:
        # First whether it is marked, the ranks' signatures, and how many have all gradients; in each row, beside the
        # values, the weight and whether it was given. Plain numbers: most tables are small, and calls of torch cost.
        self.any_changed = self.all_changed = False
        self._width = columns + 2
        self._end = _HEAD + rows * self._width
        self._numbers = array("d", bytes(_SIZE * self._end))
        self._numbers.extend(carried)
        self._world_size = 1
        self._signature = 0
        self._work: dist.Work | None = None

    def fill(self, row: int, values: Sequence[float | Tensor], share: float, weight: float | None = None) -> None:
        """Fill in a row.

        Args:
            share: the row's weight unless one is given.
        """
        start = _HEAD + row * self._width
        for place, value in enumerate(values, start):
            self._numbers[place] = float(value)
        self._numbers[start + self._width - 2] = float(share if weight is None else weight)
        self._numbers[start + self._width - 1] = float(weight is not None)

    def mark(self) -> None:
        """Mark the table, for all ranks to see."""
        self._numbers[_MARK] = 1.0

    def sign(self, signature: int) -> None:
        """Sign it with a number, of 40 bits at most, that should be the same on all ranks."""
        self._signature = signature
        self._numbers[_SIGNATURE] = float(signature)

    def whole(self) -> None:
        """Note that this rank has a gradient of each parameter."""
        self._numbers[_WHOLE] = 1.0

    @property
    def any_whole(self) -> bool:
        """Whether any rank has noted that."""
        return self._numbers[_WHOLE] > 0

    def post(self, world_size: int) -> None:
        """Begin to give every rank what all have filled in; :meth:`wait` before anything is read."""
        self._world_size = world_size
        if world_size > 1:
            # A view: the sums come where the numbers were.
            self._work = dist.all_reduce(torch.frombuffer(self._numbers, dtype=torch.float64), async_op=True)

    def wait(self) -> None:
        """Wait for what was posted."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def cargo(self, *, changed: bool) -> Tensor:
        """Return rows and further numbers, 0 or 1 each, as small integers: their sums are exact in every dtype.

        A row's bytes are zero on all ranks but one.
        """
        flags = bytearray([changed, not changed, *map(int, self.carried)])
        rows = memoryview(self._numbers)[_HEAD : self._end].cast("B")
        return torch.frombuffer(flags + rows, dtype=torch.uint8)

    def unload(self, sums: Tensor) -> None:
        """Take in the sums over the ranks of what they returned from :meth:`cargo`."""
        flags = _FLAGS + len(self._numbers) - self._end
        # So many ranks may have set one that its sum is rounded.
        changed, unchanged, *carried = sums[:flags].tolist()
        self.any_changed, self.all_changed = changed > 0, unchanged == 0
        self._numbers[self._end :] = array("d", carried)
        size = _SIZE * (self._end - _HEAD)
        rows = torch.frombuffer(self._numbers, dtype=torch.uint8, offset=_SIZE * _HEAD, count=size)
        rows.copy_(sums[flags : flags + size])

    @property
    def carried(self) -> Sequence[float]:
        """The sums over the ranks of the further numbers."""
        return self._numbers[self._end :]

    @property
    def marked(self) -> bool:
        return self._numbers[_MARK] > 0

    @property
    def agreed(self) -> bool:
        """Whether all ranks have signed with the same number."""
        return int(self._numbers[_SIGNATURE]) == self._world_size * self._signature

    def not_finite(self) -> int | None:
        """Return the first row whose first value is not finite, if any."""
        return next((row for row, value in enumerate(self._column(0)) if not math.isfinite(value)), None)

    def value(self, row: int) -> float:
        """Return a row's first value."""
        return self._column(0)[row]

    def means(self, samples: int, where: str) -> Means:
        """Return the means of the columns.

        Args:
            samples: in the global batch.
            where: for errors.

        Raises:
            UsageError: if some rows were given a weight and others not, or the weights sum up to nothing.
        """
        weights, given = self._column(self._width - 2), int(sum(self._column(self._width - 1)))
        if given not in (0, len(weights)):
            raise UsageError(f"{where}: step.backward() got a weight for some micro-batches only.", "Give it for all.")
        total = sum(weights)
        if not total > 0:
            raise UsageError(f"{where}: the weights sum up to {total:g}.", "Give positive ones.")
        sums = [
            sum(value * weight for value, weight in zip(self._column(column), weights, strict=True))
            for column in range(self._width - 2)
        ]
        return Means([value / total for value in sums], samples / total if given else 1.0)

    def _column(self, number: int) -> Sequence[float]:
        return self._numbers[_HEAD + number : self._end : self._width]
