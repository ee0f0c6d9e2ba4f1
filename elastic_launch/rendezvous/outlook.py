"""What comes next in a run, in words for people."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.config import Limits

__all__ = ["Outlook"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a run at one moment.

    Attributes:
        waiting: nodes without workers that do not leave. Whoever still stops its workers for a broken round counts:
            it will be there for the next one.
        members: nodes with workers.
        ended, running, broken, draining: of the run; of its present round.
        pays: whether a resize for those who wait would pay.
    """

    limits: Limits
    join_settle: float
    waiting: int
    members: int
    ended: bool
    running: bool
    broken: bool
    draining: bool
    pays: bool = True

    def __str__(self) -> str:
        if self.ended:
            return "the run has ended"
        if self.draining:
            return "a round with it follows"
        if self.running:
            return self._while_running()
        if self.waiting >= self.limits.max_nodes:
            return "a round forms"
        if self.waiting < self.limits.min_nodes:
            return f"waiting for nodes: {self.waiting} of at least {self.limits.min_nodes}"
        if self.broken:
            return "a new round forms"
        most, settle = self.limits.max_nodes, self.join_settle
        return f"the first round forms at {most} nodes or {settle:g} s without an arrival"

    def _while_running(self) -> str:
        if not self.waiting:
            return "training goes on"
        if self.members < self.limits.max_nodes:
            return "training is resized" if self.pays else "the run ends before a resize pays"
        return f"round is full, {self.waiting} spare"
