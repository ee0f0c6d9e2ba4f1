"""Judging a broken round: which cause counts, whether it costs a restart, and whether it ends the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.messages import Failure

__all__ = ["Kind", "exit_code", "kind_of", "own_code", "root_cause"]

EARLY = 10.0
"""A plain script that exits non-zero within this many seconds of its start may never have started right."""

_OURS = {int(ExitCode.USAGE), *range(90, 100)}


class Kind(IntEnum):
    """Why a round was broken, by precedence: of several causes seen together the lowest number counts.

    A node that vanishes makes workers elsewhere crash, and so does a resize; judging by precedence keeps such
    collateral crashes free.
    """

    MEMBERSHIP = 0
    PREEMPTION = 1
    NODE_LOSS = 2
    FATAL = 3
    OUT_OF_MEMORY = 4
    HANG = 5
    CRASH = 6

    @property
    def text(self) -> str:
        """The name in messages, events and the workers' environment."""
        return self.name.lower().replace("_", " ")

    @property
    def costs(self) -> bool:
        """Whether the kind is charged to the restart budget."""
        return self in (Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY)

    @property
    def is_fault(self) -> bool:
        """Whether a worker's failure lies behind it."""
        return self in (Kind.FATAL, Kind.OUT_OF_MEMORY, Kind.HANG, Kind.CRASH)


_KINDS = {kind.text: kind for kind in Kind}


def kind_of(failure: Failure) -> Kind:
    """Return the failure's kind; one that this version doesn't know counts as a crash."""
    return _KINDS.get(failure.kind, Kind.CRASH)


def root_cause(failures: Sequence[tuple[float, Failure]]) -> Failure | None:
    """Return the first failure of the most significant kind.

    Args:
        failures: each with the leader's time of its receipt; its age as the node saw it is taken off.
    """
    if not failures:
        return None
    return min(failures, key=lambda item: (kind_of(item[1]), item[0] - item[1].ago))[1]


def judge(broken: Kind, failures: Iterable[Failure]) -> Kind:
    """Return the kind that counts for a round broken for one reason with further failures reported."""
    return min([broken, *map(kind_of, failures)])


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


def is_early(failure: Failure) -> bool:
    """Whether the failure may be one of start-up: an exit code (not a signal) soon after the start."""
    return failure.exit_code > 0 and failure.ran <= EARLY and bool(failure.signature)
