"""Snapshots in the node's memory, taken every few steps at a cost of about 1 % of the training's time.

One worker of each node writes them into slots that its agent made, so they outlive the workers. After a fault, the
ranks agree on the newest snapshot that any node holds, and a rank that has it sends it to those that do not.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from elastic_launch import faults, snapshot
from elastic_launch.contract import CopyJob, NoSnapshots, Restored, Stored
from elastic_launch.shared_progress import Activity
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter
from elastic_launch.snapshot.memory.staging import Stagings
from elastic_launch.snapshot.room import LEFT_OUT, MORE_MEMORY, lacking
from elastic_launch.training.checkpoints import split, split_restore
from elastic_launch.training.checkpoints.kept_shards import KEPT, KeptShards
from elastic_launch.training.checkpoints.snapshot_interval import Cost, Rhythm
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.exchange import broadcast_state, bytes_of_all, numbers_of_all
from elastic_launch.training.ranks.spreading import Cuts, in_place, spread_state
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

FREE_TIMEOUT = 300.0
"""Seconds that training waits until the memory of snapshots is free: a copy that hangs is given up before."""

LOOK_EVERY = 0.02
"""Seconds between two looks whether it is."""

Route = Callable[[CopyJob, int], CopyJob]
"""Completes a job without a directory: durable storage to copy a snapshot to, with that many bytes of tensors."""


@dataclass(frozen=True, slots=True)
class _Written:
    seconds: float
    fresh: bool  # into memory that had to be allocated first
    json: int  # bytes besides the tensors


class MemorySnapshots:
    """This node's snapshots, as seen by one of its workers."""

    def __init__(self, link: AgentLink, world: World) -> None:
        self.rhythm = Rhythm()
        self._link = link
        self._world = world
        self._slots = link.slots
        self._writers: dict[int, SlotWriter] = {}
        self._stagings = Stagings()
        self._sequence = link.sequence
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[_Written] | None = None
        self._stall = 0.0
        self._json = 0  # bytes of the last snapshot besides its tensors
        self._waits = False  # whether the training waits for each snapshot, of which no tensor is cloned then
        self._left: int | None = None  # a slot that was reserved for writing but is empty
        self._dropped: int | None = None  # one whose snapshot was dropped; the agent may take it for the newest
        # Why this worker asks for snapshots that are split; empty: it does not.
        self._split = "--split-snapshots was given" if link.split else ""
        self._told = False  # whether it was said
        self.writes = self._may_write
        """Whether this worker writes its node's snapshots; False once there is no room."""
        self.shards: KeptShards | None = None
        """What this process has kept at a planned change, until a step of the next round is done."""
        self.decides = world.rank == 0 and self.writes
        """Whether this worker's costs decide when all take snapshots: the first rank that writes any."""

    @property
    def writes_last(self) -> bool:
        """Whether this worker writes its node's snapshot before it exits: others do if the node's first one is gone."""
        return self.writes or (not self._world.first_on_node and self._link.keeps and self._link.writes_last)

    @property
    def _may_write(self) -> bool:
        return self._world.first_on_node and bool(self._slots) and self._link.writes

    def move(self, world: World) -> None:
        """Continue in another round; called without a snapshot under way."""
        before, self._world = self._world, world
        self._dropped = None
        if world.first_on_node != before.first_on_node or not self._link.writes:
            self.writes = self._may_write
        self._sequence = max(self._sequence, self._link.sequence)

    def restored(self, training: int) -> None:
        """If no snapshots are written on this node, wait until the agent has freed those that this training had.

        It first copies the newest to durable storage. In its memory, the next step might be killed for lack of it.
        """
        link = self._link
        if link.writes:
            return
        link.say(Restored(training))
        deadline = time.monotonic() + FREE_TIMEOUT
        with link.doing(Activity.PAUSE, FREE_TIMEOUT, "the copy of the newest snapshot"):
            while any(header.training <= training for slot in self._slots if (header := slot.header()) is not None):
                if link.suspending or link.stop_asked() or not link.alive or time.monotonic() > deadline:
                    return
                time.sleep(LOOK_EVERY)

    def newest(self, training: int) -> tuple[Slot, Header] | None:
        """Return the newest snapshot of a training that this node holds."""
        return next(iter(self.held(training)), None)

    def held(self, training: int) -> list[tuple[Slot, Header]]:
        """Return the snapshots of a training that this node holds, the newest first."""
        self._link.wait_fetched()
        self._sequence = max(self._sequence, self._link.sequence)
        found = [(slot, header) for slot in self._slots if (header := slot.header()) is not None]
        mine = [(slot, header) for slot, header in found if header.training == training]
        return sorted(mine, key=lambda pair: (pair[1].position, pair[1].sequence), reverse=True)

    def vote(self, size: int, *, whole: bool = False) -> split.Votes:
        """Agree with all ranks whether the next snapshot is split among the nodes; called with none under way.

        So it is once a node has no room for whole ones, whose tensors have that size, or is told to, if at least three
        nodes write any. ``whole``: this one is better whole, if there is room for it alone.
        """
        why = self._split
        if self.writes and not why:
            why = self._lack(size + self._json, beside=size)
        if whole and not lacking(2 * (size + self._json), ""):  # it is gathered before it is written to its slot
            why = ""
        world, asks = self._world, self.writes and bool(why)
        mine = [world.node_rank, int(world.first_on_node), int(self.writes), int(asks)]
        votes = split.Votes.of(numbers_of_all(world, mine))
        if votes.split and asks and (why != self._split or (self.decides and not self._told)):
            self._split, self._told = why, True
            _log.warning(
                "from now on snapshots in memory are split among the nodes: %s. Each node keeps the shards of its "
                "ranks and of the next node's. A fault that takes two such nodes at once costs the steps since the "
                "last checkpoint",
                why,
            )
        return votes

    def choose(self) -> None:
        """Choose the rank that decides when all take snapshots, since another one writes none now; called by all."""
        writes = numbers_of_all(self._world, [int(self.writes)])
        self.decides = self.writes and not any(each for (each,) in writes[: self._world.rank])

    def store(
        self,
        state: dict[str, Any],
        meta: dict[str, Any],
        header: Header,
        *,
        stays: Callable[[Tensor], bool],
        route: Route,
        wait: bool,
        patient: bool = False,
        spent: float = 0.0,
        fits: bool = False,
    ) -> bool:
        """Start taking a snapshot in a thread; :meth:`settle` completes it.

        Args:
            header: what it is a snapshot of; the sequence number and the sizes follow.
            stays: whether a tensor keeps its values until then.
            wait: complete it before returning.
            patient: wait for a slow agent, for as long as for a last checkpoint.
            spent: seconds that capturing the state took.
            fits: whether there is known to be room for it.

        Returns:
            False if no snapshot is taken because there is no room, now or later, or the agent does not answer.
        """
        self.settle()
        began = time.monotonic()
        wait = wait or self._waits
        draft = None if wait else self._draft_beside(state, meta, stays)
        if draft is None:
            wait, draft = True, SlotDraft(state, meta, lambda tensor: True)
        if lack := "" if fits else self._lack(draft.tensor_bytes + self._json):
            self.give_up(lack, MORE_MEMORY)
            return False
        number = self._next_slot(patient)
        if number is None:
            return False
        self._stagings.prepare(draft.tensors.values())
        writer = self._writers.setdefault(number, SlotWriter(self._slots[number], self._stagings))
        self._sequence += 1
        header = replace(header, sequence=self._sequence)
        job = route(CopyJob(header.sequence, header.step, header.round), draft.tensor_bytes)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing = self._pool.submit(self._write, draft, writer, header, Stored(number, job))
        self._stall = spent + time.monotonic() - began
        if wait:
            self.settle()
        return True

    def _draft_beside(
        self, state: dict[str, Any], meta: dict[str, Any], stays: Callable[[Tensor], bool]
    ) -> SlotDraft | None:
        """Return what is written while the training goes on; None if a GPU has no memory for the clones in it."""
        try:
            return SlotDraft(state, meta, stays, watch=True)
        except torch.OutOfMemoryError as error:
            self._waits = True
            _log.warning(
                "there is no memory for the copies that a snapshot needs while the training goes on: %s. From now on "
                "the next step begins only when a snapshot is copied",
                str(error).partition("\n")[0].rstrip("."),
            )
            return None

    def _write(self, draft: SlotDraft, writer: SlotWriter, header: Header, stored: Stored) -> _Written:
        """Write a snapshot and report it to the agent; runs in a thread."""
        began = time.monotonic()
        try:
            fresh = writer.write(draft, header)
        except snapshot.TornSnapshotError:
            self._left = stored.slot
            raise
        self._link.say(stored)
        return _Written(time.monotonic() - began, fresh, draft.bytes - draft.tensor_bytes)

    def settle(self) -> None:
        """Wait until the current snapshot is complete; only then may the tensors in it change.

        Raises:
            OSError: if there is no memory for it after all.
            UnsupportedStateError: if it is too large for the format.
            TornSnapshotError: if the script changed tensors meanwhile. From then on it waits for each snapshot.
        """
        if self._writing is None:
            return
        began = time.monotonic()
        writing, self._writing = self._writing, None
        try:
            written = writing.result()
        except snapshot.TornSnapshotError:
            self._waits = True
            self.rhythm.undone()
            raise
        waited = time.monotonic() - began
        self._json = written.json
        beside = max(0.0, written.seconds - waited)
        self.rhythm.cost(Cost(self._stall + waited, beside), fresh=written.fresh)

    def drop_above(self, position: tuple[int, int, int], training: int) -> None:
        """Drop this node's snapshots of a training that are newer than a (round, step, phase)."""
        self._drop(training, lambda header: header.position > position)

    def drop_after(self, step: int, training: int) -> None:
        """Drop this node's snapshots of a training that are of a later step, whatever their round."""
        self._drop(training, lambda header: header.step > step)

    def _drop(self, training: int, chosen: Callable[[Header], bool]) -> None:
        for number, slot in enumerate(self._slots if self._world.first_on_node else []):
            header = slot.header()
            if header is not None and header.training == training and chosen(header):
                slot.begin()
                self._dropped = number

    def _next_slot(self, patient: bool) -> int | None:
        """Return the slot to write; None if the agent does not answer."""
        left, self._left = self._left, None
        if left is not None:
            return left
        number, dropped = self._link.slot_to_use(patient=patient), self._dropped
        self._dropped = None
        # The slot that the agent names may have the snapshot that training resumes from.
        return number if number is None or dropped is None else dropped

    def close(self) -> None:
        """Give up the current snapshot, and unmap the slots."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def give_up(self, cause: str, remedy: str = "") -> None:
        """Write no snapshots from now on, and say why."""
        self.writes = False
        _log.warning(LEFT_OUT, cause, f": {remedy}, or save more often" if remedy else "")
        self._link.say(NoSnapshots(cause))

    def _lack(self, size: int, beside: int = 0) -> str:
        """Return why the slots cannot all grow to snapshots of a size; empty if they can.

        ``beside`` are bytes that are needed besides while the first ones are taken.
        """
        grows = max(0, size * len(self._slots) - sum(slot.allocated for slot in self._slots))
        return lacking(grows + beside if grows else 0, f"{len(self._slots)} of {size / 2**30:.2f} GiB each need")


def settled(optimizer: Any, parameters: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Return a predicate: whether a tensor is a parameter or optimizer state, which change only after a step's passes.

    Tensors are compared by their memory, since a ``state_dict`` has other objects than the parameters themselves.
    """

    @cache
    def known() -> set[int]:
        """Computed on first use, since most boundaries do not need it."""
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
    """The newest state that is in memory anywhere, agreed on by all ranks."""

    position: tuple[int, int]  # its round and step
    phase: int  # see Header
    live: bool  # whether it is the state of a process that was suspended, and not a snapshot
    mine: split_restore.Held | None  # what this process or its node has of it, if anything; None if it is live
    holders: Sequence[int]  # the ranks that have it, themselves or on their nodes; the first sends it
    everywhere: bool  # whether all ranks have it
    passes: int = 0  # updated passes of the next step that it includes, if it is live
    suspect: bool = False  # whether a process has dropped later states, and what storage has of them is not restored
    parts: Mapping[int, split.SnapshotPart] = field(default_factory=dict)  # what its holders have, if it is split
    snapshot: int = -1  # the step of the newest snapshot, if processes have kept this state; -1: there is none


def newest(
    memory: MemorySnapshots,
    world: World,
    training: int,
    live: Sequence[tuple[int, int, int]] = (),
    suspect: bool = False,
    size: int = 1,
) -> Newest | None:
    """Return the newest state of a training in memory; None if there is none. Called by all ranks.

    Args:
        live: round, step and updated passes of this process' own state, if it was suspended, and other positions with
            the same state; of equal ones, a live state is taken.
        suspect: whether this process has dropped later states, see :class:`Newest`.
        size: ranks of a replica, each of which has only a part of a live state, and the same one in all replicas.
    """
    held: list[split_restore.Held] = [split.InSlot(*each) for each in memory.held(training)]
    if memory.shards is not None and memory.shards.training == training:
        held.append(memory.shards)
    parts = [each.part for each in held]
    mine = {
        "writes": memory.writes,
        "suspect": suspect,
        "live": live,
        "held": [[*each.position, part.world_size, part.ranks] for each, part in zip(held, parts, strict=True)],
    }
    everybody = [json.loads(each) for each in bytes_of_all(world, json.dumps(mine).encode())]
    memory.decides = memory.writes and not any(each["writes"] for each in everybody[: world.rank])
    suspect = any(each["suspect"] for each in everybody)
    lives = [{tuple(position) for position in each["live"]} for each in everybody]
    # By rank, what its node has of which snapshot. The newest comes last, as it is taken, if two have one position.
    kept = [{(a, b, c): split.SnapshotPart(tuple(x), n) for a, b, c, n, x in each["held"][::-1]} for each in everybody]
    newest_live = _newest_live(lives, size)
    position = _newest_complete(kept, (*newest_live, EVALUATED), warn=world.rank == 0)
    if position is None:
        number, step, passes = newest_live
        holders = [rank for rank, each in enumerate(lives) if newest_live in each]
        is_everywhere = len(holders) == len(lives)
        # A process that has not done its evaluation yet does it with the others.
        if not number and not step:
            return None
        return Newest((number, step), EVALUATED, True, None, holders, is_everywhere, passes, suspect)
    found = {rank: each[position] for rank, each in enumerate(kept) if position in each}
    whole = [rank for rank, part in found.items() if not part.world_size]
    holders = whole or list(found)
    own = next((each for each in held if each.position == position), None) if world.rank in holders else None
    number, step, phase = position
    everywhere, split_in = len(holders) == len(kept), {} if whole else found
    older = _newest_complete([{p: part for p, part in each.items() if p[2] != KEPT} for each in kept], (0, 0, 0, 0))
    before = step if phase != KEPT else -1 if older is None else older[1]
    return Newest((number, step), phase, False, own, holders, everywhere, 0, suspect, split_in, before)


def _newest_live(lives: Sequence[set[tuple[int, ...]]], size: int) -> tuple[int, ...]:
    """Return the newest position whose state is live, all parts of it; zeros if there is none."""
    parts = [set[tuple[int, ...]]().union(*lives[part::size]) for part in range(size)]
    return max(set.intersection(*parts), default=(0, 0, 0))


def _newest_complete(
    kept: Sequence[Mapping[tuple[int, int, int], split.SnapshotPart]], live: tuple[int, ...], *, warn: bool = False
) -> tuple[int, int, int] | None:
    """Return the position of the newest snapshot that can be restored; None if the live state is as new, or newer."""
    for position in sorted({position for each in kept for position in each}, reverse=True):
        number, step, phase = position
        if (number, step, 0, phase) <= live:
            return None
        if split.complete([each[position] for each in kept if position in each]):
            return position
        if warn:
            _log.warning("the nodes do not have all shards of the snapshot of step %d", step)
    return None


def restore(newest: Newest, world: World, taking: Cuts) -> tuple[Any, dict[str, Any]]:
    """Return a snapshot's state and meta; called by all ranks."""
    faults.reached("restore", newest.position[1])
    if newest.parts:
        return split_restore.restored(newest.mine, newest.parts, world, taking)
    meta = {} if newest.mine is None else newest.mine.read_meta()
    if newest.everywhere:
        assert newest.mine is not None
        return newest.mine.read_state(taking(meta)), meta
    meta = dict(broadcast_state(meta, newest.holders[0], world.rank))
    cut = taking(meta)
    sends = newest.mine is not None and (cut is not None or world.rank == newest.holders[0])
    state = newest.mine.read_state(in_place(taking)(meta)) if newest.mine is not None and sends else None
    return spread_state(state, newest.holders, world, cut), meta
