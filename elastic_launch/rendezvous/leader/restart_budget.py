"""The restart budget: what a broken round costs, when the next one may form, and whether the run ends with it."""

from __future__ import annotations

import signal

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.leader.phases import Broken, BudgetDecision
from elastic_launch.rendezvous.leader.verdict import Kind, exit_code, judge, root_cause
from elastic_launch.rendezvous.wire.messages import Failure

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


class RestartBudget:
    """Counts restarts.

    Args:
        spent: restarts charged so far.
        most: restarts that are allowed.
        idle: consecutive restarts without progress.
        mark: the highest step at which a round began to train; None if unknown.
    """

    def __init__(self, spent: int, most: int, idle: int = 0, mark: int | None = None) -> None:
        self.spent = spent
        self.idle = idle
        self.mark = mark
        self._most = most
        self._soon = 0  # consecutive failures soon after the start
        self._repeats, self._reached = "", 0  # the last failure that a restart may repeat, and the steps done before it

    def rule(self, broken: Broken, *, lasted: float, begun: int | None, nodes: int = 1) -> BudgetDecision:
        """Judge a broken round and charge it; a charge is one restart, however many workers failed.

        Args:
            lasted: seconds from its forming to its end.
            begun: the step at which it began to train; None if not reported.
            nodes: the number of nodes that the run may have.
        """
        kind = judge(broken.imposed, broken.failures)
        failure = root_cause(broken.failures)
        gained = self._gained(lasted, begun)
        if gained:
            self.idle = 0
            self.mark = begun
        if kind is Kind.MEMBERSHIP:
            return BudgetDecision(kind)
        if kind.is_final:
            return self.end(kind)
        if broken.imposed is None and failure is not None and self._repeated(failure, begun or 0):
            return BudgetDecision(
                Kind.FATAL, ends="a restart is of no use (the same step has failed in the same way twice)"
            )
        idle = 0
        if broken.disconnected or not kind.costs:
            self.idle += not gained
            if self.idle <= FREE + nodes:
                return BudgetDecision(kind)
            idle = self.idle
        if self.spent >= self._most:
            spent = f"{'all restarts spent' if self._most else 'no restart allowed'} (--max-restarts {self._most})"
            return BudgetDecision(kind, idle=idle, ends=f"no progress in {idle} rounds, {spent}" if idle else spent)
        self.spent += 1
        self._soon = self._soon + 1 if failure is not None and _failed_soon(failure) else 0
        delay = min(2.0 ** (self._soon - 2), LONGEST_DELAY) if self._soon > 1 else 0.0
        return BudgetDecision(kind, charged=True, idle=idle, delay=delay)

    def end(self, kind: Kind) -> BudgetDecision:
        """Return the decision for a failure after which a restart cannot help."""
        said = "a worker said so" if kind is Kind.FATAL else "the script cannot run as it is"
        return BudgetDecision(kind, ends=f"a restart is of no use ({said})")

    def verdict(self, ruling: BudgetDecision, broken: Broken) -> tuple[int, str]:
        """Return the exit code and the cause, as known so far, of a run that ends by a decision."""
        cause = f"{ruling.ends}: {broken.cause}"
        if ruling.kind is Kind.FATAL:
            return ExitCode.DO_NOT_RETRY, cause
        if ruling.idle:
            return ExitCode.NO_PROGRESS, cause
        if ruling.kind is Kind.STARTUP and self._most:
            return ExitCode.STARTUP_FAILURE, cause
        return exit_code(root_cause(broken.failures), self._most), cause

    def spares(self, kind: Kind, *, lasted: float, begun: int | None, nodes: int = 1) -> bool:
        """Whether a round that ended now for an event on its nodes would be free; see :meth:`rule`."""
        return kind is Kind.MEMBERSHIP or self._gained(lasted, begun) or self.idle < FREE + nodes

    def _repeated(self, failure: Failure, begun: int) -> bool:
        """Whether a restart failed with the same numbers and no new step; a single failure may be a flipped bit."""
        before, reached = self._repeats, begun + max(0, failure.trained)
        if failure.repeats or reached > self._reached:
            self._repeats, self._reached = failure.repeats, reached
        return bool(failure.repeats) and failure.repeats == before

    def _gained(self, lasted: float, begun: int | None) -> bool:
        """Whether the training advances: the round began at a higher step than any before."""
        if begun is None:
            return self.mark is None and lasted >= LONG
        return self.mark is None or begun > self.mark


def _failed_soon(failure: Failure) -> bool:
    """Whether a worker failed soon after its start and may do so again; SIGKILL comes from outside."""
    killed = failure.exit_code == -signal.SIGKILL and failure.kind == Kind.CRASH.text
    return failure.ran <= EARLY and failure.trained <= 0 and not killed
