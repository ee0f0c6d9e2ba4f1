"""The exact reduction: gradients are added in one fixed tree over the micro-batch's index, at any world size.

Each rank folds its slice of the micro-batches into nodes of the tree while it computes them. At the step's end, the
nodes are exchanged in shards: each rank folds its shard of all nodes in the tree's order, and sends back the sums, see
``shards``. If slices are aligned, each rank sends one node, as many bytes as a ring all-reduce; otherwise up to
2 * log2 of the slice's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.batch import slice_of
from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.flat import SMALL, Values, layout
from elastic_launch.training.gradients.shards import ShardExchange
from elastic_launch.training.gradients.tree import Segment, fold, joins, segments


class ExactReduction:
    """Sums tensors over micro-batches and ranks, bitwise equal at every world size.

    A missing value counts as zero and is added, even if all other values are on one rank, because adding zero changes
    the sign of a negative zero.

    Args:
        like: tensors with the shapes, dtypes and devices of those to be summed; only these properties are kept.
        names: names of the first tensors, for errors.
    """

    early = False
    """Nothing is sent before all ranks have reached the step's end."""

    room = 0
    """No cargo is sent with gradients."""

    def __init__(self, like: Sequence[Tensor], world_size: int, rank: int, *, names: Sequence[str] = ()) -> None:
        self._names = [*names, *map("tensor {}".format, range(len(names), len(like)))]
        self._world_size = world_size
        self._rank = rank
        self._parts = layout(like)
        self._places = {place.which: (part, place) for part in self._parts for place in part.places}
        self._stack: list[tuple[Segment, Values]] = []
        self._leaf: _Leaf | None = None
        self._in_parts: set[int] = set()
        self._free: list[list[Tensor]] = [[] for _ in like]
        self._given: Values = [None] * len(like)
        self._exchange = ShardExchange(world_size, rank)

    def begin(self, index: int) -> None:
        """Begin a micro-batch, by its index in the global batch; each rank begins its micro-batches in order."""
        segments_so_far = [segment for segment, _ in self._stack]
        joined = joins(segments_so_far, index)
        lefts = [values for _, values in reversed(self._stack[len(self._stack) - joined :])]
        self._leaf = _Leaf(index, lefts, [None] * len(self._places), [False] * len(self._places))

    def put(self, which: int, value: Tensor) -> None:
        """Add the micro-batch's value for a tensor.

        It is added at once to all nodes that it belongs to, while it is still in the cache.

        Args:
            value: the value; it may come in parts (reentrant checkpointing).

        Raises:
            UsageError: if a value comes in parts for the first time after the first micro-batch.
        """
        leaf = self._leaf
        assert leaf is not None
        if leaf.put[which] or which in self._in_parts:
            self._put_a_part(leaf, which, value)
            return
        leaf.put[which] = True
        self._add_to_lefts(leaf, which, value)

    def _put_a_part(self, leaf: _Leaf, which: int, value: Tensor) -> None:
        """Add one of several parts of a value; the parts must be summed before anything else is added to them."""
        if leaf.put[which] and leaf.lefts:
            raise UsageError(
                f"The gradient of {self._names[which]} came in several parts, and in one in a micro-batch before.",
                "Use activation checkpointing with use_reentrant=False, or without exact=True.",
            )
        self._in_parts.add(which)
        whole = leaf.result[which] if leaf.put[which] else leaf.pending.get(which)
        if whole is None:
            leaf.pending[which] = self._take(which).copy_(value)
        else:
            whole.add_(value)

    def _add_to_lefts(self, leaf: _Leaf, which: int, value: Tensor) -> None:
        part, place = self._places[which]
        if value.layout is not torch.strided:
            raise UsageError(
                f"{self._names[which]} gets a sparse gradient, which cannot be added in a fixed order.",
                "Have it made dense (sparse=False), or leave out exact=True.",
            )
        if value.stride() != place.stride:
            # Sums over all elements, such as a norm, depend to the bit on the order in memory.
            value = place.new(part).copy_(value)
        # Two gradients may share memory, as those of both terms of a sum do: the value is never written to.
        total, fresh = value, None
        for left in leaf.lefts:
            own = left[which]
            if own is not None:
                total = own.add_(total)
            elif fresh is None and total is value:
                total = fresh = self._take(which).copy_(value).add_(0.0)
            else:
                total.add_(0.0)
        leaf.result[which] = total if leaf.lefts else self._take(which).copy_(value)
        if fresh is not None and fresh is not total:
            self._free[which].append(fresh)

    def end(self) -> None:
        """End the current micro-batch; tensors without a :meth:`put` have no value."""
        leaf, self._leaf = self._leaf, None
        assert leaf is not None
        for which, whole in leaf.pending.items():
            leaf.put[which] = True
            self._add_to_lefts(leaf, which, whole)
            self._free[which].append(whole)
        for which, put in enumerate(leaf.put):
            if not put:
                leaf.result[which] = _sum_of_lefts([left[which] for left in leaf.lefts])
            self._free[which] += [
                x for left in leaf.lefts if (x := left[which]) is not leaf.result[which] and x is not None
            ]
        level = len(leaf.lefts)
        del self._stack[len(self._stack) - level :]
        self._stack.append(((leaf.index + 1 - (1 << level), level), leaf.result))

    def reset(self) -> None:
        """Begin the next step: drop all values, and reuse the memory of the returned sums."""
        self._leaf = None
        for values in (*(values for _, values in self._stack), self._given):
            for which, value in enumerate(values):
                if value is not None:
                    self._free[which].append(value)
        self._stack, self._given = [], [None] * len(self._places)

    def totals(self) -> None:
        """Return None: autograd must not add in place, which would be in another order than the tree's."""

    def begin_pass(self, *, last: bool) -> None: ...

    def end_pass(self) -> None: ...

    def send(self) -> None: ...

    def abandon(self) -> None:
        """Give the step up."""
        self.reset()

    def give_up(self) -> None:
        """Give the step up after a failed exchange."""
        self._exchange.give_up()
        self.reset()

    @property
    def whole(self) -> bool:
        """Whether each tensor has a value on this rank."""
        nodes = [values for _, values in self._stack]
        return any(all(value is not None for value in values) for values in nodes)

    def finish(self, total: int, *, whole: bool = False) -> Values:
        """Return the sums over all ranks, None if no micro-batch of any rank had a value; valid until :meth:`reset`.

        Args:
            total: M, the number of micro-batches of all ranks.
            whole: whether each tensor is known to have a value on some rank; the same on all ranks.
        """
        nodes, self._stack = self._stack, []
        mine = slice_of(total, self._world_size, self._rank)
        if [segment for segment, _ in nodes] != segments(*mine):
            raise ValueError(
                f"rank {self._rank} was to add the micro-batches {mine[0]} to {mine[1] - 1} of {total}, in order"
            )
        values = [values for _, values in nodes]
        if self._world_size == 1:
            self._given = fold(total, nodes, _join)
        else:
            self._given = self._sum_over_ranks(values, total, whole)
        for node in values:
            for which, value in enumerate(node):
                if value is not None and value is not self._given[which]:
                    self._free[which].append(value)
        return list(self._given)

    def _sum_over_ranks(self, nodes: list[Values], total: int, whole: bool) -> Values:
        """Return the sums of all ranks' nodes; this rank's nodes provide their memory."""
        sums = self._present_sums(nodes, whole)
        for node in nodes:
            for which, value in enumerate(node):
                if value is None and sums[which] is not None:
                    node[which] = self._take(which).zero_()
        theirs = [segments(*slice_of(total, self._world_size, rank)) for rank in range(self._world_size)]
        for part in self._parts:
            flats = list(part.flats(nodes, sums))
            if len(flats) == 1 and len(flats[0].total) <= SMALL:
                self._exchange.sum_small(flats[0].nodes, flats[0].total, theirs, total)
                flats[0].unpack()
                continue
            self._exchange.sum([(flat.nodes, flat.total) for flat in flats], theirs, total)
            for flat in flats:
                flat.unpack()
        return sums

    def _present_sums(self, nodes: list[Values], whole: bool) -> Values:
        """Return a tensor for each sum, None if no rank has a value; it is the first node's tensor if there is one."""
        count = len(self._places)
        present = torch.ones(count, dtype=torch.int32, device="cpu")
        if not whole:
            mine = [any(values[which] is not None for values in nodes) for which in range(count)]
            present = torch.tensor(mine, dtype=torch.int32, device="cpu")
            dist.all_reduce(present, op=dist.ReduceOp.MAX)
        first = nodes[0] if nodes else [None] * count
        return [
            None if not there else self._take(which) if (own := first[which]) is None else own
            for which, there in enumerate(present.tolist())
        ]

    def _take(self, which: int) -> Tensor:
        """Return a tensor for a sum, reusing a free one if possible: new memory costs more than the addition."""
        part, place = self._places[which]
        return self._free[which].pop() if self._free[which] else place.new(part)


@dataclass(slots=True)
class _Leaf:
    """The current micro-batch."""

    index: int
    lefts: list[Values]  # the nodes that its value is added to, the nearest first; the last one receives the sum
    result: Values  # the sums by tensor, for values that were put
    put: list[bool]  # which tensors have a value in the result
    pending: dict[int, Tensor] = field(default_factory=dict)  # values of which more parts may come


def _sum_of_lefts(lefts: list[Tensor | None]) -> Tensor | None:
    """Add a missing value to nodes, the nearest first."""
    total: Tensor | None = None
    for left in lefts:
        if left is not None:
            total = left.add_(0.0 if total is None else total)
        elif total is not None:
            total.add_(0.0)
    return total


def _join(left: Values, right: Values) -> Values:
    """Add right to left, in place where both have a value."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    alone = [a if b is None else b for a, b in zip(left, right, strict=True) if (a is None) != (b is None)]
    if lonely := [value for value in alone if value is not None]:
        torch._foreach_add_(lonely, 0.0)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
