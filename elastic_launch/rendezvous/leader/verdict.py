"""Judging a broken round: which failure is the root cause, and what kind of end it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.wire.messages import Failure

__all__ = ["Kind", "exit_code", "judge", "kind_of", "own_code", "root_cause", "words"]

_OURS = {int(ExitCode.USAGE), *range(90, 100)}


class Kind(IntEnum):
    """Why a round was broken.

    What befalls nodes comes first, by precedence: a node that vanishes makes workers elsewhere crash, and so does a
    resize. Which of several workers' failures counts is :func:`root_cause`'s to say.
    """

    MEMBERSHIP = 0
    PREEMPTION = 1
    NODE_LOSS = 2
    FATAL = 3
    STARTUP = 4
    OUT_OF_MEMORY = 5
    HANG = 6
    CRASH = 7

    @property
    def text(self) -> str:
        """The name in messages, events and the workers' environment."""
        return self.name.lower().replace("_", " ")

    @property
    def costs(self) -> bool:
        """Whether the kind is charged to the restart budget whatever the training gains."""
        return self in (Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY)

    @property
    def is_fault(self) -> bool:
        """Whether a worker's own failure lies behind it."""
        return self >= Kind.FATAL

    @property
    def is_final(self) -> bool:
        """Whether a restart would fail in the same way."""
        return self in (Kind.FATAL, Kind.STARTUP)


_KINDS = {kind.text: kind for kind in Kind}


def kind_of(failure: Failure) -> Kind:
    """Return the failure's kind; one that this version doesn't know counts as a crash."""
    return _KINDS.get(failure.kind, Kind.CRASH)


def root_cause(failures: Sequence[tuple[float, Failure]]) -> Failure | None:
    """Return the first failure, but none that follows from another while there is one that does not.

    What says that a retry is of no use goes before all others. A broken connection or a time-out tells of a failure
    elsewhere, so it comes last, and behind a worker that was ended by a signal, since that breaks connections,
    and behind one that may have failed.

    Args:
        failures: each with the leader's time of its receipt; its age as the node saw it is taken off.
    """
    if not failures:
        return None
    return min(failures, key=lambda item: (_rank(item[1]), item[0] - item[1].ago))[1]


def _rank(failure: Failure) -> int:
    kind = kind_of(failure)
    if kind.is_final:
        return 0
    if not kind.is_fault:
        return 2
    if failure.symptom:
        return 4
    return 3 if failure.supposed else 1


def judge(imposed: Kind | None, failures: Iterable[tuple[float, Failure]]) -> Kind:
    """Return the kind that counts for a broken round.

    Args:
        imposed: what befell its nodes, if that broke it: it makes workers crash; None if only workers failed.
    """
    failure = root_cause(list(failures)) if imposed is None else None
    return kind_of(failure) if failure is not None else imposed if imposed is not None else Kind.CRASH


def words(failure: Failure) -> str:
    """Return who failed, and how, in one line."""
    return f"rank {failure.rank} on node {failure.node_id}: {failure.message}"


def exit_code(failure: Failure | None, max_restarts: int) -> int:
    """Return the run's exit code when a failure finds the budget spent.

    With a budget of 0 it is the worker's own code (128 + N for signal N), unless that is one of this program's own.
    """
    if max_restarts > 0 or failure is None:
        return ExitCode.BUDGET_SPENT
    return own_code(failure.exit_code)


def own_code(code: int) -> int:
    """Return what a worker's exit code (-N for signal N) becomes as that of the run."""
    if code < 0:
        return 128 - code
    return ExitCode.TRAINING_FAILED if code in _OURS or not code else code
