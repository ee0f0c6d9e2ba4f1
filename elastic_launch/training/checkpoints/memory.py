"""Snapshots in the node's memory: taken every few steps, at a cost of about a hundredth of the training's time.

One worker of each node writes them into slots that its agent made, so they outlive workers. After a fault the ranks
agree on the newest one that any node holds, and who has it gives it to those who have not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch import faults, snapshot
from elastic_launch.contract import Stored
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter, read_meta, read_state
from elastic_launch.snapshot.room import free_memory
from elastic_launch.snapshot.storage.shares import nonce_of
from elastic_launch.training.checkpoints.snapshot_interval import Cost, Rhythm
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.exchange import broadcast_state
from elastic_launch.training.ranks.world import World

__all__ = ["MemorySnapshots", "Newest", "Target", "newest", "restore", "settled"]

_log = logging.getLogger(__name__)

RESERVE = 0.1
"""Share of the free memory that snapshots leave alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a snapshot is to be copied for good.

    Attributes:
        nodes: that copy it together if it is large enough; 1: this one alone.
        node: this one's rank among them.
        split: bytes from which it is.
        drawn: random, the same on all of them.
    """

    directory: str = ""
    keep: int = 1
    now: bool = False
    owner: str = ""
    nodes: int = 1
    node: int = 0
    split: int = 0
    drawn: int = 0

    def stored(self, slot: int, sequence: int, step: int, round: int, size: int) -> Stored:
        """Return what the agent is told of a snapshot with so many bytes of tensors."""
        shares = self.nodes if self.now and size >= self.split else 1
        if shares == 1 and self.node > 0:
            return Stored(slot, sequence, step, round, False, "", 1)
        stored = Stored(slot, sequence, step, round, self.now, self.directory, self.keep, self.owner)
        if shares == 1:
            return stored
        return replace(stored, shares=shares, share=self.node, nonce=nonce_of(self.drawn, round, step))


@dataclass(frozen=True, slots=True)
class _Written:
    seconds: float
    fresh: bool  # into memory that had to be found first
    json: int  # bytes beside the tensors


class MemorySnapshots:
    """This node's snapshots, as one of its workers sees them.

    Args:
        link: to the agent, which has the slots.
    """

    def __init__(self, link: AgentLink, world: World) -> None:
        self.rhythm = Rhythm()
        self._link = link
        self._world = world
        self._slots = link.slots
        self._writers: dict[int, SlotWriter] = {}
        self._sequence = link.sequence
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[_Written] | None = None
        self._stall = 0.0
        self._json = 0  # bytes of the last snapshot beside its tensors
        self._torn = False
        self._left: int | None = None  # a slot that was to be written, and is empty
        self.writes = world.local_rank == 0 and bool(self._slots)
        """Whether this worker is its node's writer; not any more once there is no room."""

    def newest(self, training: int) -> tuple[Slot, Header] | None:
        """Return the newest snapshot of a training that this node holds."""
        self._link.wait_fetched()
        self._sequence = max(self._sequence, self._link.sequence)
        found = [(header, slot) for slot in self._slots if (header := slot.header()) is not None]
        mine = [(header, slot) for header, slot in found if header.training == training]
        header, slot = max(mine, key=lambda pair: (pair[0].round, pair[0].step, pair[0].sequence), default=(None, None))
        return None if header is None or slot is None else (slot, header)

    def store(
        self,
        state: dict[str, Any],
        meta: dict[str, Any],
        *,
        step: int,
        round: int,
        training: int,
        stays: Callable[[Tensor], bool],
        target: Target,
        wait: bool,
        patient: bool = False,
        spent: float = 0.0,
    ) -> bool:
        """Begin to take a snapshot, in a thread; :meth:`settle` ends it.

        Args:
            stays: whether a tensor keeps its values until then.
            wait: end it here.
            patient: wait for an agent that is slow, for as long as for a last checkpoint.
            spent: seconds that it took to ask for the state.

        Returns:
            False if nothing was taken: there is no room for it, then or later, or the agent does not answer.
        """
        self.settle()
        began = time.monotonic()
        wait = wait or self._torn
        draft = SlotDraft(state, meta, stays, watch=not wait)
        self.writes = self._has_room(draft.tensor_bytes + self._json)
        number = self._next_slot(patient) if self.writes else None
        if number is None:
            return False
        writer = self._writers.setdefault(number, SlotWriter(self._slots[number]))
        self._sequence += 1
        header = Header(self._sequence, round, step, training, 0, 0, 0)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing = self._pool.submit(self._write, draft, writer, number, header, target)
        self._stall = spent + time.monotonic() - began
        if wait:
            self.settle()
        return True

    def _write(self, draft: SlotDraft, writer: SlotWriter, number: int, header: Header, target: Target) -> _Written:
        """Write a snapshot and tell the agent; in a thread."""
        began = time.monotonic()
        try:
            fresh = writer.write(
                draft, sequence=header.sequence, round=header.round, step=header.step, training=header.training
            )
        except snapshot.TornSnapshotError:
            self._left = number
            raise
        self._link.stored(target.stored(number, header.sequence, header.step, header.round, draft.layout.size))
        return _Written(time.monotonic() - began, fresh, draft.bytes - draft.tensor_bytes)

    def settle(self) -> None:
        """Wait until the snapshot that is being taken is: only then what it holds may change.

        Raises:
            OSError: if there is no memory for it after all.
            UnsupportedStateError: if it is too large for the format.
            TornSnapshotError: if the script has changed what was being copied. From now on a snapshot is waited for
                before the script goes on.
        """
        if self._writing is None:
            return
        began = time.monotonic()
        writing, self._writing = self._writing, None
        try:
            written = writing.result()
        except snapshot.TornSnapshotError:
            self._torn = True
            self.rhythm.undone()
            raise
        waited = time.monotonic() - began
        self._json = written.json
        beside = max(0.0, written.seconds - waited)
        self.rhythm.cost(Cost(self._stall + waited, beside), fresh=written.fresh)

    def drop_above(self, position: tuple[int, int], training: int) -> None:
        """Drop what this node holds of a training that is newer than a round and step."""
        for slot in self._slots if self._world.local_rank == 0 else []:
            header = slot.header()
            if header is not None and header.training == training and (header.round, header.step) > position:
                slot.begin()

    def _next_slot(self, patient: bool) -> int | None:
        """Return the slot to write, None if the agent does not say."""
        left, self._left = self._left, None
        return left if left is not None else self._link.slot_to_use(patient=patient)

    def close(self) -> None:
        """Give up what is being taken, and unmap."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _has_room(self, size: int) -> bool:
        """Whether the memory that all slots take with snapshots of a size is there, or taken already."""
        grows = max(0, size * len(self._slots) - sum(slot.allocated for slot in self._slots))
        free = free_memory() if grows else 0
        if grows > (1 - RESERVE) * free:
            _log.warning(
                "no snapshots in memory: %d of %.2f GiB each need %.2f GiB more, and %.2f GiB are free; a fault costs "
                "the steps since the last checkpoint",
                len(self._slots),
                size / 2**30,
                grows / 2**30,
                free / 2**30,
            )
            return False
        return True


def settled(optimizer: Any, parameters: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Return whether a tensor is one that only the optimizer's step changes: a parameter, or of the optimizer's state.

    By where it lies in memory: a ``state_dict`` gives other objects than the parameters themselves.
    """

    @cache
    def known() -> set[int]:
        """Found when first asked for: at most boundaries nobody asks."""
        found = {parameter.data_ptr() for parameter in parameters}
        for group in getattr(optimizer, "param_groups", []):
            found |= {parameter.data_ptr() for parameter in group["params"]}
        for values in getattr(optimizer, "state", {}).values():
            if isinstance(values, dict):
                found |= {v.data_ptr() for v in values.values() if isinstance(v, Tensor) and v.numel() > 1}
        return found - {0}

    return lambda tensor: tensor.data_ptr() in known()


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest snapshot that any node holds, as all ranks agree.

    Attributes:
        position: its round and step.
        mine: this node's, if it is that one.
        holder: first rank whose node has it.
        everywhere: whether all nodes do.
    """

    position: tuple[int, int]
    mine: tuple[Slot, Header] | None
    holder: int
    everywhere: bool


def newest(memory: MemorySnapshots | None, world: World, training: int) -> Newest | None:
    """Return the newest snapshot of a training, None if no node has one; called by all ranks."""
    found = memory.newest(training) if memory is not None else None
    mine = [0, 0] if found is None else [found[1].round, found[1].step]
    everybody = [mine]
    if world.world_size > 1:
        gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(world.world_size)]
        dist.all_gather(gathered, torch.tensor(mine, dtype=torch.int64))
        everybody = [[int(x) for x in entry] for entry in gathered]
    best = max(everybody)
    if best == [0, 0]:
        return None
    everywhere = all(entry == best for entry in everybody)
    return Newest((best[0], best[1]), found if mine == best else None, everybody.index(best), everywhere)


def restore(newest: Newest, world: World) -> tuple[Any, dict[str, Any]]:
    """Return a snapshot's state and meta; called by all ranks."""
    whole: Any = None
    if newest.mine is not None:
        slot, header = newest.mine
        whole = {"state": read_state(slot, header), "meta": read_meta(slot, header)}
    faults.reached("restore", newest.position[1])
    if not newest.everywhere:
        whole = broadcast_state(whole if world.rank == newest.holder else None, newest.holder, world.rank)
    return whole["state"], dict(whole["meta"])
