"""Snapshots of sharded states that are split among the nodes, where a node's memory has no room for whole ones.

Each node keeps the shards of its own ranks, and a copy of those of the next node. With n nodes a snapshot therefore
takes 2/n of the state's memory on each, and sends the state once in all. It can be restored as long as the nodes that
are left have the shards of all ranks: the loss of one node loses none, that of two neighbours does.

A slot then has a state of its own kind: the rest of the training's state as JSON, the tensors that are not sharded, and
shards by rank. On a restore, each rank gets the part that it needs of each tensor, also if that is sharded in another
way now: from its own node's memory, else from a rank of a node that has it, each byte once.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.manifest import MAX_SHARES
from elastic_launch.snapshot.format.tensor_file import copied
from elastic_launch.snapshot.memory.slot import PART, Header, Slot
from elastic_launch.snapshot.memory.slot_state import read_meta, read_state
from elastic_launch.snapshot.storage.shares import OwnShare, cuts
from elastic_launch.training.checkpoints.sharded import StateGatherer, box_of, bytes_in
from elastic_launch.training.ranks.exchange import bytes_of_all, described, numbers_of_all, swap
from elastic_launch.training.ranks.spreading import Box, narrowed
from elastic_launch.training.ranks.world import World

FEWEST = 3
"""Nodes from which on a split snapshot takes less memory than a whole one."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """What a slot has of a snapshot: the shards of some ranks of a world; if its size is 0, the whole state."""

    ranks: tuple[int, ...] = ()
    world_size: int = 0

    @staticmethod
    def of(slot: Slot, header: Header) -> SnapshotPart:
        """Return what a slot has."""
        # The meta of a large model may have long lists of names: of a whole snapshot it is not parsed.
        found = read_meta(slot, header).get(PART) if f'"{PART}"'.encode() in slot.meta(header) else None
        return SnapshotPart() if found is None else SnapshotPart(tuple(found["ranks"]), int(found["world_size"]))


@dataclass(frozen=True, slots=True)
class InSlot:
    """A snapshot, or a part of it, in a slot."""

    slot: Slot
    header: Header

    @property
    def position(self) -> tuple[int, int, int]:
        """See :class:`Header`."""
        return self.header.position

    @property
    def part(self) -> SnapshotPart:
        """What the slot has."""
        return SnapshotPart.of(self.slot, self.header)

    def read_meta(self) -> dict[str, Any]:
        """Return the snapshot's meta."""
        return read_meta(self.slot, self.header)

    def read_state(self, take: tree.Take | None) -> Any:
        """Return its state, each tensor in its own memory, or what ``take`` returns of it."""
        return read_state(self.slot, self.header, take)


def complete(parts: Collection[SnapshotPart]) -> bool:
    """Whether a state can be restored from these parts of one snapshot."""
    if any(not part.world_size for part in parts):
        return True
    return {*chain(*(part.ranks for part in parts))} >= {*range(max((p.world_size for p in parts), default=1))}


@dataclass(frozen=True, slots=True)
class Votes:
    """What the ranks told each other before a state is kept."""

    split: bool  # whether it is split among the nodes
    asked: bool  # whether a node asked for that
    kept: bool  # whether any node keeps it in memory
    keepers: list[list[int]]  # by rank, the ranks that write its shards to memory, if it is split
    firsts: list[int]  # the first rank of each node

    @staticmethod
    def of(votes: Sequence[Sequence[int]]) -> Votes:
        """Return what follows from each rank's node, and whether it is its node's first, writes to memory, and asks."""
        writers = {node: rank for rank, (node, _, writes, _) in enumerate(votes) if writes}
        firsts = sorted((node, rank) for rank, (node, first, *_) in enumerate(votes) if first)
        asked = any(asks for *_, asks in votes)
        split = asked and len(writers) >= FEWEST
        keepers: list[list[int]] = []
        for node, *_ in votes if split else ():
            # Its shards are kept by it and the one before, of the nodes that write.
            nearest = sorted(writers, key=lambda other: (other > node, -other))[:2]
            keepers.append([writers[each] for each in nearest])
        return Votes(split, asked, bool(writers), keepers, [rank for _, rank in firsts])


class Layouts:
    """How the ranks' shards lie in their tensors; exchanged only when that changes."""

    def __init__(self) -> None:
        self._mine = ""
        self._boxes: list[list[Box]] = []

    def of_all(self, gatherer: StateGatherer, world: World) -> list[list[Box]]:
        """Return the part that each rank has of each tensor left where it is, by rank; called by all ranks."""
        mine = json.dumps([box_of(sharded) for _, sharded in gatherer.left])
        if not all(known for (known,) in numbers_of_all(world, [int(mine == self._mine)])):
            self._boxes = [json.loads(each) for each in bytes_of_all(world, mine.encode())]
            self._mine = mine
        return self._boxes


def owners(boxes: Sequence[Sequence[Box]]) -> list[list[int]]:
    """Return, by tensor, the ranks whose shards together are the tensor, each element once.

    ``boxes`` are, by rank, the parts that it has of each tensor. Several ranks have the same shard if a mesh has a
    dimension that replicates; each has its turn to keep it.
    """
    found = []
    for index in range(len(boxes[0])):
        same: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, mine in enumerate(boxes):
            if all(length for _, length in mine[index]):
                same.setdefault(tuple((begin, length) for begin, length in mine[index]), []).append(rank)
        found.append([ranks[index % len(ranks)] for ranks in same.values()])
    return found


def taken(
    state: dict[str, Any],
    gatherer: StateGatherer,
    boxes: Sequence[Sequence[Box]],
    kept_by: Sequence[list[int]],
    rank: int,
) -> dict[str, Any]:
    """Return the state of this rank's slot, with the shards that it keeps; called by all ranks.

    It is empty on ranks that write none. The tensors in it are not used for anything else.

    Args:
        state: the training's state, with stand-ins for what ``gatherer`` has left where it is.
        boxes: by rank, the part that it has of each of these tensors.
        kept_by: by rank, the ranks that write its shards.
    """
    keeps = [other for other, writers in enumerate(kept_by) if rank in writers]
    pieces: dict[str, dict[str, Tensor]] = {str(other): {} for other in keeps}
    of = owners(boxes)
    for index, (_, sharded) in enumerate(gatherer.left):
        mine = here(sharded) if rank in of[index] else None
        sends = [] if mine is None else [(mine, writer) for writer in kept_by[rank] if writer != rank]
        receives: list[tuple[Tensor, int]] = []
        for other in of[index]:
            if other == rank and mine is not None and rank in keeps:
                pieces[str(rank)][str(index)] = mine.clone() if sharded.device.type == "cpu" else mine
            elif other in keeps:
                shape = [length for _, length in boxes[other][index]]
                buffer = torch.empty(shape, dtype=sharded.dtype, device="cpu")
                pieces[str(other)][str(index)] = buffer
                receives.append((buffer, other))
        swap(sends, receives)
    if not keeps:
        return {}
    where = [{other: boxes[other][index] for other in ranks} for index, ranks in enumerate(of)]
    return as_slot(state, gatherer, where, pieces)


def as_slot(
    state: dict[str, Any],
    gatherer: StateGatherer,
    where: Sequence[Mapping[int, Box]],
    pieces: dict[str, dict[str, Tensor]],
) -> dict[str, Any]:
    """Return the state of a slot with some shards.

    Args:
        where: by tensor, the part of it that is in each shard, by the shard's number.
        pieces: the shards, by number and index of the tensor.
    """
    tensors, rest, left = _named(state, gatherer)
    numbers = [[[number, *chain(*box)] for number, box in boxes.items()] for boxes in where]
    shapes = described({name: tensor for name, tensor in tensors.items() if tensor.is_meta})
    return {
        "layout": json.dumps({"rest": rest, "left": left, "shapes": shapes, "where": numbers}),
        "replicated": {name: tensor for name, tensor in tensors.items() if not tensor.is_meta},
        "pieces": pieces,
    }


def own_tensors(
    state: dict[str, Any],
    gatherer: StateGatherer,
    boxes: Sequence[Sequence[Box]],
    firsts: Sequence[int],
    rank: int,
    nonce: str = "",
) -> OwnShare | None:
    """Return the tensors that this rank's node writes to durable storage, if no node has the whole of a state.

    Each node, of which ``firsts`` are the first ranks, writes a run of whole tensors, in nearly equal parts by bytes.
    None is returned if that is a single share. Called by all ranks, with ``state``, ``gatherer`` and ``boxes`` as for
    :func:`taken`.
    """
    sizes = [bytes_in(stand_in) for stand_in, _ in gatherer.left]
    begins = cuts(sizes, min(len(firsts), MAX_SHARES))
    count = len(begins) - 1
    if count < 2:
        return None
    number = firsts.index(rank) if rank in firsts[:count] else None
    of, whole = owners(boxes), {}
    for index, (_, sharded) in enumerate(gatherer.left):
        writer = firsts[bisect_right(begins, index) - 1]
        mine = here(sharded) if rank in of[index] else None
        receives: list[tuple[Tensor, int]] = []
        if writer == rank:
            tensor = whole[index] = torch.empty(sharded.shape, dtype=sharded.dtype, device="cpu")
            parts = {other: narrowed(tensor, boxes[other][index]) for other in of[index]}
            if mine is not None:
                parts.pop(rank).copy_(mine)
            receives = [(part, other) for other, part in parts.items()]
        swap([(mine, writer)] if mine is not None and writer != rank else [], receives)
    if number is None:
        return OwnShare(number, count, nonce, {}, None)
    tensors, rest, left = _named(state, gatherer)
    found = {left[index]: tensor for index, tensor in whole.items()}
    if number == 0:
        found |= {name: copied(tensor.cpu()) for name, tensor in tensors.items() if not tensor.is_meta}
    return OwnShare(number, count, nonce, found, rest)


def here(sharded: Any) -> Tensor:
    """Return this rank's shard in host memory, in its own place if that is there."""
    mine: Tensor = sharded.to_local().detach()
    return mine.cpu()


def _named(state: dict[str, Any], gatherer: StateGatherer) -> tuple[dict[str, Tensor], Any, list[str]]:
    """Return a state's tensors by name, the rest as JSON, and the names of the tensors that were left."""
    tensors, rest = tree.encode(state, stand_ins=True)
    names = {id(tensor): name for name, tensor in tensors.items()}
    return tensors, rest, [names[id(stand_in)] for stand_in, _ in gatherer.left]
