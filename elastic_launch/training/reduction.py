"""The exact reduction: gradients added in one fixed tree over the micro-batch's index, at any world size.

Each rank folds its slice of the micro-batches into nodes of the tree while it computes them. At the step's end the
nodes cross the ranks in shards (all-to-all), each rank folds its shard of all nodes in the tree's order, and the sums
come back (all-gather), bucket by bucket. Where slices are aligned each rank sends one node, which makes the bytes those
of a ring all-reduce; else up to 2 * log2 of the slice's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.batch import slice_of
from elastic_launch.training.tree import Segment, fold, push, segments

__all__ = ["ExactReduction"]

BUCKET_BYTES = 32 * 1024 * 1024
"""Bytes of one node that cross the ranks at a time: bounds the memory that the exchange takes on top."""

Flat = list[Tensor]
"""One value of the tree: one flat tensor for each dtype and device."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensors of one dtype and device: where each lies in the flat tensor."""

    dtype: torch.dtype
    device: torch.device
    places: tuple[tuple[int, int, int], ...]  # which tensor, start, stop
    length: int


class ExactReduction:
    """Sums tensors over micro-batches and ranks, to the same bits at every world size.

    Args:
        like: tensors that have the shapes, dtypes and devices of those to be summed; only these are kept of them.
        world_size, rank: of the group.
        group: process group; None: the default one. Not used at world size 1.
    """

    def __init__(
        self, like: Sequence[Tensor], world_size: int, rank: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._world_size = world_size
        self._rank = rank
        self._group = group
        self._shapes = [tensor.shape for tensor in like]
        self._parts = _layout(like)
        self._stack: list[tuple[Segment, Flat]] = []
        self._spare: list[Flat] = []
        self._present = torch.zeros(len(like), dtype=torch.int32)

    def add(self, index: int, values: Sequence[Tensor | None]) -> None:
        """Take in one micro-batch's values; None counts as zero.

        Args:
            index: the micro-batch's place in the global batch; ranks take theirs in order.
            values: one for each tensor; copied.
        """
        flat = (
            self._spare.pop()
            if self._spare
            else [torch.empty(p.length, dtype=p.dtype, device=p.device) for p in self._parts]
        )
        for part, target in zip(self._parts, flat, strict=True):
            for which, start, stop in part.places:
                value = values[which]
                if value is None:
                    target[start:stop].zero_()
                else:
                    target[start:stop].copy_(value.reshape(-1))
        self._present |= torch.tensor([value is not None for value in values], dtype=torch.int32)
        push(self._stack, index, flat, self._join)

    def reset(self) -> None:
        """Forget what was taken in: the step is thrown away."""
        self._spare += [flat for _, flat in self._stack]
        self._stack.clear()
        self._present.zero_()

    def finish(self, total: int) -> list[Tensor | None]:
        """Return the sums over all ranks, None where no micro-batch of any rank had a value.

        Args:
            total: M, the number of micro-batches of all ranks.
        """
        nodes = self._stack
        mine = slice_of(total, self._world_size, self._rank)
        if [segment for segment, _ in nodes] != segments(*mine):
            raise ValueError(
                f"rank {self._rank} was to add the micro-batches {mine[0]} to {mine[1] - 1} of {total}, in order"
            )
        if self._world_size == 1:
            # Not by _join: reset() hands back the stack's buffers, and none may be spare twice.
            sums = fold(total, nodes, _add)
        else:
            sums = [self._exchange(number, part, total) for number, part in enumerate(self._parts)]
            dist.all_reduce(self._present, op=dist.ReduceOp.MAX, group=self._group)
        present = self._present.tolist()
        results: list[Tensor | None] = [None] * len(self._shapes)
        for part, flat in zip(self._parts, sums, strict=True):
            for which, start, stop in part.places:
                if present[which]:
                    results[which] = flat[start:stop].clone().view(self._shapes[which])
        self.reset()
        return results

    def _new(self) -> Flat:
        return [torch.empty(part.length, dtype=part.dtype, device=part.device) for part in self._parts]

    def _join(self, left: Flat, right: Flat) -> Flat:
        self._spare.append(right)
        return _add(left, right)

    def _exchange(self, number: int, part: _Part, total: int) -> Tensor:
        world = self._world_size
        sums = torch.empty(part.length, dtype=part.dtype, device=part.device)
        step = max(1, BUCKET_BYTES // part.dtype.itemsize)
        for start in range(0, part.length, step):
            stop = min(start + step, part.length)
            shard = -(-(stop - start) // world)
            gathered = torch.empty(world * shard, dtype=part.dtype, device=part.device)
            summed = self._fold_shard(number, part, total, start, stop, shard)
            dist.all_gather(list(gathered.view(world, shard).unbind()), summed, group=self._group)
            sums[start:stop] = gathered[: stop - start]
        return sums

    def _fold_shard(self, number: int, part: _Part, total: int, start: int, stop: int, shard: int) -> Tensor:
        """Send every rank its shard of this rank's nodes; fold the shard of all nodes that is this rank's."""
        world = self._world_size
        theirs = [segments(*slice_of(total, world, rank)) for rank in range(world)]
        mine = [flat[number] for _, flat in self._stack]
        sent = torch.zeros(len(mine), world * shard, dtype=part.dtype, device=part.device)
        for row, flat in zip(sent, mine, strict=True):
            row[: stop - start] = flat[start:stop]
        sent = sent.view(len(mine), world, shard).transpose(0, 1).contiguous()
        received = torch.empty(sum(map(len, theirs)), shard, dtype=part.dtype, device=part.device)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            output_split_sizes=[len(nodes) * shard for nodes in theirs],
            input_split_sizes=[len(mine) * shard] * world,
            group=self._group,
        )
        order = [node for nodes in theirs for node in nodes]
        return fold(total, list(zip(order, received.unbind(), strict=True)), lambda a, b: a.add_(b))


def _add(left: Flat, right: Flat) -> Flat:
    for a, b in zip(left, right, strict=True):
        a += b
    return left


def _layout(like: Sequence[Tensor]) -> list[_Part]:
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for which, tensor in enumerate(like):
        if tensor.layout != torch.strided:
            raise ValueError(f"tensor {which} is sparse; an exact reduction takes dense ones only")
        kinds.setdefault((tensor.dtype, tensor.device), []).append(which)
    parts = []
    for (dtype, device), members in kinds.items():
        places, length = [], 0
        for which in members:
            places.append((which, length, length + like[which].numel()))
            length += like[which].numel()
        parts.append(_Part(dtype, device, tuple(places), length))
    return parts
