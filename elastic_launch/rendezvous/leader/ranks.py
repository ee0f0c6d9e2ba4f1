"""The members of the next round, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.record import Round


def choose(nodes: Sequence[Node], last: Round, limit: int) -> list[Node]:
    """Return the members of the next round in rank order, at most ``limit`` of the nodes.

    Survivors keep their order. Other nodes follow in order of arrival, so they are the first to be left out if there
    are too many nodes. Then each node that asks for an existing rank gets it, earlier nodes in that order first, and
    the others fill the gaps.

    Args:
        last: the previous round; an agent that was restarted since then counts as another.
    """

    def seniority(node: Node) -> tuple[bool, int, int]:
        rank = last.index(node.hello.node_id, node.hello.incarnation)
        return rank is None, rank or 0, node.arrival

    order = sorted(nodes, key=seniority)[:limit]
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


def _beyond(wanted: int | None, size: int) -> tuple[bool, int]:
    return (True, wanted) if wanted is not None and wanted >= size else (False, 0)
