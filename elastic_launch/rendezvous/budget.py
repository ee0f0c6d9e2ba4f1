"""The restart budget: what a broken round costs, and whether the run ends with it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.instructions import Broken
from elastic_launch.rendezvous.messages import Failure
from elastic_launch.rendezvous.verdict import Kind, exit_code, is_early, judge, root_cause

__all__ = ["Budget", "Ruling"]


@dataclass(frozen=True, slots=True)
class Ruling:
    """What follows from a broken round.

    Attributes:
        kind: what counts of all that was reported.
        failure: the root cause, if a worker's failure lies behind it.
        end: the run's exit code if it ends here, with its cause.
    """

    kind: Kind
    failure: Failure | None = None
    end: tuple[int, str] | None = None


class Budget:
    """Counts restarts.

    Args:
        spent: restarts charged so far.
        most: that are allowed.
    """

    def __init__(self, spent: int, most: int) -> None:
        self.spent = spent
        self._most = most
        self._last_early = ""

    def rule(self, broken: Broken) -> Ruling:
        """Judge a broken round and charge it; a charge is one restart, whatever number of workers failed."""
        kind = judge(broken.kind, (failure for _, failure in broken.failures))
        if not kind.is_fault:
            return Ruling(kind)
        failure = root_cause(broken.failures)
        early = failure.signature if failure and is_early(failure) else ""
        last_early, self._last_early = self._last_early, early
        if kind is Kind.FATAL:
            return Ruling(kind, failure, (ExitCode.DO_NOT_RETRY, broken.cause))
        if early and early == last_early:
            cause = f"the script fails at its start, twice the same way: {broken.cause}"
            return Ruling(kind, failure, (ExitCode.STARTUP_FAILURE, cause))
        if self.spent >= self._most:
            spent = f"all {self._most} restarts spent" if self._most else "no restart allowed (--max-restarts 0)"
            return Ruling(kind, failure, (exit_code(failure, self._most), f"{spent}: {broken.cause}"))
        self.spent += 1
        return Ruling(kind, failure)
