"""The verdict on a broken round: which failure is the root cause, and of which kind it is."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum

from elastic_launch.errors import ExitCode
from elastic_launch.failure import Failure

_OURS = {int(ExitCode.USAGE), *range(90, 100)}


class Kind(IntEnum):
    """Why a round was broken.

    Events on nodes take precedence: a node that vanishes makes workers elsewhere crash, and so does a resize.
    :func:`root_cause` decides which of several workers' failures counts.
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
        """The name used in messages, events and the workers' environment."""
        return self.name.lower().replace("_", " ")

    @property
    def costs(self) -> bool:
        """Whether the kind is charged to the restart budget even if the training advances."""
        return self in (Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY)

    @property
    def is_fault(self) -> bool:
        """Whether a worker's own failure caused it."""
        return self >= Kind.FATAL

    @property
    def is_final(self) -> bool:
        """Whether a restart would fail in the same way."""
        return self in (Kind.FATAL, Kind.STARTUP)


_KINDS = {kind.text: kind for kind in Kind}


def kind_of(failure: Failure) -> Kind:
    """Return the failure's kind; a kind unknown to this version counts as a crash."""
    return _KINDS.get(failure.kind, Kind.CRASH)


def root_cause(failures: Sequence[tuple[float, Failure]]) -> Failure | None:
    """Return the first failure, preferring failures that do not follow from another one.

    A failure for which a retry cannot help takes precedence over all others. A broken connection or a time-out is
    the symptom of a failure elsewhere, so it comes last: also after a worker that was ended by a signal, since that
    breaks connections, and after one that may have failed. Of these symptoms, one that names ranks which had ended
    before comes first.

    Args:
        failures: each with the leader's time of receipt, from which the failure's age as the node saw it is subtracted.
    """
    if not failures:
        return None
    return min(failures, key=lambda item: (_rank(item[1]), item[0] - item[1].ago))[1]


def first_of(known: Failure | None, later: Failure) -> Failure:
    """Return which of a node's failures in a round to keep, if only one can be.

    The later one follows from the other, unless it takes precedence.
    """
    if known is None or known.round != later.round or _rank(later) < _rank(known):
        return later
    return known


def _rank(failure: Failure) -> int:
    kind = kind_of(failure)
    if kind.is_final:
        return 0
    if not kind.is_fault:
        return 2
    if failure.symptom:
        return 4 if failure.ended_before else 5
    return 3 if failure.supposed else 1


def judge(imposed: Kind | None, failures: Iterable[tuple[float, Failure]]) -> Kind:
    """Return the kind that counts for a broken round.

    Args:
        imposed: the event on its nodes that broke it, which makes workers crash; None if only workers failed.
    """
    failure = root_cause(list(failures)) if imposed is None else None
    return kind_of(failure) if failure is not None else imposed if imposed is not None else Kind.CRASH


def disconnected(imposed: Kind | None, failures: Sequence[tuple[float, Failure]]) -> bool:
    """Whether only connections broke, as far as is known: no worker ended, so it is not the script's fault."""
    return imposed is None and bool(failures) and all(failure.alive for _, failure in failures)


def is_own(failure: Failure) -> bool:
    """Whether a worker has failed by itself, as far as is known, and not because another one had."""
    return kind_of(failure).is_fault and not (failure.symptom or failure.supposed or failure.alive)


def killed(failure: Failure) -> bool:
    """Whether something outside of the worker ended it by SIGKILL."""
    return failure.exit_code == -signal.SIGKILL and kind_of(failure) is Kind.CRASH


def exit_code(failure: Failure | None, max_restarts: int) -> int:
    """Return the run's exit code for a failure when the restart budget is spent.

    With a budget of 0, it is the worker's own code (128 + N for signal N), unless this program uses that code itself.
    """
    if max_restarts > 0 or failure is None:
        return ExitCode.BUDGET_SPENT
    return own_code(failure.exit_code)


def own_code(code: int) -> int:
    """Return the run's exit code for a worker's exit code (-N for signal N)."""
    if code < 0:
        return 128 - code
    return ExitCode.TRAINING_FAILED if code in _OURS or not code else code


def identity(text: str) -> str:
    """Return a short text for one of any length, as the record contains it."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
