"""Nodes that have left and still serve their snapshot; see :mod:`elastic_launch.rendezvous.snapshot_holders`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic_launch.rendezvous.leader.types import Node
from elastic_launch.rendezvous.snapshot_holders import SnapshotSource, sources_for

__all__ = ["is_needed", "no_longer_needed", "sources"]


def no_longer_needed(nodes: Mapping[str, Node]) -> list[Node]:
    """Return the nodes to release once no node needs a snapshot any more."""
    return [x for x in nodes.values() if x.leaving and not x.active and _serves(x) and not x.released]


def is_needed(nodes: Mapping[str, Node], incarnation: str) -> bool:
    """Whether a leader whose own node, with that incarnation, leaves is needed until the next round trains."""
    return any(_serves(node) for node in nodes.values() if node.hello.incarnation == incarnation)


def sources(nodes: Mapping[str, Node], members: Iterable[Node]) -> tuple[SnapshotSource, ...]:
    """Return the sources of the newest snapshot for the members of the next round."""
    leavers = [(node.hello.address, node.held) for node in nodes.values() if node.leaving]
    return sources_for([node.held for node in members], leavers)


def _serves(node: Node) -> bool:
    return node.held is not None and node.held.port != 0
