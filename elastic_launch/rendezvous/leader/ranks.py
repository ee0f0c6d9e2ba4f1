"""The members of the next round, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.record import Round


def choose(nodes: Sequence[Node], last: Round, limit: int) -> list[Node]:
    """Return the members of the next round in rank order, at most ``limit`` of the nodes.

    Survivors keep their order. Other nodes take the places of lost members, and then follow, in order of arrival; they
    are the first to be left out if there are too many nodes. Then each node that asks for an existing rank gets it,
    earlier nodes in that order first, and the others fill the gaps.

    Args:
        last: the previous round; an agent that was restarted since then counts as another.
    """

    def seniority(node: Node) -> tuple[bool, int, int]:
        rank = _rank_in(last, node)
        return rank is None, rank or 0, node.arrival

    order = _placed(sorted(nodes, key=seniority)[:limit], last)
    seats: list[Node | None] = [None] * len(order)
    unseated: list[Node] = []
    for node in order:
        wanted = node.hello.wanted_rank
        if wanted is not None and 0 <= wanted < len(seats) and seats[wanted] is None:
            seats[wanted] = node
        else:
            unseated.append(node)
    # A requested rank beyond this round's size still determines the order.
    rest = iter(sorted(unseated, key=lambda node: _beyond(node.hello.wanted_rank, len(order))))
    return [seat or next(rest) for seat in seats]


def _rank_in(last: Round, node: Node) -> int | None:
    return last.index(node.hello.node_id, node.hello.incarnation)


def _placed(nodes: list[Node], last: Round) -> list[Node]:
    """Move newcomers, which come last, to the places of lost members.

    The first place goes to a survivor if there is one: the others connect to the first member, and none of them may be
    able to connect to a newcomer.
    """
    ranks = [rank for node in nodes if (rank := _rank_in(last, node)) is not None]
    survivors, newcomers = nodes[: len(ranks)], nodes[len(ranks) :]
    placed: list[Node] = []
    for rank, node in zip([0, *ranks[1:]], survivors, strict=False):
        while newcomers and len(placed) < rank:
            placed.append(newcomers.pop(0))
        placed.append(node)
    return placed + newcomers


def _beyond(wanted: int | None, size: int) -> tuple[bool, int]:
    return (True, wanted) if wanted is not None and wanted >= size else (False, 0)
