"""The verdict on a round that stands still: which of its workers hang, from what all of its nodes report; pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_launch.events.types import HangFound
from elastic_launch.rendezvous.leader.verdict import words
from elastic_launch.rendezvous.wire.messages import Failure, Stalled, StalledWorker

ALIKE = 600.0
"""Seconds for which all ranks may stand at the same place of the user's code: they may wait for something there."""

_WAITS = ("exchange", "unknown")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A round hangs.

    Attributes:
        cause: in one line.
        failures, places: of the workers that hang; none if no rank stands out.
    """

    cause: str
    failures: tuple[Failure, ...] = ()
    places: tuple[str, ...] = ()

    def event(self, round_number: int) -> HangFound:
        """Return what is recorded of it."""
        ranks = tuple(failure.rank for failure in self.failures)
        nodes = tuple(failure.node_id for failure in self.failures)
        hosts = tuple(failure.host for failure in self.failures)
        return HangFound(round_number, self.cause, ranks, nodes, hosts, self.places)


@dataclass(frozen=True, slots=True)
class _Seen:
    node: str
    report: Stalled
    worker: StalledWorker

    @property
    def waits(self) -> bool:
        return self.worker.state in _WAITS

    @property
    def place(self) -> str:
        at = f" at {self.worker.frame}" if self.worker.frame else ""
        match self.worker.state:
            case "stopped":
                return f"stopped (SIGSTOP){at}"
            case "loader":
                return f"waiting for its data loader{at}"
            case "exchange":
                return f"waiting for other ranks{at}"
            case "unknown":
                return "at an unknown place"
        return at.strip() or "in its code"


def judge_stalled(round_number: int, reports: Mapping[str, Stalled], ran: float) -> Verdict | None:
    """Return the verdict on a round all of whose nodes are stalled; None if it may still go on by itself.

    A worker that was stopped hangs for certain. Otherwise a round hangs only if none of its workers does anything;
    those in an exchange do not count if others are not in one. The ranks that are not in an exchange hang: the others
    wait for them. If all are, or none is, those hang that are at another place than most.

    Args:
        reports: by node.
        ran: seconds since the round was formed.
    """
    seen = [_Seen(node, report, worker) for node, report in reports.items() for worker in report.workers]
    hung = [each for each in seen if each.worker.state == "stopped"]
    if not hung:
        busy = [each for each in seen if not each.waits]
        if not seen or any(each.worker.moves for each in busy or seen):
            return None
        hung = busy if len(busy) < len(seen) else []
        hung = hung or _apart(seen)
        alike = len({each.place for each in seen}) == 1
        if busy and alike and any(report.seconds < ALIKE and not report.asked for report in reports.values()):
            return None
    if not hung:
        places = _ranks_by_place(seen)
        where = "; ".join(f"{ranks} {place}" for place, ranks in places[:4])
        more = "; ..." if len(places) > 4 else ""
        return Verdict(f"the round hangs in {seen[0].report.doing}, and no rank stands out: {where}{more}")
    others = _ranks_by_place([each for each in seen if each not in hung])
    failures = tuple(_failure(round_number, each, others, ran) for each in hung)
    return Verdict(words(failures[0]), failures, tuple(each.place for each in hung))


def _apart(seen: Sequence[_Seen]) -> list[_Seen]:
    """Return those that are not where more than half are; none if there is no such place."""
    most = [place for place in {each.place for each in seen} if 2 * sum(x.place == place for x in seen) > len(seen)]
    return [each for each in seen if most and each.place != most[0]]


def _ranks_by_place(seen: Sequence[_Seen]) -> list[tuple[str, str]]:
    """Return the places, and the ranks that are there as text."""
    ranks: dict[str, list[int]] = {}
    for each in seen:
        ranks.setdefault(each.place, []).append(each.worker.rank)
    found = []
    for place, there in ranks.items():
        shown = ", ".join(map(str, sorted(there)[:8])) + (", ..." if len(there) > 8 else "")
        found.append((place, f"rank{'s' if len(there) > 1 else ''} {shown}"))
    return found


def _failure(round_number: int, hung: _Seen, others: Sequence[tuple[str, str]], ran: float) -> Failure:
    worker, report = hung.worker, hung.report
    apart = f", {others[0][1]} {others[0][0]}" if hung.waits and others else ""
    seconds = round(report.seconds)
    return Failure(
        node_id=hung.node,
        kind="hang",
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        exit_code=-signal.SIGKILL,
        message=f"hangs in {report.doing} on host {report.host}, {hung.place}{apart}; no progress for {seconds} s",
        detail=worker.stack,
        ran=ran,
        log=worker.log,
        round=round_number,
        host=report.host,
    )
