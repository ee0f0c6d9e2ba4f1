"""When a node's workers are late: pure, and without a clock.

What counts is the time that the agent has seen pass, not what a clock shows: a machine or an agent that was suspended
has seen none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastic_launch.failure import Doing
from elastic_launch.shared_progress import FIRST_STEPS, Activity, WorkerProgress

FACTOR = 5.0
"""A worker is late after so many times the longest time that it has taken for the same."""

FORGETS = 0.99
"""With each further step, the longest time counts for so much less: a single long step must not hide hangs for days."""

LEAST = {Activity.STEP: 10.0}
"""Seconds before which it is not."""

LEAST_OF_OTHERS = 300.0
"""The same for all that is rarer than a step: the time of a second one may differ much from that of the first."""

UNKNOWN = 1800.0
"""Seconds for what was not done before: a first step may include compiling the model."""

FORMING = 10.0
"""Seconds for which the workers of a round may wait for each other as they enter it, and one may be stopped."""

MOST_FORMING = 300.0
"""The same after rounds were broken because they did: the network may be slow."""


RECONNECTS = 2.0
"""In the first step of a round, ranks connect and loaders begin anew: known steps may take so many times as long.

After that time a first step of a new process may be looked at, too: it may take longer, but only if it does something.
"""

_KNOWN_STEPS = {Activity.REHEARSED_STEP: Activity.FIRST_STEP, Activity.RESUMED_STEP: Activity.STEP}
"""First steps of a round that are to take no longer than what the node has seen, which is named here."""

_NOT_LEARNED = (Activity.PAUSE, Activity.FORMING, Activity.RESTORE, *_KNOWN_STEPS)
"""Their times depend on what other processes do meanwhile, or on storage."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """No worker of the node has reported anything new.

    Attributes:
        seconds: for how long.
        left: seconds until all of them are late; not above 0 if they are.
        doing: what they do.
    """

    seconds: float
    left: float
    doing: Doing


class Lateness:
    """Learns how long the workers of a node take, and says when all of them are late.

    All must be late: as long as one evaluates or saves, the others wait for it.
    """

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}
        self._seen: dict[int, tuple[WorkerProgress, float]] = {}  # by local rank; for how long it has not changed
        self._stopped: dict[int, float] = {}  # by local rank; for how long it has been stopped
        self._forming = FORMING

    def look(
        self,
        round_number: int,
        reports: Mapping[int, WorkerProgress | None],
        elapsed: float,
        stopped: Collection[int] = (),
    ) -> Standstill | None:
        """Take note of the workers' last reports.

        Args:
            reports: by local rank.
            elapsed: seconds since the last call in which this agent ran.
            stopped: local ranks that are stopped by a signal, and were when this was last called. Such a one is late
                by itself, in whatever part of its script.

        Returns:
            None if some have not begun to train in the round, or are in a part of their script that nothing is known
            of, and none is stopped.
        """
        self._stopped = {
            rank: self._stopped.get(rank, 0.0) + elapsed for rank in stopped if not self._new(reports, rank)
        }
        found = self._standstill(round_number, reports, elapsed)
        if not self._stopped:
            return found
        rank, seconds = max(self._stopped.items(), key=lambda item: item[1])
        if found is not None and found.left <= FORMING - seconds:
            return found
        report = reports[rank]
        doing = _doing(report) if report is not None and report.round == round_number else Doing()
        return Standstill(seconds, FORMING - seconds, doing)

    def suspect_in(self, reports: Mapping[int, WorkerProgress | None]) -> float:
        """Return the seconds until workers in a first step have taken as long as other steps may, after :meth:`look`.

        From then on they may be suspected before they are late, by what they do. Infinite if one has not begun to train
        in the round, or is in a part of its script that nothing is known of.
        """
        seen = [self._seen[rank] for rank in reports if rank in self._seen]
        if len(seen) < len(reports) or any(report.activity == Activity.UNWATCHED for report, _ in seen):
            return math.inf
        usual = RECONNECTS * self._learned(Activity.STEP)
        return max((usual if report.activity in FIRST_STEPS else self._limit(report)) - stood for report, stood in seen)

    def _new(self, reports: Mapping[int, WorkerProgress | None], local_rank: int) -> bool:
        before = self._seen.get(local_rank)
        return before is not None and before[0] != reports[local_rank]

    def _standstill(
        self, round_number: int, reports: Mapping[int, WorkerProgress | None], elapsed: float
    ) -> Standstill | None:
        for local_rank, report in reports.items():
            before, stood = self._seen.get(local_rank, (None, 0.0))
            if report is None or report.round != round_number:
                self._seen.pop(local_rank, None)
            elif report == before:
                self._seen[local_rank] = report, stood + elapsed
            else:
                if before is not None and before.round == round_number and before.activity not in _NOT_LEARNED:
                    self._learn(before.activity, stood)
                self._seen[local_rank] = report, 0.0
        seen = [self._seen[local_rank] for local_rank in reports if local_rank in self._seen]
        if len(seen) < len(reports) or any(report.activity == Activity.UNWATCHED for report, _ in seen):
            return None
        left, slowest = max((self._left(rank), self._seen[rank][0]) for rank in reports)
        return Standstill(min(stood for _, stood in seen), left, _doing(slowest))

    def broken(self) -> None:
        """The round was broken because its workers were late: if they entered it, those of the next have more time."""
        if any(report.activity == Activity.FORMING for report, _ in self._seen.values()):
            self._forming = min(2 * self._forming, MOST_FORMING)
        for report, stood in self._seen.values():
            if report.activity in _KNOWN_STEPS:
                self._learn(report.activity, stood)

    def _learn(self, activity: int, seconds: float) -> None:
        longest = self._longest.get(activity, 0.0)
        self._longest[activity] = max(longest * FORGETS if activity == Activity.STEP else longest, seconds)

    def _left(self, local_rank: int) -> float:
        report, stood = self._seen[local_rank]
        return self._limit(report) - stood

    def _limit(self, report: WorkerProgress) -> float:
        if report.activity == Activity.PAUSE:
            return report.limit
        if report.activity == Activity.FORMING:
            return self._forming
        activity = Activity(report.activity)
        if (known := _KNOWN_STEPS.get(activity)) is not None:
            if known in self._longest:
                longest = max(self._longest[known], self._longest.get(activity, 0.0))
                # Each round that was broken in its first step raises this; new processes need no more.
                most = self._learned(Activity.FIRST_STEP)
                return max(RECONNECTS * self._learned(Activity.STEP), min(FACTOR * longest, most))
            activity = Activity.FIRST_STEP
        return self._learned(activity)

    def _learned(self, activity: Activity) -> float:
        longest = self._longest.get(activity)
        if longest is None and activity != Activity.STEP:
            return UNKNOWN
        return max(LEAST.get(activity, LEAST_OF_OTHERS), FACTOR * (longest or 0.0))


def _doing(report: WorkerProgress) -> Doing:
    return Doing(report.activity, report.step, report.what)
