"""Gives a state to ranks that have none, each of which keeps only a part of it, such as its shards.

The ranks that have the state take their parts from it. Each of the others is served by one of these, point to point: it
gets the names and shapes of the tensors, answers with what it keeps of each, and receives that. So each byte that is
kept is sent once, and no other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.plain import Path
from elastic_launch.snapshot.storage.reading import Taking
from elastic_launch.training.live.waits import on_host, wait_for
from elastic_launch.training.ranks.exchange import (
    broadcast_state,
    described,
    exchanging,
    in_chunks,
    receive_bytes,
    send_bytes,
)
from elastic_launch.training.ranks.world import World

Box = Sequence[tuple[int, int]]
"""A part of a tensor: where it begins in each dimension, and its length there."""


class Cut(Protocol):
    """What a rank keeps of a state's tensors."""

    def __call__(self, path: Path, tensor: Tensor, /) -> Tensor:
        """Return what is kept of a tensor; it has the tensor's shape and dtype."""

    def box(self, path: Path, shape: Sequence[int]) -> Box | None:
        """Return the part of a tensor that is kept; None: nothing."""

    def kept(self, path: Path, shape: Sequence[int], part: Tensor) -> Tensor:
        """Return what is kept of a tensor of a shape, made of this part, which is not used for anything else."""


Cuts = Callable[[Mapping[str, Any]], Cut | None]
"""Returns what a rank keeps of a state with that meta; None: all of it."""


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Return a part of a tensor, in the tensor's memory."""
    for dimension, (begin, length) in enumerate(box):
        tensor = tensor.narrow(dimension, begin, length)
    return tensor


def overlap(box: Box, other: Box) -> Box | None:
    """Return what two parts of a tensor have in common; None: nothing."""
    begins = [max(mine[0], theirs[0]) for mine, theirs in zip(box, other, strict=True)]
    ends = [min(sum(mine), sum(theirs)) for mine, theirs in zip(box, other, strict=True)]
    common = [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
    return None if any(length <= 0 for _, length in common) else common


def within(box: Box, other: Box) -> Box:
    """Return a part of a tensor as a part of another part, in which it lies."""
    return [(mine[0] - theirs[0], mine[1]) for mine, theirs in zip(box, other, strict=True)]


def sources(holders: Sequence[int], world_size: int) -> dict[int, int]:
    """Return who serves each rank that has no state, so that those who have it serve equally many."""
    others = [rank for rank in range(world_size) if rank not in holders]
    return {rank: holders[place % len(holders)] for place, rank in enumerate(others)}


def spread_state(state: Any, holders: Sequence[int], world: World, cut: Cut | None) -> Any:
    """Return the state that some ranks have on all ranks: what each keeps of it; called by all ranks.

    Args:
        state: a state that a checkpoint can hold; used on the ranks that have it.
        cut: what this rank keeps; None: all of it, on all ranks.
    """
    if cut is None:
        return broadcast_state(state, holders[0], world.rank)
    served_by = sources(holders, world.world_size)
    if world.rank in served_by:
        found = _received(served_by[world.rank], cut)
    else:
        tensors, rest = tree.encode(state)
        _serve([target for target, source in served_by.items() if source == world.rank], tensors, rest)
        found = tree.decode(rest, tensors, cut)
    if served_by:
        # A rank that serves no other would wait in its first step, in which it is late only after minutes, perhaps.
        with exchanging():
            on_host(dist.all_reduce, torch.zeros(1, device="cpu"))
    return found


def in_place(taking: Cuts) -> Taking:
    """Return what leaves tensors in mapped memory, to be sent, if ``taking`` would cut them."""
    return lambda meta: None if taking(meta) is None else lambda path, tensor: tensor


def _send(tensor: Tensor, target: int) -> None:
    wait_for(dist.isend(tensor, dst=target))


def _receive(tensor: Tensor, source: int) -> None:
    wait_for(dist.irecv(tensor, src=source))


def _serve(targets: Sequence[int], tensors: Mapping[str, Tensor], rest: Any) -> None:
    shapes = described(tensors)
    for target in targets:
        send_bytes(json.dumps([shapes, rest]).encode(), target)
    wanted = {target: dict(json.loads(receive_bytes(target))) for target in targets}
    # One tensor after the other, so that no target waits until another one has everything.
    for name in places(rest, stand_ins_of(shapes)) if targets else ():
        for target, boxes in wanted.items():
            if name in boxes:
                in_chunks(narrowed(tensors[name], boxes[name]).cpu(), partial(_send, target=target))


def _received(source: int, cut: Cut) -> Any:
    shapes, rest = json.loads(receive_bytes(source))
    stand_ins = stand_ins_of(shapes)

    def receive(path: Path, whole: Tensor) -> Tensor:
        box = cut.box(path, whole.shape)
        if box is None:
            return whole
        part = torch.empty([length for _, length in box], dtype=whole.dtype, device="cpu")
        in_chunks(part, partial(_receive, source=source))
        return cut.kept(path, whole.shape, part)

    boxes = ((name, cut.box(path, stand_ins[name].shape)) for name, path in places(rest, stand_ins).items())
    send_bytes(json.dumps([(name, box) for name, box in boxes if box is not None]).encode(), source)
    return tree.decode(rest, stand_ins, receive)


def stand_ins_of(shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors that have a dtype and a shape, and take no memory."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (dtype, shape) in shapes.items()
    }


def places(rest: Any, stand_ins: Mapping[str, Tensor]) -> dict[str, Path]:
    """Return where in the state each tensor is, in the order of decoding; that of encoding differs for sets."""
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    found: dict[str, Path] = {}

    def note(path: Path, whole: Tensor) -> Tensor:
        found[names[id(whole)]] = path
        return whole

    tree.decode(rest, stand_ins, note)
    return found
