"""Which nodes serve their snapshot to the next round, which of those that have left stay for that, and which one saves.

Each time its workers stop, a node reports which snapshot its memory holds. A node that leaves after a drain also
reports where it serves the snapshot, and stays until the leader releases it: at once if no node needs the snapshot,
else when the next round trains.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_launch.rendezvous.leader.nodes import ACTIVE, LEAVING, ConnectedNodes, Node
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.wire.messages import SnapshotSource

MOST_SOURCES = 4
"""Most sources that a round receives; all serve the same snapshot."""


def no_longer_needed(nodes: ConnectedNodes) -> list[Node]:
    """Return the nodes to release once no node needs a snapshot any more."""
    return [node for node in nodes.where(LEAVING, lacks=ACTIVE) if _serves(node) and not node.released]


def is_needed(nodes: ConnectedNodes, incarnation: str) -> bool:
    """Whether a leader whose own node, with that incarnation, leaves is needed until the next round trains."""
    return any(_serves(node) for node in nodes.values() if node.hello.incarnation == incarnation)


def sources(nodes: ConnectedNodes, members: Iterable[Node]) -> tuple[SnapshotSource, ...]:
    """Return the sources of the newest snapshot for the members of the next round; none if one of them has it."""
    leavers = [(node.hello.address, node.held) for node in nodes.where(LEAVING)]
    served = [(address, held) for address, held in leavers if held is not None and held.port]
    if not served:
        return ()
    newest = max(held.order for _, held in served)
    if any(node.held is not None and node.held.order >= newest for node in members):
        return ()
    found = [SnapshotSource(address, held.port, *newest) for address, held in served if held.order == newest]
    return tuple(found[:MOST_SOURCES])


def saver(nodes: ConnectedNodes, last: Round) -> str:
    """Return the id of the node that saves the newest state if no round follows; empty if no node is known to hold one.

    Of several that hold it, this is the first by its rank in the last round, whose first member saves usually.
    """

    def preference(node: Node) -> tuple[bool, tuple[int, int], int]:
        rank = last.index(node.hello.node_id, node.hello.incarnation)
        held = (0, 0) if node.held is None else node.held.order
        # What a node holds whose workers still run is not known.
        return node.active, (0, 0) if node.active else held, -len(last.members) if rank is None else -rank

    holders = [node for node in nodes.where(lacks=LEAVING) if (node.active or node.held is not None)]
    return max(holders, key=preference).hello.node_id if holders else ""


def _serves(node: Node) -> bool:
    return node.held is not None and node.held.port != 0
