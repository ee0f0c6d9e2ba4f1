"""The restart budget: what a broken round costs, when the next one may form, and whether the run ends with it."""

from __future__ import annotations

import signal

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.leader.phases import Broken, BudgetDecision
from elastic_launch.rendezvous.leader.verdict import Kind, exit_code, judge, root_cause
from elastic_launch.rendezvous.wire.messages import Failure

__all__ = ["EARLY", "FREE", "LONG", "BudgetDecision", "RestartBudget"]

FREE = 3
"""Restarts in a row without progress that are free, and one more for each node that the run may have."""

LONG = 60.0
"""Seconds from which a round of a script that says nothing of its steps counts as progress."""

EARLY = 10.0
"""Seconds within which a worker that fails without a step failed soon; from the second in a row on there is a delay."""

LONGEST_DELAY = 30.0
"""Seconds that the next round waits at most."""


class RestartBudget:
    """Counts restarts.

    Args:
        spent: restarts charged so far.
        most: that are allowed.
        idle: restarts in a row without progress.
        mark: the highest step at which a round has begun to train; None if none is known.
    """

    def __init__(self, spent: int, most: int, idle: int = 0, mark: int | None = None) -> None:
        self.spent = spent
        self.idle = idle
        self.mark = mark
        self._most = most
        self._soon = 0  # failures in a row soon after the start
        self._repeats, self._reached = "", 0  # the last failure that a restart may repeat, and the steps done by then

    def rule(self, broken: Broken, *, lasted: float, begun: int | None, nodes: int = 1) -> BudgetDecision:
        """Judge a broken round and charge it; a charge is one restart, whatever number of workers failed.

        Args:
            lasted: seconds from its forming to its end.
            begun: the step at which it began to train; None if it said of none.
            nodes: that the run may have.
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
        if not kind.costs:
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
        """Return what follows from a failure after which no restart makes sense."""
        said = "a worker said so" if kind is Kind.FATAL else "the script cannot run as it is"
        return BudgetDecision(kind, ends=f"a restart is of no use ({said})")

    def verdict(self, ruling: BudgetDecision, broken: Broken) -> tuple[int, str]:
        """Return the exit code and the cause of a run that ends by a ruling, as known by now."""
        cause = f"{ruling.ends}: {broken.cause}"
        if ruling.kind is Kind.FATAL:
            return ExitCode.DO_NOT_RETRY, cause
        if ruling.idle:
            return ExitCode.NO_PROGRESS, cause
        if ruling.kind is Kind.STARTUP and self._most:
            return ExitCode.STARTUP_FAILURE, cause
        return exit_code(root_cause(broken.failures), self._most), cause

    def spares(self, kind: Kind, *, lasted: float, begun: int | None, nodes: int = 1) -> bool:
        """Whether it would be free if a round ended now for what befell its nodes; see :meth:`rule`."""
        return kind is Kind.MEMBERSHIP or self._gained(lasted, begun) or self.idle < FREE + nodes

    def _repeated(self, failure: Failure, begun: int) -> bool:
        """Whether a restart has failed by the same numbers, no new step done: once it may have been a flipped bit."""
        before, reached = self._repeats, begun + max(0, failure.trained)
        if failure.repeats or reached > self._reached:
            self._repeats, self._reached = failure.repeats, reached
        return bool(failure.repeats) and failure.repeats == before

    def _gained(self, lasted: float, begun: int | None) -> bool:
        """Whether the training advances: a round has begun at a higher step than any before."""
        if begun is None:
            return self.mark is None and lasted >= LONG
        return self.mark is None or begun > self.mark


def _failed_soon(failure: Failure) -> bool:
    """Whether a worker failed soon after its start, and may do so again; SIGKILL comes from outside."""
    killed = failure.exit_code == -signal.SIGKILL and failure.kind == Kind.CRASH.text
    return failure.ran <= EARLY and failure.trained <= 0 and not killed
