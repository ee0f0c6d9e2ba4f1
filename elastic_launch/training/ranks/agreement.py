"""What all ranks must learn at the same step boundary: that somebody wants to stop, that a checkpoint is due.

At each boundary every rank posts its wishes, without waiting, and reads the sum of those that were posted at the one
before: all act on a wish after the same step, one step late, and none waits for another more than training does anyway.

In a loop over steps the wishes of a boundary travel with the losses of the next step, which cross the ranks anyway: a
collective of their own would cost as much as all else that a small step has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_launch.training.ranks.world import GROUP_TIMEOUT
from elastic_launch.training.stopping import Stop

__all__ = ["NOTHING", "Agreement", "Wishes"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one rank, or after an exchange any rank, wants.

    Attributes:
        save: a durable checkpoint.
        keep: a snapshot in memory.
        compare: a comparison of the ranks' states, see :mod:`elastic_launch.training.ranks.replicas`.
        checksum: of this rank's state; all ranks post one at the same boundaries, None at the others.
        differs: after an exchange, whether the ranks' checksums did.
    """

    stop: Stop = Stop.NO
    save: bool = False
    keep: bool = False
    compare: bool = False
    checksum: int | None = None
    differs: bool = False

    def __or__(self, other: Wishes) -> Wishes:
        """Return what either wants; a checksum is the other's."""
        return Wishes(
            max(self.stop, other.stop),
            self.save or other.save,
            self.keep or other.keep,
            self.compare or other.compare,
            other.checksum,
            self.differs or other.differs,
        )

    def counts(self) -> list[float]:
        """Return numbers whose sums over the ranks say what any of them wants; the checksum is not in them."""
        stop = self.stop
        return [*(float(stop >= level) for level in _STOPS), float(self.save), float(self.keep), float(self.compare)]

    @staticmethod
    def of_counts(counts: Sequence[float]) -> Wishes:
        """Return what any rank wants, from the sums of what :meth:`counts` returned."""
        *levels, save, keep, compare = (count > 0 for count in counts)
        return Wishes(Stop(sum(levels)), save, keep, compare)


_STOPS = [stop for stop in Stop if stop is not Stop.NO]
_NO_COUNTS = Wishes().counts()

NOTHING = Wishes()
"""No wish: the object itself, as most boundaries have none."""


class Agreement:
    """Exchanges wishes over a process group of its own.

    On the training's group, where collectives are matched by their order alone, another order on one rank would mix
    them up with gradients.

    Args:
        world_size: at 1 a wish counts at once, and there is no group.
        timeout: of the group, in seconds.
    """

    def __init__(self, world_size: int, timeout: float = GROUP_TIMEOUT) -> None:
        limit = timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=limit) if world_size > 1 else None
        self._posted: tuple[torch.Tensor, dist.Work] | None = None
        self._leaving = self._arrived = NOTHING

    def exchange(self, wishes: Wishes) -> Wishes:
        """Post wishes, and return what any rank had posted the time before; called by all ranks equally often."""
        if self.group is None:
            return wishes
        agreed = self.settle()
        # What waits for the next step's losses goes along.
        wishes, self._leaving = self._leaving | wishes, NOTHING
        self._post(wishes, wishes.checksum)
        return agreed

    def exchange_by_step(self, wishes: Wishes) -> Wishes:
        """Do as :meth:`exchange`, but for the posting: wishes go with the next step's losses.

        A checksum, which is rare, is posted at once.
        """
        if self.group is None:
            return wishes
        agreed = self.settle()
        if wishes is not NOTHING:
            self._leaving |= wishes
            if wishes.checksum is not None:
                self._post(NOTHING, wishes.checksum)
        return agreed

    def leave(self) -> list[float]:
        """Return, as numbers to be added up over the ranks, the wishes that go with a step's losses."""
        # They are kept until they have arrived: the step may be given up.
        return _NO_COUNTS if self._leaving is NOTHING else self._leaving.counts()

    def arrive(self, sums: Sequence[float]) -> None:
        """Take in the sums over the ranks of what they returned from :meth:`leave`."""
        self._leaving = NOTHING
        if any(sums):
            self._arrived |= Wishes.of_counts(sums)

    def _post(self, wishes: Wishes, checksum: int | None) -> None:
        number = 0 if checksum is None else checksum
        numbers = torch.tensor([wishes.stop, wishes.save, wishes.keep, wishes.compare, number, ~number])
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        self._posted = numbers, work

    def settle(self) -> Wishes:
        """Wait for what was posted last, as must be done before the group ends, and return all that came."""
        agreed, self._arrived = self._arrived, NOTHING
        if self._posted is None:
            return agreed
        (numbers, work), self._posted = self._posted, None
        work.wait()
        stop, save, keep, compare, most, most_inverted = numbers.tolist()
        # The greatest of the inverted ones is the least one's.
        return agreed | Wishes(Stop(stop), bool(save), bool(keep), bool(compare), differs=most != ~most_inverted)
