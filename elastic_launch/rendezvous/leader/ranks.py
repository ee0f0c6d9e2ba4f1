"""The members of the next round, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_launch.rendezvous.leader.types import Node
from elastic_launch.rendezvous.record import Round


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that waits for the next round.

    Attributes:
        last_rank: its rank in the last round, or None for a newcomer.
        wanted_rank: the rank that it asks for, or None.
        arrival: a number that increases with each arrival.
    """

    node_id: str
    last_rank: int | None
    wanted_rank: int | None
    arrival: int


def choose(nodes: Sequence[Node], last: Round, limit: int) -> list[Node]:
    """Return the members of the next round in rank order, at most ``limit`` of the nodes.

    Args:
        last: the previous round; an agent that was restarted since then is a newcomer.
    """
    ranks = {(member.node_id, member.incarnation): rank for rank, member in enumerate(last.members)}
    candidates = [
        Candidate(
            node.hello.node_id,
            ranks.get((node.hello.node_id, node.hello.incarnation)),
            node.hello.wanted_rank,
            node.arrival,
        )
        for node in nodes
    ]
    by_id = {node.hello.node_id: node for node in nodes}
    return [by_id[node_id] for node_id in rank_nodes(candidates, limit)]


def rank_nodes(candidates: Sequence[Candidate], limit: int) -> list[str]:
    """Return the node ids of the next round in rank order, at most ``limit`` of them.

    Survivors keep their order. Newcomers follow in order of arrival, so they are the first to be left out if there are
    too many nodes. Then each node that asks for an existing rank gets it, earlier nodes in that order first, and the
    others fill the gaps.
    """
    order = sorted(
        candidates,
        key=lambda c: (c.last_rank is None, c.last_rank if c.last_rank is not None else 0, c.arrival),
    )[:limit]
    seats: list[str | None] = [None] * len(order)
    unseated: list[Candidate] = []
    for candidate in order:
        wanted = candidate.wanted_rank
        if wanted is not None and 0 <= wanted < len(seats) and seats[wanted] is None:
            seats[wanted] = candidate.node_id
        else:
            unseated.append(candidate)
    # A requested rank beyond this round's size still determines the order.
    rest = iter(sorted(unseated, key=lambda c: _beyond(c, len(order))))
    return [seat if seat is not None else next(rest).node_id for seat in seats]


def _beyond(candidate: Candidate, size: int) -> tuple[bool, int]:
    wanted = candidate.wanted_rank
    return (True, wanted) if wanted is not None and wanted >= size else (False, 0)
