"""Which slot holds what: the agent's record of its node's snapshots. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_launch.contract import SLOTS


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """A snapshot in a slot; its sequence number increases with every snapshot of the node."""

    slot: int
    sequence: int
    step: int
    round: int


class SlotTable:
    """Invariant: neither the newest snapshot nor the one being copied is in the slot that is written next."""

    def __init__(self) -> None:
        self.newest: HeldSlot | None = None
        self.pinned: HeldSlot | None = None
        self.sequence = 0
        """Highest number of a snapshot so far."""

    @property
    def use(self) -> int:
        """The slot to write next."""
        taken = {held.slot for held in (self.newest, self.pinned) if held is not None}
        return min(set(range(SLOTS)) - taken)

    def stored(self, held: HeldSlot) -> None:
        """Record a new snapshot."""
        if held.sequence > self.sequence:
            self.newest, self.sequence = held, held.sequence

    def seen(self, held: Iterable[HeldSlot]) -> None:
        """Record the slots' actual content: workers may have dropped snapshots, or not yet reported some."""
        self.newest = max(held, key=lambda one: one.sequence, default=None)
        self.sequence = max(self.sequence, self.newest.sequence if self.newest else 0)

    def pin(self) -> HeldSlot | None:
        """Keep the newest snapshot until :meth:`unpin`, and return it."""
        self.pinned = self.newest
        return self.pinned

    def unpin(self) -> None:
        self.pinned = None
