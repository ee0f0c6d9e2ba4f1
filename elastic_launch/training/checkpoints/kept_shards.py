"""The shards that processes keep at a planned change, in place of a snapshot: only what changes its owner is sent.

A process that goes on keeps the shards that it has. One that leaves first gives each of the others what that one will
need if no other process comes. In the next round the state is put together as from a split snapshot, see
``split_restore``, of which each of these processes has a part: each byte is sent at most once, to its new owner.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.tensor_file import copied
from elastic_launch.snapshot.memory.slot import EVALUATED
from elastic_launch.training.checkpoints.sharded import StateGatherer
from elastic_launch.training.checkpoints.split import SnapshotPart, as_slot, here
from elastic_launch.training.ranks.exchange import swap
from elastic_launch.training.ranks.spreading import Box, narrowed, overlap, within

KEPT = EVALUATED + 1
"""The phase of a state that processes keep: it is newer than a snapshot of the same step, and not mixed with it."""


@dataclass(frozen=True, slots=True)
class KeptShards:
    """What a process keeps of the state after a step."""

    round: int
    step: int
    training: int
    part: SnapshotPart
    state: dict[str, Any]  # as a slot has it
    meta: dict[str, Any]

    @property
    def position(self) -> tuple[int, int, int]:
        """See :class:`Header`."""
        return self.round, self.step, KEPT

    def read_meta(self) -> dict[str, Any]:
        """Return a copy of the meta."""
        return copy.deepcopy(self.meta)

    def read_state(self, take: tree.Take | None) -> dict[str, Any]:
        """Return the state."""
        return self.state


@dataclass(frozen=True, slots=True)
class Portion:
    """What one rank keeps of another one's shards; of its own all."""

    of: int
    keeper: int


def portions(stays: Sequence[bool]) -> list[Portion]:
    """Return who keeps what; ``stays`` says of each rank whether its process goes on, as at least one does."""
    staying = [rank for rank, each in enumerate(stays) if each]
    leaving = [rank for rank, each in enumerate(stays) if not each]
    return [Portion(rank, rank) for rank in staying] + [Portion(of, keeper) for of in leaving for keeper in staying]


def boxes_of(
    plan: Sequence[Portion], boxes: Sequence[Box], shape: Sequence[int], dimension: int | None
) -> dict[int, Box]:
    """Return which part of a tensor is in which portion, by its number; each element is in one of them.

    Args:
        boxes: by rank, the part of the tensor that it has.
        dimension: that in which the tensor is cut; None: it is not.
    """
    staying = [portion.keeper for portion in plan if portion.of == portion.keeper]
    owners: dict[tuple[tuple[int, ...], ...], int] = {}
    for portion in plan:  # those that stay come first: what they have, too, is not sent
        if all(length for _, length in boxes[portion.of]):
            owners.setdefault(tuple(map(tuple, boxes[portion.of])), portion.of)
    owning, found = {*owners.values()}, dict[int, Box]()
    for number, portion in enumerate(plan):
        part: Box | None = boxes[portion.of] if portion.of in owning else None
        if part is not None and portion.of != portion.keeper:
            part = overlap(part, cut_for(shape, dimension, len(staying), staying.index(portion.keeper)))
        if part is not None:
            found[number] = part
    return found


def cut_for(shape: Sequence[int], dimension: int | None, count: int, place: int) -> Box:
    """Return the part of a tensor that a rank has once it is cut for ``count`` ranks, as ``torch.chunk`` does it."""
    if dimension is None:
        return [(0, length if place == 0 else 0) for length in shape]
    length, box = shape[dimension], [(0, length) for length in shape]
    each = -(-length // count)
    box[dimension] = (min(length, each * place), max(0, min(each, length - each * place)))
    return box


def keep_shards(
    state: dict[str, Any], gatherer: StateGatherer, boxes: Sequence[Sequence[Box]], stays: Sequence[bool], rank: int
) -> tuple[dict[str, Any], SnapshotPart]:
    """Return the state that this rank keeps, as a slot has it, and its part; called by all ranks.

    On a rank that stays, it has the memory of the shards: the model and its optimizer must get other tensors before
    they change.

    Args:
        state, gatherer, boxes: as for :func:`elastic_launch.training.checkpoints.split.taken`.
        stays: by rank, whether its process goes on.
    """
    plan = portions(stays)
    mine = [number for number, portion in enumerate(plan) if portion.keeper == rank]
    pieces: dict[str, dict[str, Tensor]] = {str(number): {} for number in mine}
    where: list[dict[int, Box]] = []
    sends: list[tuple[Tensor, int]] = []
    receives: list[tuple[Tensor, int]] = []
    for index, (_, sharded) in enumerate(gatherer.left):
        dimension = next((each.dim for each in sharded.placements if hasattr(each, "dim")), None)
        there = [each[index] for each in boxes]
        where.append(boxes_of(plan, there, sharded.shape, dimension))
        own = here(sharded)
        for number, box in where[-1].items():
            portion = plan[number]
            if portion.of == rank:
                part = narrowed(own, within(box, there[rank]))
                if portion.keeper == rank:
                    pieces[str(number)][str(index)] = part
                else:
                    sends.append((part, portion.keeper))
            elif portion.keeper == rank:
                part = torch.empty([length for _, length in box], dtype=sharded.dtype, device="cpu")
                pieces[str(number)][str(index)] = part
                receives.append((part, portion.of))
    swap(sends, receives)
    found = as_slot(state, gatherer, where, pieces)
    # These are not replaced, and change in the next step.
    found["replicated"] = {name: copied(tensor.cpu()) for name, tensor in found["replicated"].items()}
    return found, SnapshotPart(tuple(mine), len(plan))
