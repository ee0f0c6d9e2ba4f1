"""The exact reduction: gradients added in one fixed tree over the micro-batch's index, at any world size.

Each rank folds its slice of the micro-batches into nodes of the tree while it computes them. At the step's end the
nodes cross the ranks in shards (all-to-all), each rank folds its shard of all nodes in the tree's order, and the sums
come back (all-gather), bucket by bucket, three buckets under way at a time. Where slices are aligned each rank sends
one node, which makes the bytes those of a ring all-reduce; else up to 2 * log2 of the slice's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.batch import slice_of
from elastic_launch.training.tree import Segment, fold, push, segments

__all__ = ["ExactReduction"]

BUCKET_BYTES = 16 * 1024 * 1024
"""Bytes of one node that cross the ranks at a time: with what is under way it bounds the memory of the exchange."""

UNDER_WAY = 3
"""Buckets at once: one crosses, one is folded, one comes back."""

# torch 2.13 deprecates the name that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Values = list[Tensor | None]
"""One node of the tree: a value, or None, for each tensor."""


class ExactReduction:
    """Sums tensors over micro-batches and ranks, to the same bits at every world size.

    A value that is missing counts as zero, also where all that meets it is on one rank: adding zero changes the sign of
    a negative zero.

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
        self._parts = _layout(like)
        self._stack: list[tuple[Segment, Values]] = []
        self._buffers: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def add(self, index: int, values: Sequence[Tensor | None]) -> None:
        """Take in one micro-batch's values.

        Args:
            index: the micro-batch's place in the global batch; ranks take theirs in order.
            values: one for each tensor; they are the reduction's from now on, which changes them.
        """
        laid_out: Values = [None] * len(values)
        for part in self._parts:
            for place in part.tensors:
                value = values[place.which]
                if value is not None and value.stride() != place.stride:
                    # Sums over all elements, a norm for example, depend on the order in memory to the bit.
                    value = place.new(part).copy_(value)
                laid_out[place.which] = value
        push(self._stack, index, laid_out, _join)

    def reset(self) -> None:
        """Forget what was taken in: the step is thrown away."""
        self._stack = []

    def finish(self, total: int) -> Values:
        """Return the sums over all ranks, None where no micro-batch of any rank had a value.

        Args:
            total: M, the number of micro-batches of all ranks.
        """
        nodes, self._stack = self._stack, []
        mine = slice_of(total, self._world_size, self._rank)
        if [segment for segment, _ in nodes] != segments(*mine):
            raise ValueError(
                f"rank {self._rank} was to add the micro-batches {mine[0]} to {mine[1] - 1} of {total}, in order"
            )
        if self._world_size == 1:
            return fold(total, nodes, _join)
        sums = self._present_sums([values for _, values in nodes])
        for part in self._parts:
            self._exchange(part, total, [values for _, values in nodes], sums)
        return sums

    def _present_sums(self, nodes: list[Values]) -> Values:
        """Return a tensor to take each sum, None for those that no rank has; it may be that of a node."""
        count = sum(len(part.tensors) for part in self._parts)
        present = torch.tensor(
            [any(values[which] is not None for values in nodes) for which in range(count)], dtype=torch.int32
        )
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self._group)
        sums: Values = [None] * count
        for part in self._parts:
            for place in part.tensors:
                if present[place.which]:
                    own = nodes[0][place.which] if nodes else None
                    sums[place.which] = place.new(part) if own is None else own
        return sums

    def _exchange(self, part: _Part, total: int, nodes: list[Values], sums: Values) -> None:
        theirs = [segments(*slice_of(total, self._world_size, rank)) for rank in range(self._world_size)]
        order = [node for nodes_of_one in theirs for node in nodes_of_one]
        buckets = list(part.buckets(self._world_size))
        crossing: dict[int, tuple[dist.Work | None, Tensor]] = {}
        returning: dict[int, tuple[dist.Work | None, Tensor]] = {}
        # All ranks start their collectives in this order, and wait for none that the next could begin before.
        for turn in range(len(buckets) + 2):
            if turn < len(buckets):
                crossing[turn] = self._send(part, buckets[turn], turn % UNDER_WAY, nodes, list(map(len, theirs)))
            if 0 <= (number := turn - 1) < len(buckets):
                work, received = crossing.pop(number)
                _wait(work)
                shards = list(zip(order, received.unbind(), strict=True))
                folded = fold(total, shards, lambda a, b: a.add_(b))
                returning[number] = self._give_back(part, buckets[number], number % UNDER_WAY, folded)
            if (number := turn - 2) >= 0:
                work, gathered = returning.pop(number)
                _wait(work)
                part.unpack(buckets[number], gathered, sums)

    def _send(
        self, part: _Part, bucket: _Bucket, slot: int, nodes: list[Values], counts: list[int]
    ) -> tuple[dist.Work | None, Tensor]:
        """Send every rank its shard of this rank's nodes; return the shards of all nodes that are this rank's."""
        world, shard = self._world_size, bucket.shard
        sent = self._buffer(f"sent {slot}", world * len(nodes) * shard, part)
        by_rank = sent.view(world, len(nodes), shard)
        if len(nodes) == 1:
            part.pack(bucket, nodes[0], sent)
        elif nodes:
            flat = self._buffer("flat", world * shard, part)
            for number, values in enumerate(nodes):
                part.pack(bucket, values, flat)
                by_rank[:, number] = flat.view(world, shard)
        received = self._buffer(f"received {slot}", sum(counts) * shard, part)
        work = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=[count * shard for count in counts],
            input_split_sizes=[len(nodes) * shard] * world,
            group=self._group,
            async_op=True,
        )
        return work, received.view(sum(counts), shard)

    def _give_back(self, part: _Part, bucket: _Bucket, slot: int, folded: Tensor) -> tuple[dist.Work | None, Tensor]:
        gathered = self._buffer(f"gathered {slot}", self._world_size * bucket.shard, part)
        return _all_gather(gathered, folded, group=self._group, async_op=True), gathered

    def _buffer(self, name: str, length: int, part: _Part) -> Tensor:
        """Return a tensor to work in, the same one for the same name."""
        key = (name, length, part.dtype, part.device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(length, dtype=part.dtype, device=part.device)
        return self._buffers[key]


def _join(left: Values, right: Values) -> Values:
    """Add right to left, in place where both have a value."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    alone = [a if b is None else b for a, b in zip(left, right, strict=True) if (a is None) != (b is None)]
    if lonely := [value for value in alone if value is not None]:
        torch._foreach_add_(lonely, 0.0)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def _in_memory(value: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order in which they lie in memory, as a view."""
    return value.as_strided((value.numel(),), (1,))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in its part's flat order, and how its elements lie in memory: densely, in some order."""

    which: int
    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]

    def new(self, part: _Part) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=part.dtype, device=part.device)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A range of a part, cut into equal shards, the last of which may be padded."""

    start: int
    stop: int
    shard: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensors of one dtype and device, in one flat order."""

    dtype: torch.dtype
    device: torch.device
    tensors: tuple[_Place, ...]

    def buckets(self, world_size: int) -> Iterator[_Bucket]:
        length = self.tensors[-1].stop
        step = max(1, BUCKET_BYTES // self.dtype.itemsize)
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield _Bucket(start, stop, -(-(stop - start) // world_size))

    def pack(self, bucket: _Bucket, values: Values, flat: Tensor) -> None:
        """Copy a bucket of values into a flat tensor, zero where there are none."""
        for place, inside, outside in self._pieces(bucket):
            value = values[place.which]
            if value is None:
                flat[outside].zero_()
            else:
                flat[outside].copy_(_in_memory(value)[inside])
        flat[bucket.stop - bucket.start :].zero_()

    def unpack(self, bucket: _Bucket, flat: Tensor, values: Values) -> None:
        """Copy a flat tensor into a bucket of values."""
        for place, inside, outside in self._pieces(bucket):
            value = values[place.which]
            if value is not None:
                _in_memory(value)[inside].copy_(flat[outside])

    def _pieces(self, bucket: _Bucket) -> Iterator[tuple[_Place, slice, slice]]:
        """Yield what of each tensor lies in a bucket: its range in the tensor, and in the bucket."""
        for place in self.tensors:
            start, stop = max(place.start, bucket.start), min(place.stop, bucket.stop)
            if start < stop:
                inside = slice(start - place.start, stop - place.start)
                yield place, inside, slice(start - bucket.start, stop - bucket.start)


def _layout(like: Sequence[Tensor]) -> list[_Part]:
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for which, tensor in enumerate(like):
        if tensor.layout != torch.strided:
            raise ValueError(f"tensor {which} is sparse; an exact reduction takes dense ones only")
        kinds.setdefault((tensor.dtype, tensor.device), []).append(which)
    parts = []
    for (dtype, device), members in kinds.items():
        places: list[_Place] = []
        for which in members:
            start = places[-1].stop if places else 0
            # Of a layout with gaps or overlaps this makes a dense one.
            stride = torch.empty_like(like[which], device="meta").stride()
            places.append(_Place(which, start, start + like[which].numel(), like[which].shape, stride))
        parts.append(_Part(dtype, device, tuple(places)))
    return parts
