"""Decisions that all ranks take at the same step boundary: for example to stop, or to make a checkpoint.

At each boundary, every rank posts its wishes without waiting, and reads the sum of the wishes posted at the previous
boundary. All ranks therefore act on a wish after the same step, one step late, and no rank waits for another more than
training does anyway.

In a loop over steps, the wishes of a boundary are sent together with the losses of the next step, which are exchanged
anyway: a separate collective would cost as much as everything else in a small step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_launch.training.live.waits import wait_for
from elastic_launch.training.ranks.world import GROUP_TIMEOUT
from elastic_launch.training.stopping import StopSource


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one rank wants or, after an exchange, what any rank wants."""

    stop: StopSource = StopSource.NO  # who requested a stop
    save: bool = False  # make a durable checkpoint
    keep: bool = False  # take a snapshot in memory
    evaluate: bool = False  # after the next step
    compare: bool = False  # compare the ranks' states, see `replicas`
    late: bool = False  # this rank has registered something late, or has not yet, see `late`
    choose: bool = False  # choose another rank to decide when snapshots are taken
    checksum: int | None = None  # of this rank's state; all ranks post one at the same boundaries
    differs: bool = False  # after an exchange, whether the ranks' checksums differed

    def __or__(self, other: Wishes) -> Wishes:
        """Return the union of both; the checksum is the other's."""
        both = Wishes.of_counts([*map(max, self.counts(), other.counts())])
        return replace(both, checksum=other.checksum, differs=self.differs or other.differs)

    def counts(self) -> list[float]:
        """Return numbers of which sum or maximum over the ranks show what any wants; the checksum is not included."""
        levels = [self.stop >= level for level in _STOPS]
        return [*map(float, (*levels, self.save, self.keep, self.evaluate, self.compare, self.late, self.choose))]

    @staticmethod
    def of_counts(counts: Sequence[float]) -> Wishes:
        """Return what any rank wants, from the sums or maxima over the ranks of :meth:`counts`."""
        *levels, save, keep, evaluate, compare, late, choose = (count > 0 for count in counts)
        return Wishes(StopSource(sum(levels)), save, keep, evaluate, compare, late, choose)


_STOPS = [stop for stop in StopSource if stop is not StopSource.NO]
_NO_COUNTS = Wishes().counts()

NOTHING = Wishes()
"""No wishes; compared by identity, since most boundaries have none."""


class Agreement:
    """Exchanges wishes over its own process group.

    A group matches collectives only by their order: on the training's group, a different order on one rank would mix
    them up with gradients.

    Args:
        world_size: number of ranks; with 1, a wish takes effect at once, and there is no group.
        forming: the group is formed within this context at its first use, which all ranks make at the same boundary,
            so that the ranks of a new round do not wait for it; None: it is formed at once.
    """

    def __init__(
        self,
        world_size: int,
        timeout: float = GROUP_TIMEOUT,
        *,
        forming: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._alone = world_size == 1
        self._timeout = timedelta(seconds=timeout)
        self._forming = forming
        self._group: dist.ProcessGroup | None = None
        if not self._alone and forming is None:
            self._group = self._new_group()
        self._posted: tuple[torch.Tensor, dist.Work] | None = None
        self._leaving = self._arrived = NOTHING

    def _new_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        return group

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, formed if it is not yet; there is none in a world of one rank."""
        if self._group is None:
            assert self._forming is not None
            assert not self._alone
            with self._forming():
                self._group = self._new_group()
        return self._group

    def exchange(self, wishes: Wishes) -> Wishes:
        """Post wishes, and return what any rank posted the previous time; called by all ranks equally often."""
        if self._alone:
            return wishes
        agreed = self.settle()
        # Wishes waiting for the next step's losses are sent too.
        wishes, self._leaving = self._leaving | wishes, NOTHING
        self._post(wishes)
        return agreed

    def exchange_by_step(self, wishes: Wishes) -> Wishes:
        """Like :meth:`exchange`, but wishes are sent together with the next step's losses.

        A checksum, which is rare, is posted at once.
        """
        if self._alone:
            return wishes
        agreed = self.settle()
        if wishes is not NOTHING:
            self._leaving |= wishes
            if wishes.checksum is not None:
                self._post(Wishes(checksum=wishes.checksum))
        return agreed

    def leave(self) -> list[float]:
        """Return the wishes to send with a step's losses, as numbers to be summed over the ranks."""
        # They are kept until they have arrived, since the step may be given up.
        return _NO_COUNTS if self._leaving is NOTHING else self._leaving.counts()

    def arrive(self, sums: Sequence[float]) -> None:
        """Receive the sums over the ranks of the results of :meth:`leave`."""
        self._leaving = NOTHING
        if any(sums):
            self._arrived |= Wishes.of_counts(sums)

    def _post(self, wishes: Wishes) -> None:
        number = wishes.checksum or 0
        numbers = torch.tensor([*map(int, wishes.counts()), number, ~number], device="cpu")
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None
        self._posted = numbers, work

    def give_up(self) -> None:
        """Wait for a post that fails, so that nothing refers to the process group any more."""
        with suppress(RuntimeError):
            self.settle()
        self._posted = self._group = None

    def settle(self) -> Wishes:
        """Wait for the last post, which is required before the group ends, and return everything received."""
        agreed, self._arrived = self._arrived, NOTHING
        if self._posted is None:
            return agreed
        (numbers, work), self._posted = self._posted, None
        wait_for(work)
        *counts, most, most_inverted = numbers.tolist()
        # The maximum of the inverted checksums is the inverted minimum.
        return agreed | replace(Wishes.of_counts(counts), differs=most != ~most_inverted)
