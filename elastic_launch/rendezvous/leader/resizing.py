"""Whether to enlarge the running round for waiting nodes, and which nodes wait without effect."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_launch.events.types import ResizeSkipped
from elastic_launch.rendezvous.leader.resize_payoff import ResizePayoff, saved
from elastic_launch.rendezvous.leader.types import Node

__all__ = ["Resizing", "prepared", "waiting"]


def waiting(nodes: Mapping[str, Node]) -> list[Node]:
    """Return the nodes that wait for a round."""
    return [node for node in nodes.values() if not node.active and not node.leaving]


def prepared(nodes: Mapping[str, Node]) -> list[Node]:
    """Return the waiting nodes whose workers could begin at once, without waiting for imports."""
    return [node for node in waiting(nodes) if not node.importing]


class Resizing:
    """Decides whether the leader drains a round for a larger one.

    Args:
        nodes: the leader's live mapping of nodes by node id.

    Attributes:
        wanted: whether a user ordered the size that the running round is to get.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
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
        members = [node for node in self._nodes.values() if node.active]
        finishing = any(node.done for node in members)
        return bool(prepared(self._nodes)) and len(members) == everybody and everybody < max_nodes and not finishing

    def pays(self, max_nodes: int, now: float) -> bool:
        """Whether a resize pays off, or was ordered regardless of its cost."""
        return self.wanted or self.prices.pays(*self._sizes(max_nodes), now)

    def skip(self, max_nodes: int, now: float) -> ResizeSkipped | None:
        """Return the event for a resize that does not pay off; None if all waiting nodes have been informed."""
        names = tuple(sorted(node.hello.node_id for node in prepared(self._nodes)))
        if set(names) <= set(self._skipped):
            return None
        self._skipped = names
        remaining = self.prices.remaining(now) or 0.0
        saves, cost = saved(remaining, *self._sizes(max_nodes)), self.prices.cost
        return ResizeSkipped(names, round(remaining, 3), round(saves, 3), round(cost, 3))

    def _sizes(self, max_nodes: int) -> tuple[int, int]:
        """Workers of the running round, and of a round resized for the waiting nodes."""
        members = [node.hello.workers for node in self._nodes.values() if node.active]
        joining = sorted(prepared(self._nodes), key=lambda node: node.arrival)[: max_nodes - len(members)]
        return sum(members), sum(members) + sum(node.hello.workers for node in joining)
