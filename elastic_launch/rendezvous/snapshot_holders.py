"""Who holds which snapshot, and who serves his to the next round: what nodes and leader say of it, and one pure rule.

A node tells with each stop which snapshot its memory holds. One that leaves after a drain tells also where it serves
it, and stays until the leader releases it: at once if nobody needs it, else when the next round trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MOST_SOURCES", "HeldSnapshot", "Released", "SnapshotSource", "sources_for"]

MOST_SOURCES = 4
"""Sources that a round is told of; all have the same."""


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """The newest snapshot in a node's memory.

    Attributes:
        round, step: which one it is, as the ranks agree on it: ordered by both, never by the step alone.
        port: where the node serves it to others; 0 if it does not.
    """

    round: int
    step: int
    port: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """What snapshots are compared by."""
        return self.round, self.step


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A node that serves a snapshot; see Held."""

    address: str
    port: int
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Released:
    """This node left, and nobody needs what it serves any more (leader to node)."""

    term: int


def sources_for(
    members: Iterable[HeldSnapshot | None], leavers: Iterable[tuple[str, HeldSnapshot | None]]
) -> tuple[SnapshotSource, ...]:
    """Return where the members of a round get the newest snapshot from; nothing if one of them has it.

    Args:
        members: what each of them holds.
        leavers: address of each node that leaves, and what it holds.
    """
    served = [(address, held) for address, held in leavers if held is not None and held.port]
    newest = max((held.order for _, held in served), default=(0, 0))
    if not served or any(held is not None and held.order >= newest for held in members):
        return ()
    found = [SnapshotSource(address, held.port, *newest) for address, held in served if held.order == newest]
    return tuple(found[:MOST_SOURCES])
