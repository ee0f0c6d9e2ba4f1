"""What all ranks must learn at the same step boundary: that somebody wants to stop, that a checkpoint is due.

At each boundary every rank posts its wishes, without waiting, and reads the sum of those that were posted at the one
before: all act on a wish after the same step, one step late, and none waits for another more than training does anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_launch.training.stopping import Stop
from elastic_launch.training.world import GROUP_TIMEOUT

__all__ = ["Agreement", "Wishes"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one rank, or after an exchange any rank, wants.

    Attributes:
        save: a durable checkpoint.
        keep: a snapshot in memory.
        compare: a comparison of the ranks' states, see :mod:`elastic_launch.training.replicas`.
        checksum: of this rank's state, 0 where all post none.
        differs: after an exchange, whether the ranks' checksums did.
    """

    stop: Stop = Stop.NO
    save: bool = False
    keep: bool = False
    compare: bool = False
    checksum: int = 0
    differs: bool = False


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

    def exchange(self, wishes: Wishes) -> Wishes:
        """Post wishes, and return what any rank had posted the time before; called by all ranks equally often."""
        if self.group is None:
            return wishes
        agreed = self.settle()
        checksum = wishes.checksum
        numbers = torch.tensor([wishes.stop, wishes.save, wishes.keep, wishes.compare, checksum, ~checksum])
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        self._posted = numbers, work
        return agreed

    def settle(self) -> Wishes:
        """Wait for what was posted last, as must be done before the group ends, and return it."""
        if self._posted is None:
            return Wishes()
        (numbers, work), self._posted = self._posted, None
        work.wait()
        stop, save, keep, compare, most, most_inverted = numbers.tolist()
        # The greatest of the inverted ones is the least one's.
        return Wishes(Stop(stop), bool(save), bool(keep), bool(compare), differs=most != ~most_inverted)
