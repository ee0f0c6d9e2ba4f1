"""The restart budget: what a broken round costs, when the next one may form, and whether the run ends with it."""

from __future__ import annotations

import zlib
from typing import Any

from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import FailsAgain, NoNewStep, NotRestarted, RestartsSpent
from elastic_launch.failure import Failure, Mistake
from elastic_launch.rendezvous.leader.phases import Broken, BudgetDecision, highest
from elastic_launch.rendezvous.leader.verdict import Kind, disconnected, exit_code, identity, judge, killed, root_cause
from elastic_launch.rendezvous.record import ControlRecord

__all__ = ["EARLY", "FREE", "LONG", "BudgetDecision", "RestartBudget"]

FREE = 3
"""Consecutive restarts without progress that are free; plus one for each node that the run may have."""

LONG = 60.0
"""Seconds from which a round counts as progress if its script does not report steps."""

EARLY = 10.0
"""Seconds within which a failure without a step counts as soon; the second such failure in a row, and later ones,
delay the next round."""

LONGEST_DELAY = 30.0
"""Longest delay of the next round, in seconds."""

JITTER = 0.25
"""Largest relative change of a delay, so that runs that failed together do not all try again at the same moment."""


class RestartBudget:
    """Counts restarts, and goes on from the counts in a record.

    Attributes:
        spent: restarts charged so far; it never decreases.
        refilled: restarts given back so far.
        idle: consecutive free restarts without progress.
        mark: the highest step at which a round began to train; None if unknown.
        soon: consecutive failures soon after the start.
        vain: consecutive restarts since the last new step.
        best: the highest step that was reached; None if unknown.
    """

    def __init__(self, record: ControlRecord) -> None:
        self.spent = record.restarts
        self.refilled = record.refilled
        self.idle = record.idle
        self.mark = record.last_step
        self.soon = record.soon
        self.vain = record.vain
        self.best = highest(record.best, record.last_step)
        self._limits = record.limits
        self._run = record.run  # whose delays differ from those of others
        self._healthy = record.healthy  # seconds of rounds with new steps since a restart was last given back
        self._repeats = record.repeats  # the last failure that a restart may repeat; empty for none
        self._repeats_step = record.repeats_step  # the steps done before it

    @property
    def recorded(self) -> dict[str, Any]:
        """The fields of the record with which another leader continues these counts."""
        return {
            "restarts": self.spent,
            "refilled": self.refilled,
            "idle": self.idle,
            "last_step": self.mark,
            "soon": self.soon,
            "vain": self.vain,
            "best": self.best,
            "healthy": round(self._healthy, 3),
            "repeats": self._repeats,
            "repeats_step": self._repeats_step,
        }

    @property
    def allowed(self) -> int:
        """Restarts that may be charged in all: ``--max-restarts``, and those given back."""
        return self._limits.max_restarts + self.refilled

    def allowed_after(self, broken: Broken) -> int:
        """What :attr:`allowed` would be if the round that trains ended in this way."""
        advanced = self._advanced(highest(broken.begun, broken.reached), broken.lasted)
        return self.allowed + (self._due(self._healthy + broken.lasted) if advanced else 0)

    def learn(self, spent: int) -> None:
        """Take over the number of restarts from a node that knows more; those beyond the limit had been given back."""
        self.spent = max(self.spent, spent)
        if self._limits.restart_refill:
            self.refilled = max(self.refilled, self.spent - self._limits.max_restarts)

    def rule(self, broken: Broken, nodes: int = 1, *, alone: bool = False) -> BudgetDecision:
        """Judge a broken round and charge it; a charge is one restart, however many workers failed.

        Args:
            nodes: the number of nodes that the run may have.
            alone: whether all that failed, in the last fault too, is on one node without which the run can go on.
        """
        kind = judge(broken.imposed, broken.failures)
        failure = root_cause(broken.failures)
        gained = self._gained(broken)
        if gained:
            self.idle = 0
            self.mark = broken.begun
        self._refill(broken, failure, restarted=kind is not Kind.MEMBERSHIP)
        if kind is Kind.MEMBERSHIP:
            return BudgetDecision(kind)
        if kind.is_final:
            return self.end(kind)
        if broken.imposed is None and failure is not None and (twice := self._repeated(failure, broken, alone=alone)):
            return BudgetDecision(Kind.FATAL, ends=twice)
        most_vain, tried = self._limits.max_idle_restarts, self.vain - 1  # without the one that would follow
        if most_vain and tried >= most_vain:
            return BudgetDecision(kind, idle=tried, ends=NoNewStep(tried, most_vain))
        idle = 0
        if disconnected(broken.imposed, broken.failures) or not kind.costs:
            self.idle += not gained
            if self.idle <= FREE + nodes:
                return BudgetDecision(kind)
            idle = self.idle
        if self.spent >= self.allowed:
            spent = RestartsSpent(self._limits.max_restarts, self.refilled, idle)
            return BudgetDecision(kind, idle=idle, ends=spent)
        self.spent += 1
        self.soon = self.soon + 1 if failure is not None and _failed_soon(failure) else 0
        return BudgetDecision(kind, charged=True, idle=idle, delay=self._delay())

    def _delay(self) -> float:
        if self.soon < 2:
            return 0.0
        even = min(2.0 ** min(self.soon - 2, 10), LONGEST_DELAY)
        unit = zlib.crc32(f"{self._run} {self.spent}".encode()) / 2**32
        return float(round(even * (1 + JITTER * (2 * unit - 1)), 3))

    def _refill(self, broken: Broken, failure: Failure | None, *, restarted: bool) -> None:
        """Count a round that has ended: give restarts back for time in which the training advanced.

        Args:
            restarted: whether the next round is a restart, and not a resize.
        """
        failed_at = (broken.begun or 0) + failure.trained if failure is not None and failure.trained else None
        reached = highest(broken.begun, broken.reached, failed_at)
        advanced = self._advanced(reached, broken.lasted)
        self.best = highest(self.best, reached)
        self.vain = (0 if advanced else self.vain) + restarted
        every = self._limits.restart_refill
        if not every or not advanced:
            return
        self._healthy += broken.lasted
        back = self._due(self._healthy)
        self.refilled += back
        self._healthy = self._healthy - back * every if self.spent > self.refilled else 0.0

    def _advanced(self, reached: int | None, lasted: float) -> bool:
        """Whether a round has reached a new step; a script that reports none is believed to if it runs for long."""
        if reached is None:
            return self.best is None and lasted >= LONG
        return self.best is None or reached > self.best

    def _due(self, healthy: float) -> int:
        """How many restarts are given back for seconds of rounds with new steps; no more than were charged."""
        every = self._limits.restart_refill
        return min(int(healthy // every), self.spent - self.refilled) if every else 0

    def end(self, kind: Kind) -> BudgetDecision:
        """Return the decision for a failure after which a restart cannot help."""
        return BudgetDecision(kind, ends=FailsAgain(told=kind is Kind.FATAL))

    def verdict(self, ruling: BudgetDecision, broken: Broken) -> tuple[int, NotRestarted]:
        """Return the exit code and the cause, as known so far, of a run that ends by a decision."""
        assert ruling.ends is not None
        cause = NotRestarted(ruling.ends, broken.cause)
        if ruling.kind is Kind.FATAL:
            return ExitCode.DO_NOT_RETRY, cause
        if ruling.idle:
            return ExitCode.NO_PROGRESS, cause
        most = self._limits.max_restarts
        if ruling.kind is Kind.STARTUP and most:
            return ExitCode.STARTUP_FAILURE, cause
        return exit_code(root_cause(broken.failures), most), cause

    def spares(self, broken: Broken, nodes: int) -> bool:
        """Whether a round that was broken for an event on its nodes is free; see :meth:`rule`."""
        return broken.imposed is Kind.MEMBERSHIP or self._gained(broken) or self.idle < FREE + nodes

    def _repeated(self, failure: Failure, broken: Broken, *, alone: bool) -> FailsAgain | None:
        """Return what has failed twice without a new step; None if nothing has.

        A single failure with the same numbers may be a flipped bit.
        """
        before, reached = self._repeats, (broken.begun or 0) + (failure.trained or 0)
        mistake = self._early_mistake(failure, broken)
        same = failure.repeats or (f"{mistake.exception} at {mistake.frame}" if mistake else "")
        found = identity(same) if same else ""
        if found or reached > self._repeats_step:
            self._repeats, self._repeats_step = found, reached
        if not found or found != before:
            return None
        if failure.repeats:
            return FailsAgain(same_step=True)
        # Without restarts left, the budget ends the run anyway.
        return None if alone or self.spent >= self.allowed else FailsAgain(mistake=mistake)

    def _early_mistake(self, failure: Failure, broken: Broken) -> Mistake | None:
        """Return the script's mistake, if no step was done and this is the run's first or second fault.

        A script that reports no steps is believed to have done none if it fails soon.
        """
        mistake, begun = failure.mistake, broken.begun
        knows = begun is not None or failure.trained is not None
        done = failure.trained or (broken.reached or 0) > (begun or 0) or (not knows and failure.ran >= LONG)
        if mistake is None or done or self.spent > 1 or self.vain != self.spent + 1:
            return None
        return mistake

    def _gained(self, broken: Broken) -> bool:
        """Whether the training advances: the round began at a higher step than any before."""
        if broken.begun is None:
            return self.mark is None and broken.lasted >= LONG
        return self.mark is None or broken.begun > self.mark


def _failed_soon(failure: Failure) -> bool:
    """Whether a worker failed soon after its start and may do so again; SIGKILL comes from outside."""
    return failure.ran <= EARLY and not failure.trained and not killed(failure)
