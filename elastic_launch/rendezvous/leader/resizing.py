"""Whether the running round is to become larger for nodes that wait, and who waits in vain."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_launch.events.types import ResizeSkipped
from elastic_launch.rendezvous.leader.resize_payoff import ResizePayoff, saved
from elastic_launch.rendezvous.leader.types import Node

__all__ = ["Resizing", "prepared", "waiting"]


def waiting(nodes: Mapping[str, Node]) -> list[Node]:
    """Return who waits for a round."""
    return [node for node in nodes.values() if not node.active and not node.leaving]


def prepared(nodes: Mapping[str, Node]) -> list[Node]:
    """Return those of the waiting whose workers would begin at once: the others would stand still for their imports."""
    return [node for node in waiting(nodes) if not node.importing]


class Resizing:
    """What a leader reckons before it drains a round for a larger one.

    Args:
        nodes: the leader's, by node id, as they are at each call.

    Attributes:
        wanted: whether somebody has ordered the size that the running round is to get.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.prices = ResizePayoff()
        self.wanted = False
        self._nodes = nodes
        self._skipped: tuple[str, ...] = ()  # who was told that no resize is made for it

    def formed(self, resize_at: float | None) -> None:
        """A round was formed; for a resize that was ordered then, if it is one."""
        self.prices.formed(resize_at)
        self._skipped, self.wanted = (), False

    def has_room(self, everybody: int, max_nodes: int) -> bool:
        """Whether a running round of so many members should be resized: not when some are done already.

        Nor before a new leader has all members back: the round could not be drained.
        """
        members = [node for node in self._nodes.values() if node.active]
        finishing = any(node.done for node in members)
        return bool(prepared(self._nodes)) and len(members) == everybody and everybody < max_nodes and not finishing

    def pays(self, max_nodes: int, now: float) -> bool:
        """Whether a resize pays, or is wanted whatever it costs."""
        return self.wanted or self.prices.pays(*self._sizes(max_nodes), now)

    def skip(self, max_nodes: int, now: float) -> ResizeSkipped | None:
        """Return what is to be said of a resize that does not pay; None if all who wait have been told."""
        names = tuple(sorted(node.hello.node_id for node in prepared(self._nodes)))
        if set(names) <= set(self._skipped):
            return None
        self._skipped = names
        remaining = self.prices.remaining(now) or 0.0
        saves, cost = saved(remaining, *self._sizes(max_nodes)), self.prices.cost
        return ResizeSkipped(names, round(remaining, 3), round(saves, 3), round(cost, 3))

    def _sizes(self, max_nodes: int) -> tuple[int, int]:
        """Workers of the running round, and of one that is resized for the nodes that wait."""
        members = [node.hello.workers for node in self._nodes.values() if node.active]
        joining = sorted(prepared(self._nodes), key=lambda node: node.arrival)[: max_nodes - len(members)]
        return sum(members), sum(members) + sum(node.hello.workers for node in joining)
