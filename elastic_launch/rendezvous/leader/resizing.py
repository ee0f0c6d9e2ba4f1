"""Whether to enlarge the running round, for waiting nodes or workers, and which of them wait without effect.

A member may take part with only some of its workers, while the others start ahead. It offers them once they are there:
they replace workers that the run had, and a round is drained for them without ``resize_delay``, which is for nodes that
arrive one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_launch.events.types import ResizeSkipped
from elastic_launch.rendezvous.leader.nodes import (
    ACTIVE,
    AHEAD,
    BARRED,
    DONE,
    EXCLUDED,
    IMPORTING,
    LEAVING,
    MEMBER,
    NEAR,
    REGAINS,
    ConnectedNodes,
    Node,
)
from elastic_launch.rendezvous.leader.resize_payoff import ResizePayoff, saved
from elastic_launch.rendezvous.record import Round

NOT_WAITING = ACTIVE | LEAVING | BARRED
"""Flags of nodes that do not wait for a round, or may not take part in one."""

_UNPREPARED = NOT_WAITING | IMPORTING | EXCLUDED


def waiting(nodes: ConnectedNodes) -> list[Node]:
    """Return the nodes that wait for a round, and may take part in one."""
    return nodes.where(lacks=NOT_WAITING)


def prepared(nodes: ConnectedNodes) -> list[Node]:
    """Return the waiting nodes whose workers could begin at once, without waiting for imports or a start ahead.

    Nodes that are left out for now are not among them, nor those that have not connected to the others.
    """
    return nodes.where(NEAR, lacks=_UNPREPARED)


def joinable(nodes: ConnectedNodes) -> list[Node]:
    """Return the waiting nodes that had no part in the last round, could begin, and were not ordered to start ahead."""
    return nodes.where(NEAR, lacks=_UNPREPARED | AHEAD | MEMBER)


def regained(nodes: ConnectedNodes, formed: Round) -> list[Node]:
    """Return the members of a round that could take part with workers that have no part in it, in rank order."""
    return sorted(
        nodes.where(ACTIVE | REGAINS), key=lambda node: formed.index(node.hello.node_id, node.hello.incarnation) or 0
    )


class Resizing:
    """Decides whether the leader drains a round for a larger one.

    Args:
        nodes: the leader's, live.

    Attributes:
        wanted: whether a user ordered the size that the running round is to get.
    """

    def __init__(self, nodes: ConnectedNodes) -> None:
        self.prices = ResizePayoff()
        self.wanted = False
        self._nodes = nodes
        self._skipped: tuple[str, ...] = ()  # nodes that were informed that no resize is made for them

    def formed(self, resize_at: float | None) -> None:
        """Record that a round was formed; ``resize_at`` is when its resize was ordered, if it is the result of one."""
        self.prices.formed(resize_at)
        self._skipped, self.wanted = (), False

    def has_room(self, everybody: int, max_nodes: int) -> bool:
        """Whether a running round of ``everybody`` members may be resized: not once some members are done.

        Nor before all members have returned to a new leader: until then the round cannot be drained.
        """
        nodes = self._nodes
        if everybody >= max_nodes or not nodes.count(NEAR, lacks=_UNPREPARED):
            return False
        return nodes.count(ACTIVE) == everybody and not nodes.count(ACTIVE | DONE)

    def pays(self, formed: Round, max_nodes: int, now: float, joining: Sequence[Node] | None = None) -> bool:
        """Whether a resize of the running round pays off, or was ordered regardless of its cost.

        Args:
            joining: the nodes to resize it for; None: those that could begin at once.
        """
        return self.wanted or self.prices.pays(*self._sizes(formed, max_nodes, joining), now)

    def skip(self, skipped: list[Node], formed: Round, max_nodes: int, now: float) -> ResizeSkipped | None:
        """Return the event for a resize that does not pay off; None if all those nodes have been informed."""
        names = tuple(sorted(node.hello.node_id for node in skipped))
        if set(names) <= set(self._skipped):
            return None
        self._skipped = names
        remaining = self.prices.remaining(now) or 0.0
        saves, cost = saved(remaining, *self._sizes(formed, max_nodes)), self.prices.cost
        return ResizeSkipped(names, round(remaining, 3), round(saves, 3), round(cost, 3))

    def _sizes(self, formed: Round, max_nodes: int, joining: Sequence[Node] | None = None) -> tuple[int, int]:
        """Workers of the running round, and of a round resized for what waits."""
        members = self._nodes.where(ACTIVE)
        there = prepared(self._nodes) if joining is None else joining
        first = sorted(there, key=lambda node: node.arrival)[: max(0, max_nodes - len(members))]
        return formed.world_size, sum(node.workers for node in [*members, *first])
