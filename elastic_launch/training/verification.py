"""Silent corruption: which steps are verified, which rank computes whose micro-batch again, and who is at fault.

In a verified step each rank computes one micro-batch of another rank, and the results must have the same bits. Pure:
every rank has the same results before it, and so decides the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.randomness import derive


class CorruptionError(ElasticLaunchError):
    """This process has computed other results than others of its run for the same micro-batches."""


class NotAgreedError(RuntimeError):
    """Ranks have computed different results for a micro-batch, and it is not known which one is right."""


_PERCENT = re.compile(r"(\d+(\.\d+)?)%")


def share_of(verify: object, where: str) -> float:
    """Return the share of steps that ``verify="1%"`` names, such as 0.01; 0 for True and False.

    Args:
        where: names the argument in errors.

    Raises:
        UsageError: if it is anything else, or not above 0 % and at most 100 %.
    """
    if isinstance(verify, bool):
        return 0.0
    match = _PERCENT.fullmatch(verify) if isinstance(verify, str) else None
    share = float(match[1]) / 100 if match is not None else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{where} is {verify!r}.", 'Give a share of the steps, such as "1%", True or False.')
    return share


def due(seed: int, step: int, share: float) -> bool:
    """Whether a step, which counts from 0, is verified: so it is with this share of all steps, chosen by the seed."""
    return share > 0 and derive("verified", seed, step) < share * 2.0**63


def checked_by(nodes: Sequence[int]) -> list[int]:
    """Return which rank each rank checks, as positions in ``nodes``: each is checked once, and by another if there is
    one.

    Args:
        nodes: the node of each rank; ranks of a node follow each other. Where no node has more than half of the ranks,
            each rank checks one of another node.
    """
    count = len(nodes)
    most = max((sum(node == other for other in nodes) for node in set(nodes)), default=0)
    shift = most if 2 * most <= count else max(1, count - most)
    return [(place + shift) % count for place in range(count)]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each rank computes again in a verified step: a micro-batch of another rank, by its index in the step.

    Attributes:
        authors: the rank whose micro-batch it is, by the rank that checks it.
        micros: that micro-batch, by its author; the checked one of each rank.
        machines: whether all ranks compute the same one, to find machines that compute differently.
    """

    authors: Mapping[int, int]
    micros: Mapping[int, int]
    machines: bool = False


def assigned(seed: int, step: int, slices: Sequence[range], nodes: Sequence[int], *, machines: bool) -> Assignment:
    """Return what each rank computes again in a step; nothing if fewer than two ranks have micro-batches.

    Args:
        slices: the micro-batches of each rank.
        nodes: the node of each rank.
        machines: whether all are to compute the step's first micro-batch.
    """
    ranks = [rank for rank, micros in enumerate(slices) if micros]
    if len(ranks) < 2:
        return Assignment({}, {})
    if machines:
        return Assignment(dict.fromkeys(ranks, ranks[0]), {ranks[0]: slices[ranks[0]][0]}, machines=True)
    targets = checked_by([nodes[rank] for rank in ranks])
    micros = {rank: slices[rank][derive("of", seed, step, rank) % len(slices[rank])] for rank in ranks}
    return Assignment({rank: ranks[target] for rank, target in zip(ranks, targets, strict=True)}, micros)


@dataclass(frozen=True, slots=True)
class Digests:
    """What a rank has found for a micro-batch: digests of its samples, and of its loss and gradients."""

    samples: int
    result: int


@dataclass(frozen=True, slots=True)
class Dispute:
    """Two ranks differ about a micro-batch.

    Attributes:
        author: the rank whose micro-batch it is.
        checker: the one that has computed it again.
        third: one that computes it, too; None if there are only these two.
    """

    micro: int
    author: int
    checker: int
    third: int | None

    @property
    def ranks(self) -> list[int]:
        """The ranks that compute the micro-batch now."""
        return [rank for rank in (self.author, self.checker, self.third) if rank is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the results of a verified step say.

    Attributes:
        disputes: what ranks differ about, once the samples are the same.
        data: micro-batches, by index, for which ranks had other samples.
    """

    disputes: tuple[Dispute, ...] = ()
    data: tuple[int, ...] = ()


def compared(assignment: Assignment, own: Mapping[int, Digests], again: Mapping[int, Digests]) -> Comparison:
    """Compare what each rank found for its own micro-batch with what another found for it.

    Args:
        own: by author.
        again: by the rank that has checked.
    """
    pairs = [(author, checker) for checker, author in sorted(assignment.authors.items())]
    data = {assignment.micros[a] for a, c in pairs if own[a].samples != again[c].samples}
    differing = [(a, c) for a, c in pairs if own[a].result != again[c].result and own[a].samples == again[c].samples]
    involved = {rank for pair in differing for rank in pair}
    ranks = sorted(assignment.authors)
    found = []
    for author, checker in differing:
        start = ranks.index(checker)
        others = [x for x in (*ranks[start:], *ranks[:start]) if x not in (author, checker)]
        others.sort(key=involved.__contains__)  # stable: those that differ from nobody come first
        found.append(Dispute(assignment.micros[author], author, checker, others[0] if others else None))
    return Comparison(tuple(found), tuple(sorted(data)))


def culprit(dispute: Dispute, first: Mapping[int, int], second: Mapping[int, int]) -> int | None:
    """Return which rank of a dispute has computed wrong; None if that cannot be said.

    Two results of three decide, if the one that is right gives it twice. Of two ranks, it is the one that does not give
    the same result twice.

    Args:
        first: the results in the step, by rank.
        second: those of all three, computed after that.
    """
    author, checker, third = dispute.author, dispute.checker, dispute.third
    repeats = {rank: first[rank] == second[rank] for rank in (author, checker)}
    if third is None:
        stable = [rank for rank in (author, checker) if repeats[rank]]
        return checker if stable == [author] else author if stable == [checker] else None
    for right, wrong in ((author, checker), (checker, author)):
        if repeats[right] and second[third] == first[right] != first[wrong]:
            return wrong
    return None


def groups_of(results: Mapping[int, Digests], ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks by equal results, the largest group first; the lower ranks first among equally large ones."""
    alike: dict[Digests, list[int]] = defaultdict(list)
    for rank in ranks:
        alike[results[rank]].append(rank)
    return sorted(alike.values(), key=lambda group: (-len(group), group))
