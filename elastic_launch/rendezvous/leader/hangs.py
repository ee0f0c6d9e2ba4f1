"""The verdict on a round that stands still: which of its workers hang, from what all of its nodes report; pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_launch.events.facts import Cause, RoundHangs
from elastic_launch.events.sentences import why
from elastic_launch.events.types import HangFound
from elastic_launch.failure import BegunInstead, Doing, Failure, Hang, SplitCollective, StallPlace
from elastic_launch.rendezvous.wire.messages import Collective, Stalled, StalledWorker

ALIKE = 600.0
"""Seconds for which all ranks may stand at the same place of the user's code: they may wait for something there."""

_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
"""Torch's names of collectives whose inputs have the same sizes on all ranks."""

_WAITS = ("exchange", "unknown")

_NEVER_EARLY = ("loader", "unknown")
"""States of a worker that say nothing while a first step may last."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A round hangs.

    Attributes:
        doing: what the round is late with.
        seconds: for how long it has not advanced.
        failures: of the workers that hang; none if no rank stands out.
        places: where the ranks stand, if none stands out.
        collectives: those in which ranks wait that others have not begun.
        stood: the places of the workers that hang; of all if no rank stands out.
    """

    doing: Doing
    seconds: float
    failures: tuple[Failure, ...] = ()
    places: tuple[tuple[StallPlace, tuple[int, ...]], ...] = ()
    collectives: tuple[SplitCollective, ...] = ()
    stood: frozenset[StallPlace] = frozenset()

    @property
    def cause(self) -> Cause:
        """The first failure, or how the round hangs."""
        return self.failures[0] if self.failures else RoundHangs(self.doing, self.places, self.collectives)

    def event(self, round_number: int) -> HangFound:
        """Return what is recorded of it."""
        hung = [(x.rank, x.node_id, x.host, x.hang.at) for x in self.failures if x.rank is not None and x.hang]
        ranks, nodes, hosts, places = zip(*hung, strict=True) if hung else ((), (), (), ())
        return HangFound(round_number, why(self.cause), self.seconds, ranks, nodes, hosts, places, self.collectives)


@dataclass(frozen=True, slots=True)
class _Seen:
    node: str
    report: Stalled
    worker: StalledWorker

    @property
    def waits(self) -> bool:
        return self.worker.state in _WAITS

    @property
    def place(self) -> StallPlace:
        return StallPlace(self.worker.state, "" if self.worker.state == "unknown" else self.worker.frame)

    @property
    def in_collective(self) -> StallPlace:
        """The place, and the collective that the rank waits in if that is known."""
        waits = (x.what for x in self.worker.collectives if x.waits and self.worker.state == "exchange")
        return replace(self.place, collective=next(waits, ""))


def judge_stalled(
    round_number: int,
    reports: Mapping[str, Stalled],
    ran: float,
    *,
    finished: bool = False,
    before: Collection[StallPlace] = (),
) -> Verdict | None:
    """Return the verdict on a round all of whose nodes are stalled; None if it may still go on by itself.

    A worker that was stopped hangs for certain. Otherwise a round hangs only if none of its workers does anything;
    those in an exchange do not count if others are not in one. The ranks that are not in an exchange hang: the others
    wait for them. If all are, or none is, those hang that most wait for in a collective, or that are at another place
    than most.

    While a round may still be in its first step, that is not enough, since a rank may wait for what it loads or
    compiles: the ranks must wait for each other in different exchanges, or hang where others have hung before, and none
    of them may be preparing.

    Args:
        reports: by node.
        ran: seconds since the round was formed.
        finished: whether all other ranks have ended with 0. Then those that are left hang wherever they are.
        before: :attr:`Verdict.stood` of earlier rounds.
    """
    seen = [_Seen(node, report, worker) for node, report in reports.items() for worker in report.workers]
    splits = _splits(seen)
    hung = [each for each in seen if each.worker.state == "stopped"]
    if not hung:
        busy = [each for each in seen if not each.waits]
        if not seen or any(each.worker.moves for each in busy or seen):
            return None
        early = any(report.early for report in reports.values())
        if early and any(
            each.worker.moves or each.worker.prepares or each.worker.state in _NEVER_EARLY for each in seen
        ):
            return None
        hung = seen if finished else busy if len(busy) < len(seen) else []
        hung = hung or _awaited(seen, splits) or _apart(seen)
        alike = len({each.place for each in seen}) == 1
        if busy and alike and any(report.seconds < ALIKE and not report.asked for report in reports.values()):
            return None
        differ = not busy and (bool(splits) or not alike)
        if early and not differ and not {each.place for each in hung or seen} <= {*before}:
            return None
    stood = frozenset(each.place for each in hung or seen)
    seconds = max(report.seconds for report in reports.values())  # as the last report says
    if not hung:
        places = _ranks_by_place(seen)
        return Verdict(seen[0].report.doing, seconds, places=places, collectives=splits, stood=stood)
    others = _ranks_by_place([each for each in seen if each not in hung])
    failures = tuple(_failure(round_number, each, others, ran) for each in hung)
    return Verdict(hung[0].report.doing, seconds, failures, collectives=splits, stood=stood)


def _splits(seen: Sequence[_Seen]) -> tuple[SplitCollective, ...]:
    """Return the collectives in which some ranks wait and that others have not begun, or began as another one."""
    members: dict[tuple[str, str], list[tuple[int, Collective]]] = {}
    for each in seen:
        for collective in each.worker.collectives:
            members.setdefault((collective.backend, collective.group), []).append((each.worker.rank, collective))
    found = []
    for begun in members.values():
        waits = [x for _, x in begun if x.waits]
        newest = [_meant(x) for x in waits if x.number == max(other.number for other in waits)]
        if newest:
            last = max(newest, key=newest.count)
            number = last[0]
            there = [(rank, x) for rank, x in begun if x.waits and _meant(x) == last]
            # A rank that has gone on from it, such as the source of a broadcast, is not one of these.
            behind = tuple(rank for rank, x in begun if x.number < number)
            others: dict[str, list[int]] = {}
            for rank, x in begun:
                if x.number == number and _meant(x) != last:
                    others.setdefault(x.what, []).append(rank)
            if behind or others:
                one = there[0][1]
                instead = tuple(BegunInstead(what, tuple(others[what])) for what in sorted(others))
                group = one.description or one.group
                waiting = tuple(rank for rank, _ in there)
                found.append(SplitCollective(one.what, number, group, waiting, behind, instead))
    return tuple(found)


def _meant(collective: Collective) -> tuple[int, str]:
    """Return what must be the same on all ranks of a group: in others, sizes may differ between ranks."""
    operation = collective.what.partition(" of ")[0]
    return collective.number, collective.what if operation in _SAME_SIZES else operation


def _awaited(seen: Sequence[_Seen], splits: Sequence[SplitCollective]) -> list[_Seen]:
    """Return those that more than half of all ranks wait for in a collective; none if there are no such."""
    for split in splits:
        if 2 * len(split.there) > len(seen):
            return [each for each in seen if each.worker.rank in split.awaited]
    return []


def _apart(seen: Sequence[_Seen]) -> list[_Seen]:
    """Return those that are not where more than half are; none if there is no such place."""
    most = [place for place in {each.place for each in seen} if 2 * sum(x.place == place for x in seen) > len(seen)]
    return [each for each in seen if most and each.place != most[0]]


def _ranks_by_place(seen: Sequence[_Seen]) -> tuple[tuple[StallPlace, tuple[int, ...]], ...]:
    """Return the places, with collectives, and the ranks that are there."""
    found: dict[StallPlace, list[int]] = {}
    for each in seen:
        found.setdefault(each.in_collective, []).append(each.worker.rank)
    return tuple((place, tuple(ranks)) for place, ranks in found.items())


def _failure(
    round_number: int, hung: _Seen, others: Sequence[tuple[StallPlace, tuple[int, ...]]], ran: float
) -> Failure:
    worker, report = hung.worker, hung.report
    there, numbers = others[0] if hung.waits and others else (None, ())
    return Failure(
        node_id=hung.node,
        kind="hang",
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        exit_code=-signal.SIGKILL,
        detail=worker.stack,
        ran=ran,
        log=worker.log,
        round=round_number,
        host=report.host,
        hang=Hang(report.doing, report.seconds, hung.in_collective, numbers, there),
    )
