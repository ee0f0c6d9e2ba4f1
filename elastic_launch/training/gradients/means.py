"""Means over the micro-batches of all ranks, bitwise equal at every world size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.errors import UsageError
from elastic_launch.training.live.waits import wait_for

_MARK, _SIGNATURE, _WHOLE, _HEAD = 0, 1, 2, 3

_SIZE = 8
"""Bytes of a number."""

_FLAGS = 2
"""Number of flags of each rank in the cargo: its parameters have changed; they have not."""

MOST_CARGO = 1 << 16
"""Maximum length of a table sent as cargo; a longer table is sent separately, in an eighth of the bytes."""


def cargo_size(rows: int, columns: int, carried: int) -> int:
    """Return the length of :attr:`MeanTable.cargo`; 0 if it is too long to be sent with other values."""
    size = _FLAGS + carried + _SIZE * rows * (columns + 2)
    return size if size <= MOST_CARGO else 0


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the global batch."""

    values: list[float]  # one mean for each column
    correction: float  # factor for the gradients: samples / sum of the weights; 1 without weights, 0 if all are 0


class MeanTable:
    """A table with a row for each micro-batch of all ranks; each rank fills in its own rows.

    All other rows are zero, so that adding the ranks' tables is exact; every rank then sums the rows in the same order.
    A table is exchanged separately, or as the cargo of other values that are summed over the ranks.

    Args:
        carried: further numbers to be summed over the ranks, see :attr:`carried`.
        signature: a number of at most 40 bits that should be the same on all ranks.
        marked: whether to mark the table; all ranks see the mark.
        whole: whether this rank has a gradient of each parameter.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        carried: Sequence[float] = (),
        *,
        signature: int = 0,
        marked: bool = False,
        whole: bool = False,
    ) -> None:
        # First the mark, the sum of the signatures, and the number of ranks with all gradients. Each row has the
        # values, the weight, and whether it was given. Plain numbers, since most tables are small and torch calls cost.
        self.any_changed = self.all_changed = False  # whether ranks reported in the cargo that parameters have changed
        self._width = columns + 2
        self._end = _HEAD + rows * self._width
        self._numbers = array("d", bytes(_SIZE * self._end))
        self._numbers[:_HEAD] = array("d", [marked, signature, whole])
        self._numbers.extend(carried)
        self._world_size = 1
        self._signature = signature
        self._work: dist.Work | None = None

    def fill(self, row: int, values: Sequence[float | Tensor], share: float, weight: float | None = None) -> None:
        """Fill in a row; with a weight of 0 its values count as 0, even if they are NaN.

        Args:
            share: the row's weight if ``weight`` is None.
            weight: the weight given by the script, if any.
        """
        start = _HEAD + row * self._width
        for place, value in enumerate(values, start):
            self._numbers[place] = 0.0 if weight == 0 else float(value)
        self._numbers[start + self._width - 2] = float(share if weight is None else weight)
        self._numbers[start + self._width - 1] = float(weight is not None)

    @property
    def any_whole(self) -> bool:
        """Whether any rank has a gradient of each parameter."""
        return self._numbers[_WHOLE] > 0

    def post(self, world_size: int) -> None:
        """Start exchanging the rows among all ranks; call :meth:`wait` before reading anything."""
        self._world_size = world_size
        if world_size > 1:
            # A view: the sums replace the numbers.
            self._work = dist.all_reduce(torch.frombuffer(self._numbers, dtype=torch.float64), async_op=True)

    def wait(self) -> None:
        """Wait for the exchange that :meth:`post` started."""
        if self._work is not None:
            wait_for(self._work)
            self._work = None

    def give_up(self) -> None:
        """Wait for an exchange that fails, so that nothing refers to the process group any more."""
        with suppress(RuntimeError):
            self.wait()
        self._work = None

    def cargo(self, *, changed: bool) -> Tensor:
        """Return rows and further numbers, each 0 or 1, as small integers, whose sums are exact in every dtype.

        A row's bytes are zero on all ranks but one.
        """
        flags = bytearray([changed, not changed, *map(int, self.carried)])
        rows = memoryview(self._numbers)[_HEAD : self._end].cast("B")
        return torch.frombuffer(flags + rows, dtype=torch.uint8)

    def unload(self, sums: Tensor) -> None:
        """Receive the sums over the ranks of the results of :meth:`cargo`."""
        flags = _FLAGS + len(self._numbers) - self._end
        # Many ranks may have set a number, so that its sum is rounded.
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
        """Whether all ranks have the same signature."""
        return int(self._numbers[_SIGNATURE]) == self._world_size * self._signature

    def not_finite(self) -> tuple[int, float] | None:
        """Return the first row whose first value is not finite, and that value."""
        return next(((row, value) for row, value in enumerate(self.column(0)) if not math.isfinite(value)), None)

    def means(self, samples: int, where: str) -> Means:
        """Return the means of the columns.

        Raises:
            UsageError: if only some rows were given a weight, or one is negative or not finite.
        """
        weights, given = self.column(self._width - 2), int(sum(self.column(self._width - 1)))
        if given not in (0, len(weights)):
            raise UsageError(f"{where}: step.backward() got a weight for some micro-batches only.", "Give it for all.")
        for micro, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise UsageError(
                    f"{where}: micro-batch {micro} has weight={weight:g}.",
                    "Give step.backward(weight=...) a number of 0 or more, or have weight_fn return one. To subtract a "
                    "loss, negate the loss; a micro-batch with a weight of 0 does not count.",
                )
        total = sum(weights)
        if not total:
            return Means([0.0] * (self._width - 2), 0.0)
        sums = [
            sum(value * weight for value, weight in zip(self.column(column), weights, strict=True))
            for column in range(self._width - 2)
        ]
        return Means([value / total for value in sums], samples / total if given else 1.0)

    def column(self, number: int) -> Sequence[float]:
        """Return the values of a column; after these, the weight and whether it was given are columns, too."""
        return self._numbers[_HEAD + number : self._end : self._width]
