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
    """Invariant: neither the newest snapshot nor the one being copied is in the slot that is written next.

    Nor is the last one that is known to be good, once ranks verify steps, nor one that has results and awaits its copy
    while another is copied. If these leave no slot, the newest is replaced.
    """

    def __init__(self) -> None:
        self.newest: HeldSlot | None = None
        self.pinned: HeldSlot | None = None
        self.awaits: HeldSlot | None = None
        """What is to be copied after the pinned one, and is not replaced by a newer one."""
        self._good: HeldSlot | None = None
        self._next: int | None = None  # the slot that was to be written after the last snapshot
        self.sequence = 0
        """Highest number of a snapshot so far."""

    @property
    def use(self) -> int:
        """The slot to write next."""
        kept = (self.newest, self.pinned, self.awaits, self._good)
        free = set(range(SLOTS)) - {held.slot for held in kept if held is not None}
        if not free:
            given_up = self.newest if self.newest != self.pinned else self.awaits
            assert given_up is not None
            return given_up.slot
        return min(free)

    def agreed(self) -> None:
        """Record that all ranks agree about the state so far: the newest snapshot is good, and kept until this is
        called again.
        """
        if self.newest is not None and self.newest.slot != self._next:
            self._good = self.newest

    def stored(self, held: HeldSlot) -> None:
        """Record a new snapshot."""
        if held.sequence > self.sequence:
            self.newest, self.sequence = held, held.sequence
        if self.awaits is not None and self.awaits.slot == held.slot:
            self.awaits = None
        self._next = self.use

    def seen(self, held: Iterable[HeldSlot]) -> None:
        """Record the slots' actual content: workers may have dropped snapshots, or not yet reported some."""
        there = [*held]
        self.newest = max(there, key=lambda one: one.sequence, default=None)
        if self._good not in there:
            self._good = None
        if self.awaits not in there:
            self.awaits = None
        self.sequence = max(self.sequence, self.newest.sequence if self.newest else 0)

    def pin(self) -> HeldSlot | None:
        """Keep the newest snapshot until :meth:`unpin`, and return it."""
        self.pinned = self.newest
        return self.pinned

    def pin_awaited(self) -> HeldSlot | None:
        """Keep the snapshot that awaits its copy until :meth:`unpin`, and return it."""
        self.pinned, self.awaits = self.awaits, None
        return self.pinned

    def unpin(self) -> None:
        self.pinned = None
