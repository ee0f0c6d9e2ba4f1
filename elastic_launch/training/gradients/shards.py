"""Sums nodes of the tree over all ranks, in shards.

From every bucket, each rank receives one shard of all nodes, folds it in the tree's order, and sends the sum to all
other ranks. This transfers the bytes of a reduce-scatter and an all-gather, as a ring all-reduce does. Messages are
point to point, directly from and into the gradients' memory: gloo's all-gather takes about twice as long (measured on
loopback: 75 ms against 40 ms for 100 MB at two ranks), and packing takes half as long again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.batch import slice_of
from elastic_launch.training.gradients.tree import Segment, fold

BUCKET_BYTES = 16 * 1024 * 1024
"""Bytes of one node exchanged at a time; with the number of buckets in flight, it bounds the memory of the exchange."""

TAGS = 1 << 20
"""Number of message tags before they are reused."""


@dataclass(slots=True)
class _Bucket:
    """Elements being exchanged."""

    nodes: list[Tensor]  # this rank's
    total: Tensor  # receives the sums
    others: dict[int, list[Tensor]] = field(default_factory=dict)  # this rank's shard of each other rank's nodes
    works: list[dist.Work] = field(default_factory=list)  # transfers that must end before the next stage

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class ShardExchange:
    """Sums flat tensors over all ranks, in the tree's order."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size = world_size
        self._rank = rank
        self._buckets: list[_Bucket] = []  # of a sum that is under way, or has failed
        # In rotation, so that at any time all ranks have most partners in common, and no two start with the same one.
        self._next_tag = 0
        self._partners = [(rank + turn) % world_size for turn in range(1, world_size)]

    def sum(self, flats: Sequence[tuple[list[Tensor], Tensor]], theirs: list[list[Segment]], total: int) -> None:
        """Sum flat tensors; called by all ranks with tensors of the same sizes.

        Args:
            flats: pairs of this rank's nodes, which are overwritten, and the tensor that receives the sum: the first
                node's memory, or its own.
            theirs: the nodes of each rank.
            total: M, the number of micro-batches of all ranks.
        """
        self._buckets = buckets = [bucket for nodes, sums in flats for bucket in _cut(nodes, sums)]
        # Three buckets are in flight: one is received, one folded, one sent back. All ranks post in this order.
        for turn in range(len(buckets) + 2):
            if turn < len(buckets):
                self._send(buckets[turn], theirs)
            if 0 <= turn - 1 < len(buckets):
                self._fold(buckets[turn - 1], theirs, total)
            if turn >= 2:
                buckets[turn - 2].wait()
        self._buckets = []

    def give_up(self) -> None:
        """Wait for transfers that fail, so that nothing refers to the process group and they no longer write."""
        for work in [work for bucket in self._buckets for work in bucket.works]:
            with suppress(RuntimeError):
                work.wait()
        self._buckets = []

    def sum_small(self, nodes: list[Tensor], sums: Tensor, theirs: list[list[Segment]], total: int) -> None:
        """Sum a few elements: each rank sends all its elements to all others and folds everything.

        The cost of small messages depends on their number, not their bytes: this takes one exchange instead of two.

        Args:
            nodes, sums: this rank's nodes, which are overwritten, and the tensor that receives the sum.
            theirs, total: as for :meth:`sum`.
        """
        most, size = max(map(len, theirs)), len(sums)
        mine = torch.cat([*nodes, sums.new_zeros((most - len(nodes)) * size)])
        all_nodes = [torch.empty_like(mine) for _ in theirs]
        dist.all_gather(all_nodes, mine)
        pieces = [
            (segment, piece)
            for segments, flat in zip(theirs, all_nodes, strict=True)
            for segment, piece in zip(segments, torch.split(flat, size), strict=False)
        ]
        sums.copy_(fold(total, pieces, lambda left, right: left.add_(right)))

    def _send(self, bucket: _Bucket, theirs: list[list[Segment]]) -> None:
        """Start sending all others their shards of this rank's nodes, and receiving this rank's shards."""
        shard, tag = self._shard(bucket.total, self._rank), self._new_tags(max(map(len, theirs)))
        operations = []
        for partner in self._partners:
            bucket.others[partner] = [torch.empty_like(shard) for _ in theirs[partner]]
            for number, tensor in enumerate(bucket.others[partner], tag):
                operations.append(self._operation(dist.irecv, tensor, partner, number))
            for number, node in enumerate(bucket.nodes, tag):
                operations.append(self._operation(dist.isend, self._shard(node, partner), partner, number))
        bucket.works = _start(operations)

    def _fold(self, bucket: _Bucket, theirs: list[list[Segment]], total: int) -> None:
        """Sum this rank's shard, and start exchanging it for the others' sums."""
        bucket.wait()
        bucket.others[self._rank] = [self._shard(node, self._rank) for node in bucket.nodes]
        nodes = [
            (segment, shard)
            for rank, segments in enumerate(theirs)
            for segment, shard in zip(segments, bucket.others[rank], strict=True)
        ]
        own, tag = self._shard(bucket.total, self._rank), self._new_tags(1)
        own.copy_(fold(total, nodes, lambda left, right: left.add_(right)))
        bucket.others.clear()
        operations = []
        for partner in self._partners:
            operations.append(self._operation(dist.irecv, self._shard(bucket.total, partner), partner, tag))
            operations.append(self._operation(dist.isend, own, partner, tag))
        bucket.works = _start(operations)

    def _new_tags(self, count: int) -> int:
        """Return the first of ``count`` tags that no message in flight has; the same on all ranks."""
        first = self._next_tag
        self._next_tag = (first + count) % TAGS
        return first

    def _shard(self, flat: Tensor, rank: int) -> Tensor:
        start, stop = slice_of(len(flat), self._world_size, rank)
        return flat[start:stop]

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, partner: int, tag: int) -> dist.P2POp | None:
        return dist.P2POp(kind, tensor, partner, tag=tag) if len(tensor) else None


def _cut(nodes: list[Tensor], sums: Tensor) -> list[_Bucket]:
    size = max(1, BUCKET_BYTES // sums.dtype.itemsize)
    return [
        _Bucket([node[start : start + size] for node in nodes], sums[start : start + size])
        for start in range(0, len(sums), size)
    ]


def _start(operations: list[dist.P2POp | None]) -> list[dist.Work]:
    started = [operation for operation in operations if operation is not None]
    return dist.batch_isend_irecv(started) if started else []
