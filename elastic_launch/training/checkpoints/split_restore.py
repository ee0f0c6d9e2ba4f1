"""Puts a state together from a snapshot that is split among the nodes, see ``split``.

All ranks go through the tensors in the same order, several at a time if they are small. Of each, a rank takes the part
that it needs from its node's slot, as far as that has it, and receives the rest point to point from ranks of nodes that
have it, each byte once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.plain import Path
from elastic_launch.snapshot.format.tensor_file import copied
from elastic_launch.training.checkpoints.kept_shards import KeptShards
from elastic_launch.training.checkpoints.split import InSlot, SnapshotPart
from elastic_launch.training.live.waits import on_host
from elastic_launch.training.ranks.exchange import CHUNK, broadcast_state, bytes_of_all, exchanging, swap
from elastic_launch.training.ranks.spreading import Box, Cut, Cuts, narrowed, overlap, places, stand_ins_of, within
from elastic_launch.training.ranks.world import World

Held = InSlot | KeptShards
"""What a node's memory, or a process, has of a state."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a split state lies in the slots: the same in all of them."""

    rest: Any  # the state as JSON, with references to tensors
    shapes: dict[str, Any]  # dtype and shape of each sharded tensor, by its name
    index: dict[str, str]  # the key of its pieces
    where: dict[str, list[tuple[int, Box]]]  # the ranks that had a shard of it, and which

    @staticmethod
    def of(text: str) -> _Layout:
        found = json.loads(text)
        where: dict[str, list[tuple[int, Box]]] = {
            name: [(rank, list(zip(numbers[::2], numbers[1::2], strict=True))) for rank, *numbers in pieces]
            for name, pieces in zip(found["left"], found["where"], strict=True)
        }
        return _Layout(found["rest"], found["shapes"], {n: str(i) for i, n in enumerate(found["left"])}, where)


def restored(
    mine: Held | None, parts: Mapping[int, SnapshotPart], world: World, taking: Cuts
) -> tuple[Any, dict[str, Any]]:
    """Return a split snapshot's state and meta: what this rank keeps of it; called by all ranks.

    ``mine`` is what this rank or its node has of it, if any; ``parts`` are what all have, which is complete.
    """
    slot: dict[str, Any] = {} if mine is None else mine.read_state(lambda path, tensor: tensor)
    meta = {} if mine is None else mine.read_meta()
    common: dict[str, Any] = {"meta": meta, "layout": slot.get("layout"), "replicated": slot.get("replicated")}
    if len(parts) < world.world_size:
        common = broadcast_state(common, min(parts), world.rank)
    meta = dict(common["meta"])
    layout, replicated = _Layout.of(common["layout"]), common["replicated"]
    stand_ins = stand_ins_of(layout.shapes)
    cut = taking(meta)
    tensors = {**replicated, **stand_ins}
    needed = {
        name: [(0, length) for length in tensors[name].shape] if cut is None else cut.box(path, tensors[name].shape)
        for name, path in places(layout.rest, tensors).items()
        if name in stand_ins
    }
    wanted = [json.loads(each) for each in bytes_of_all(world, json.dumps(needed).encode())]
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    supply = _Supply(layout, slot.get("pieces", {}), parts, wanted, world.rank)
    groups, ready = _groups({name: stand_ins[name] for name in needed}), dict[str, Tensor | None]()

    def take(path: Path, tensor: Tensor) -> Tensor:
        name = names.get(id(tensor))
        if name is None:
            return copied(tensor) if cut is None else cut(path, tensor)
        if name not in ready:
            ready.update(supply.parts(next(groups)))
        part = ready.pop(name)
        return tensor if part is None else _kept(cut, path, tensor, part)

    state = tree.decode(layout.rest, tensors, take)
    if world.world_size > 1:
        # A rank that has all that it needs would wait in its first step, in which it is late only after minutes.
        with exchanging():
            on_host(dist.all_reduce, torch.zeros(1, device="cpu"))
    return state, meta


def _kept(cut: Cut | None, path: Path, whole: Tensor, part: Tensor) -> Tensor:
    return part if cut is None else cut.kept(path, whole.shape, part)


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, torch.dtype]]:
    """Yield names and dtypes of tensors that are exchanged at the same time: there is room for a chunk of them."""
    group: dict[str, torch.dtype] = {}
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > CHUNK:
            yield group
            group, size = {}, 0
        group[name], size = tensor.dtype, size + tensor.nbytes
    yield group


class _Supply:
    """Makes the parts of tensors that ranks need of the shards in all nodes' slots."""

    def __init__(
        self,
        layout: _Layout,
        pieces: Mapping[str, Any],
        parts: Mapping[int, SnapshotPart],
        wanted: Sequence[Mapping[str, Box | None]],
        rank: int,
    ) -> None:
        self._layout = layout
        self._pieces = pieces
        self._wanted = wanted
        self._rank = rank
        self._has = {other: frozenset(part.ranks) for other, part in parts.items()}
        self._holders: dict[int, list[int]] = {}
        for other, ranks in sorted(self._has.items()):
            for shard in ranks:
                self._holders.setdefault(shard, []).append(other)

    def parts(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor | None]:
        """Return the parts of tensors that this rank needs, None of one that it does not; called by all ranks."""
        found: dict[str, Tensor | None] = {}
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        for name, dtype in dtypes.items():
            boxes, index = [each[name] for each in self._wanted], self._layout.index[name]
            mine, part = boxes[self._rank], None
            if mine is not None:
                part = torch.empty([length for _, length in mine], dtype=dtype, device="cpu")
            found[name] = part
            for shard, there in self._layout.where[name]:
                here = shard in self._has.get(self._rank, ())
                if part is not None and mine is not None and (common := overlap(mine, there)) is not None:
                    target = narrowed(part, within(common, mine))
                    if here:
                        target.copy_(narrowed(self._pieces[str(shard)][index], within(common, there)))
                    else:
                        receives.append((target, self._source(shard, self._rank)))
                for other, box in enumerate(boxes) if here else ():
                    away = shard not in self._has.get(other, ()) and self._source(shard, other) == self._rank
                    if away and box is not None and (common := overlap(box, there)) is not None:
                        piece = narrowed(self._pieces[str(shard)][index], within(common, there))
                        sends.append((piece, other))
        swap(sends, receives)
        return found

    def _source(self, shard: int, rank: int) -> int:
        """Return the rank that sends a shard to a rank whose node has not got it."""
        holders = self._holders[shard]
        return holders[(shard + rank) % len(holders)]
