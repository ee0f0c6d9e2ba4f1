"""Sums gradients over all ranks in the default mode: in buckets, during the last backward pass.

A gradient is copied into its bucket as soon as the backward pass has computed it, and added to the sum of the previous
micro-batches. The bucket's memory is the gradient from then on: it is never copied back. If the script, or an
optimizer, still holds it when the next step begins, the bucket gets other memory. Once the last micro-batch has filled
a bucket, the bucket is reduced over the ranks while the backward pass continues with the next one.

All ranks send the same buckets in the same order, whatever gradients each of them has: a bucket waits for the previous
one, and buckets that the backward pass did not fill are sent at its end, with zeros. After the values, a bucket has a
flag for each parameter; from the sum of these flags, a rank without a gradient of a parameter learns whether another
rank has one. After the flags, the first bucket has room for a cargo: a small step costs little more than its
collectives, so it makes one and not two.

From its second micro-batch on, a rank lets autograd add to the buckets in place, without a copy or a call for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.flat import MESSAGE, Reduction, Values, packed, sharing
from elastic_launch.training.live.waits import on_host
from elastic_launch.training.ranks.mesh import ALL, RankGroup

FIRST_BYTES = 1024 * 1024
"""Size of the first bucket in bytes: the sooner it is full, the sooner the exchange begins."""


@dataclass(slots=True)
class _Bucket:
    """Gradients that are reduced together."""

    members: list[int]  # indices of the parameters
    flat: Tensor  # a one-dimensional tensor: the gradients' values, then a flag for each, then the cargo
    flags: Tensor
    cargo: Tensor
    own: int  # ``sharing`` of their memory while no gradient is given out
    pending: int = 0  # number of members that the last micro-batch has not computed yet
    work: dist.Work | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class BucketedReduction(Reduction):
    """Sums gradients over micro-batches and ranks.

    Args:
        like: tensors with the shapes, dtypes and devices of the gradients, by the names used in errors.
        sparse: indices of those with sparse gradients, which are sent one by one at the end.
        overlap: whether buckets are sent as soon as they are full; otherwise all are sent at the end, which all ranks
            are known to reach.
        room: maximum number of elements of the cargo.
        peers: the ranks that sum.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        sparse: frozenset[int],
        *,
        overlap: bool,
        room: int = 0,
        peers: RankGroup = ALL,
    ) -> None:
        self._names, self._like = [*like], [*like.values()]
        self._sparse = sorted(sparse)
        self._overlap = overlap
        self._room = room
        self._peers = peers
        # The first step shows the order of the gradients. Until then nothing is sent early, so a gradient may come in
        # parts.
        self._learned = False
        self._in_parts: set[int] = set()
        self._buckets: list[_Bucket] = []
        self._views: list[Tensor] = [torch.empty(0)] * len(self._like)
        self._home: list[_Bucket | None] = [None] * len(self._like)
        self._cargo: Tensor | None = None
        self._build(range(len(self._like) - 1, -1, -1))
        self.reset()

    @property
    def early(self) -> bool:
        return self._overlap and self._learned

    @property
    def room(self) -> int:
        return self._room if self.early and self._buckets else 0

    def load(self, cargo: Tensor) -> None:
        self._cargo = cargo

    def delivered(self) -> Tensor:
        if not self._next:
            self._send()
        first = self._buckets[0]
        assert first.work is not None
        first.work.wait()
        return first.cargo

    def reset(self) -> None:
        self._cargo = None
        self._present = [False] * len(self._like)
        self._seen = [False] * len(self._like)
        self._sparse_sums: dict[int, Tensor] = {}
        self._next = 0  # the bucket to be sent next
        self._arrived: list[int] = []
        self._sending = False  # whether the last pass is under way
        for place, bucket in enumerate(self._buckets):
            if sharing(bucket.flat) > bucket.own:
                self._buckets[place] = self._new_bucket(bucket.members, 0 if place else self._room)
            self._buckets[place].pending = len(bucket.members)

    def begin_pass(self, *, last: bool) -> None:
        self._seen = [False] * len(self._like)
        self._sending = last

    def end_pass(self) -> None:
        if self._sending:
            self.send()
        self._sending = False

    def send(self) -> None:
        if self.early:
            self._send_all()

    def put(self, which: int, gradient: Tensor) -> None:
        bucket = self._home[which]
        if gradient.layout is not torch.strided or bucket is None:
            self._put_sparse(which, gradient, bucket)
            return
        self._refuse_late(which, bucket)
        if self._present[which]:
            self._views[which].add_(gradient)
        else:
            self._views[which].copy_(gradient)
            self._present[which] = True
        if self._sending:
            self._count(which, bucket)

    def totals(self) -> Values:
        pairs = zip(self._views, self._present, self._home, strict=True)
        return [view if present and home is not None else None for view, present, home in pairs]

    def added(self, which: int) -> None:
        bucket = self._home[which]
        if self._sending and bucket is not None:
            self._refuse_late(which, bucket)
            self._count(which, bucket)

    def _refuse_late(self, which: int, bucket: _Bucket) -> None:
        if bucket.work is not None:
            raise UsageError(
                f"The gradient of {self._names[which]} came in several parts, the last one after it was sent.",
                "Use activation checkpointing with use_reentrant=False, or exact=True.",
            )

    def _count(self, which: int, bucket: _Bucket) -> None:
        self._arrived.append(which)
        if self._seen[which]:
            self._in_parts.add(which)
            return
        self._seen[which] = True
        if which in self._in_parts:
            return  # more may come: it waits for the end of the pass
        bucket.pending -= 1
        if not bucket.pending and self.early:
            while self._next < len(self._buckets) and not self._buckets[self._next].pending:
                self._send()

    def finish(self, total: int, *, whole: bool = False) -> Values:
        self._send_all()
        sums: Values = [None] * len(self._like)
        for bucket in self._buckets:
            bucket.wait()
            mine = [self._present[which] for which in bucket.members]
            # Reading the flags waits for a GPU, so only ranks that lack a gradient do it.
            there = mine if all(mine) else [flag > 0 for flag in bucket.flags.tolist()]
            for which, present in zip(bucket.members, there, strict=True):
                sums[which] = self._views[which].detach() if present else None
        for which in self._sparse:
            sums[which] = self._reduce_sparse(which)
        if not self._learned:
            self._learn()
        return sums

    def abandon(self) -> None:
        self.send()  # so that all ranks have sent the same
        for bucket in self._buckets:
            bucket.wait()

    def give_up(self) -> None:
        for bucket in self._buckets:
            with suppress(RuntimeError):
                bucket.wait()
            bucket.work = None

    def _send_all(self) -> None:
        while self._next < len(self._buckets):
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        present = [self._present[which] for which in bucket.members]
        if all(present):
            bucket.flags.fill_(1)
        elif not any(present):
            bucket.flat.zero_()
        else:
            for which, there in zip(bucket.members, present, strict=True):
                if not there:
                    self._views[which].zero_()
            bucket.flags.copy_(torch.tensor(present, dtype=bucket.flags.dtype))
        used = bucket.flat
        if bucket is self._buckets[0] and self._room:
            unused = self._room
            if self._cargo is not None:
                unused -= len(self._cargo)
                bucket.cargo[: len(self._cargo)].copy_(self._cargo)
            if unused:
                used = used[:-unused]
        bucket.work = dist.all_reduce(used, group=self._peers.group, async_op=True)

    def _learn(self) -> None:
        """Put the parameters into buckets in the order in which rank 0's backward pass computes their gradients."""
        last = {which: place for place, which in enumerate(self._arrived)}
        ranked = sorted(last, key=lambda which: last[which])
        # Parameters without a gradient come last, so that the others do not wait for them.
        ranked += [which for which in range(len(self._like) - 1, -1, -1) if which not in last]
        order = torch.tensor(ranked, dtype=torch.int64, device="cpu")
        on_host(dist.broadcast, order, src=self._peers.rank(0), group=self._peers.group)
        self._learned = True
        self._build(order.tolist())  # gradients of this step stay where they are

    def _build(self, order: Sequence[int]) -> None:
        """Cut the order into buckets, of one dtype and device each."""
        self._buckets = []
        open_: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
        for which in order:
            if which in self._sparse:
                continue
            like = self._like[which]
            members, size = open_.pop((like.dtype, like.device), ([], 0))
            members.append(which)
            size += like.nbytes
            if size >= (MESSAGE if self._buckets else FIRST_BYTES):
                self._buckets.append(self._new_bucket(members, 0 if self._buckets else self._room))
            else:
                open_[like.dtype, like.device] = members, size
        for members, _ in open_.values():
            self._buckets.append(self._new_bucket(members, 0 if self._buckets else self._room))

    def _new_bucket(self, members: list[int], room: int) -> _Bucket:
        flat, views = packed([self._like[which] for which in members], len(members) + room)
        end = len(flat) - room
        bucket = _Bucket(members, flat, flat[end - len(members) : end], flat[end:], own=0)
        for which, view in zip(members, views, strict=True):
            self._views[which], self._home[which] = view, bucket
        bucket.own = sharing(flat)
        return bucket

    def _put_sparse(self, which: int, gradient: Tensor, bucket: _Bucket | None) -> None:
        if bucket is not None:
            raise UsageError(
                f"{self._names[which]} gets a sparse gradient, and no module says so.",
                "Use nn.Embedding or nn.EmbeddingBag with sparse=True for it, or make its gradient dense.",
            )
        if gradient.layout is torch.strided:
            raise UsageError(
                f"{self._names[which]} is the weight of an embedding with sparse=True, and gets a dense gradient.",
                "Build the embedding with sparse=False: something else uses its weight, too.",
            )
        known = self._sparse_sums.get(which)
        self._sparse_sums[which] = gradient if known is None else known + gradient
        self._present[which] = True

    def _reduce_sparse(self, which: int) -> Tensor | None:
        own = self._sparse_sums.get(which)
        if own is None:
            like = self._like[which]
            shape = like.shape
            own = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *shape[1:], dtype=like.dtype), shape
            ).to(like.device)
        own = own.coalesce()
        mine = torch.tensor([own._nnz()], device="cpu")
        found = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self._peers.group))]
        on_host(dist.all_gather, found, mine, group=self._peers.group)
        counts = [int(count) for count in found]
        if not any(counts):
            return None
        # NCCL sums no sparse tensors. As gloo does it: in the order of the ranks.
        indices, values = self._rows_of_all(own.indices().T, counts), self._rows_of_all(own.values(), counts)
        pairs = zip(indices, values, strict=True)
        first, *others = (torch.sparse_coo_tensor(rows.T, each, own.shape, is_coalesced=True) for rows, each in pairs)
        return sum(others, start=first).coalesce()

    def _rows_of_all(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return the rows of each rank, of which it has so many."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=self._peers.group)
        return [each[:count] for each, count in zip(gathered, counts, strict=True)]


class LocalReduction(Reduction):
    """Sums gradients over the micro-batches of a single rank."""

    def __init__(self, count: int) -> None:
        self._sums: Values = [None] * count
        self._memory: set[int] = set()

    def reset(self) -> None:
        self._sums = [None] * len(self._sums)
        self._memory = set()

    def put(self, which: int, gradient: Tensor) -> None:
        """Add a gradient; its memory may become that of the sum."""
        known = self._sums[which]
        if known is None:
            self._sums[which] = self._own(gradient)
        elif gradient.is_sparse:
            self._sums[which] = known + gradient
        else:
            known.add_(gradient)

    def _own(self, gradient: Tensor) -> Tensor:
        """Return the gradient in its own memory: both terms of a sum may get the same tensor."""
        if gradient.layout is not torch.strided:
            return gradient
        memory = gradient.untyped_storage().data_ptr()
        if memory in self._memory:
            return gradient.clone()
        self._memory.add(memory)
        return gradient

    def totals(self) -> Values:
        return [None if total is None or total.is_sparse else total for total in self._sums]

    def finish(self, total: int, *, whole: bool = False) -> Values:
        return list(self._sums)
