"""Which node holds which snapshot, and which nodes serve theirs to the next round: the messages, and one pure rule.

Each time its workers stop, a node reports which snapshot its memory holds. A node that leaves after a drain also
reports where it serves the snapshot, and stays until the leader releases it: at once if no node needs the snapshot,
else when the next round trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MOST_SOURCES", "HeldSnapshot", "Released", "SnapshotSource", "sources_for"]

MOST_SOURCES = 4
"""Most sources that a round receives; all serve the same snapshot."""


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """The newest snapshot in a node's memory.

    Attributes:
        round, step: identify the snapshot across ranks. Snapshots are ordered by both, never by the step alone.
        port: where the node serves it to others; 0 if it does not.
    """

    round: int
    step: int
    port: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The key by which snapshots are compared."""
        return self.round, self.step


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A node that serves a snapshot; see :class:`HeldSnapshot`."""

    address: str
    port: int
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Released:
    """Order to a node that left: its snapshot is no longer needed (leader to node)."""

    term: int


def sources_for(
    members: Iterable[HeldSnapshot | None], leavers: Iterable[tuple[str, HeldSnapshot | None]]
) -> tuple[SnapshotSource, ...]:
    """Return the sources of the newest snapshot for the members of a round; none if one of the members has it.

    Args:
        members: the snapshot that each member holds.
        leavers: the address of each leaving node, and the snapshot that it holds.
    """
    served = [(address, held) for address, held in leavers if held is not None and held.port]
    newest = max((held.order for _, held in served), default=(0, 0))
    if not served or any(held is not None and held.order >= newest for held in members):
        return ()
    found = [SnapshotSource(address, held.port, *newest) for address, held in served if held.order == newest]
    return tuple(found[:MOST_SOURCES])
