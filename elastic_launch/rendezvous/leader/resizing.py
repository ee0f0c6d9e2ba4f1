"""Whether to enlarge the running round, for waiting nodes or workers, and which of them wait without effect.

A member may take part with only some of its workers, while the others start ahead. It offers them once they are there:
they replace workers that the run had, and a round is drained for them without ``resize_delay``, which is for nodes that
arrive one after the other.

A larger world is not worth waiting for when the work is almost done.

A round of w workers needs another T seconds, which is T * w seconds of one worker's work. If the speed is proportional
to the number of workers, W workers need T * w / W, so the larger round saves T * (1 - w / W). A resize costs, once,
the time from its order until the workers of the new round train. It pays off if it saves more than it costs. If the
speed grows less than proportionally, it saves less: so the rule skips no resize that would have paid off.
"""

from __future__ import annotations

import math
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
from elastic_launch.rendezvous.record import Round

NOT_WAITING = ACTIVE | LEAVING | BARRED
"""Flags of nodes that do not wait for a round, or may not take part in one."""

_UNPREPARED = NOT_WAITING | IMPORTING | EXCLUDED


DEFAULT_COST = 5.0
"""Assumed cost of a resize in seconds before the first one: processes start, import torch, meet, and restore."""

DEFAULT_LIVE_COST = 1.0
"""The same if all workers are live: they keep their processes, and new ones have started before."""


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


def saved(remaining: float, workers: int, larger: int) -> float:
    """Return the seconds that a round of ``larger`` workers saves.

    Args:
        remaining: seconds that the current round of ``workers`` still needs.
    """
    return max(0.0, remaining * (1.0 - workers / larger)) if larger > 0 else 0.0


class ResizePayoff:
    """The known remaining time of a round and cost of a resize, by the leader's clock.

    Attributes:
        live: whether the workers of the last round in which all trained are live.
    """

    def __init__(self) -> None:
        self.live = False
        self._costs = {False: DEFAULT_COST, True: DEFAULT_LIVE_COST}
        self._ordered_at: float | None = None
        self._ends_at: float | None = None

    def formed(self, resize_at: float | None) -> None:
        """Record that a round was formed; ``resize_at`` is when its resize was ordered, if it is the result of one."""
        self._ordered_at, self._ends_at = resize_at, None

    @property
    def cost(self) -> float:
        """Seconds that the last resize of such workers took from its order until all of them trained."""
        return self._costs[self.live]

    def trains(self, now: float, *, live: bool) -> None:
        """Record that all workers of the round train, and whether all of them are live."""
        self.live = live
        if self._ordered_at is not None:
            self._costs[live] = now - self._ordered_at
            self._ordered_at = None

    def told(self, remaining: float | None, now: float) -> None:
        """Record a member's estimate of the seconds that the round still needs; None if it is not known."""
        if remaining is not None and not (math.isfinite(remaining) and remaining >= 0):
            remaining = None  # another node's word
        self._ends_at = None if remaining is None else now + remaining

    def remaining(self, now: float) -> float | None:
        """Seconds that the round still needs; None if unknown."""
        return None if self._ends_at is None else max(0.0, self._ends_at - now)

    def pays(self, workers: int, larger: int, now: float) -> bool:
        """Whether a resize from ``workers`` to ``larger`` workers pays off; True if the remaining time is unknown."""
        remaining = self.remaining(now)
        return remaining is None or saved(remaining, workers, larger) > self.cost


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
