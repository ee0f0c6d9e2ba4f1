"""The exact reduction: gradients are added in one fixed tree over the micro-batch's index, at any world size.

Each rank adds its slice of the micro-batches up to nodes of the tree while it computes them. At the step's end, the
nodes are exchanged in shards: each rank folds its shard of all nodes in the tree's order, and sends back the sums, see
``shards``. If slices are aligned, each rank sends one node, as many bytes as a ring all-reduce; otherwise up to
2 * log2 of the slice's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch.batch import slice_of
from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.flat import Reduction, Values, alike, packed, sharing
from elastic_launch.training.gradients.shards import ShardExchange
from elastic_launch.training.gradients.tree import Segment, fold, joins, segments
from elastic_launch.training.live.waits import on_host
from elastic_launch.training.ranks.mesh import ALL, RankGroup


@dataclass(slots=True)
class _Node:
    """The values of all tensors in a node of the tree."""

    flats: list[Tensor]  # one for each dtype and device
    views: list[Tensor]  # of these, one for each tensor
    own: list[int]  # ``sharing`` of each flat while no view is given out


class ExactReduction(Reduction):
    """Sums tensors over micro-batches and ranks, bitwise equal at every world size.

    A missing value counts as zero and is added, even if all other values are on one rank, because adding zero changes
    the sign of a negative zero.

    Args:
        like: tensors with the shapes, dtypes and devices of those to be summed.
        world_size, rank: how many ranks sum, and this one's place among them.
        names: names of the first tensors, for errors.
        peers: the ranks that sum, if not all.
    """

    def __init__(
        self, like: Sequence[Tensor], world_size: int, rank: int, *, names: Sequence[str] = (), peers: RankGroup = ALL
    ) -> None:
        self._like = [*like]
        self._names = [*names, *map("tensor {}".format, range(len(names), len(like)))]
        self._world_size = world_size
        self._rank = rank
        self._kinds = alike(like)
        self._peers = peers
        self._exchange = ShardExchange(world_size, rank, peers)
        self._nodes: list[tuple[Segment, _Node]] = []
        self._index = 0  # of the current micro-batch
        self._lefts: list[_Node] = []  # that it completes, the nearest first; the last one receives the sum
        self._leaf: _Node | None = None  # its values that are not added to these at once
        self._in_parts: set[int] = set()
        self._put = self._present = [False] * len(like)  # values of the micro-batch, and of any one in the step
        self._sum: _Node | None = None
        self._free: list[_Node] = []  # new memory costs more than an addition

    def begin(self, index: int) -> None:
        joined = joins([segment for segment, _ in self._nodes], index)
        self._lefts = [node for _, node in self._nodes[len(self._nodes) - joined :][::-1]]
        self._index, self._leaf = index, None if self._lefts else self._new()
        self._put = [False] * len(self._like)

    def put(self, which: int, value: Tensor) -> None:
        """Add the micro-batch's value for a tensor to all nodes that it belongs to, while it is still in the cache.

        It may come in parts (reentrant checkpointing), which must be summed before they are added to anything else.

        Raises:
            UsageError: if a value comes in parts for the first time after the first micro-batch.
        """
        if value.layout is not torch.strided:
            raise UsageError(
                f"{self._names[which]} gets a sparse gradient, which cannot be added in a fixed order.",
                "Make it dense (sparse=False), or leave out exact=True.",
            )
        if not self._put[which]:
            self._put[which] = True
            if self._lefts and which not in self._in_parts:
                self._add_to_lefts(which, value)
            else:
                self._own(which).copy_(value)
        elif self._lefts and which not in self._in_parts:
            raise UsageError(
                f"The gradient of {self._names[which]} came in several parts, but in one in an earlier micro-batch.",
                "Use activation checkpointing with use_reentrant=False, or leave out exact=True.",
            )
        else:
            self._in_parts.add(which)
            self._own(which).add_(value)

    def end(self) -> None:
        for which, put in enumerate(self._put):
            if not put:
                self._own(which).zero_()
            if not put or which in self._in_parts:
                self._add_to_lefts(which, self._own(which))
        self._present = [*map(max, self._present, self._put)]
        level = len(self._lefts)
        *others, node = [node for node in (self._leaf, *self._lefts) if node is not None]
        self._free += others
        self._leaf = None
        self._nodes[len(self._nodes) - level :] = [((self._index + 1 - (1 << level), level), node)]

    def _own(self, which: int) -> Tensor:
        """Return the memory for the micro-batch's own value of a tensor."""
        if self._leaf is None:
            self._leaf = self._new()
        return self._leaf.views[which]

    def _add_to_lefts(self, which: int, value: Tensor) -> None:
        for left in self._lefts:
            value = left.views[which].add_(value)

    def reset(self) -> None:
        given = self._sum  # its memory is used again, too, unless something still holds a gradient
        if given is not None and [*map(sharing, given.flats)] != given.own:
            given = None
        nodes = [self._leaf, given, *(node for _, node in self._nodes)]
        self._free += [node for node in nodes if node is not None]
        self._leaf = self._sum = None
        self._nodes, self._present = [], [False] * len(self._like)

    def abandon(self) -> None:
        self.reset()

    def give_up(self) -> None:
        self._exchange.give_up()
        self.reset()

    @property
    def whole(self) -> bool:
        return all(self._present)

    def finish(self, total: int, *, whole: bool = False) -> Values:
        nodes, self._nodes = self._nodes, []
        mine = slice_of(total, self._world_size, self._rank)
        if [segment for segment, _ in nodes] != segments(*mine):
            raise ValueError(
                f"rank {self._rank} was to add the micro-batches {mine[0]} to {mine[1] - 1} of {total}, in order"
            )
        if self._world_size == 1:
            self._sum = fold(total, nodes, self._added)
        else:
            if not whole:
                present = torch.tensor(self._present, dtype=torch.int32, device="cpu")
                on_host(dist.all_reduce, present, op=dist.ReduceOp.MAX, group=self._peers.group)
                self._present = [there > 0 for there in present.tolist()]
            own = [node for _, node in nodes]
            self._sum = own[0] if own else self._new()
            theirs = [segments(*slice_of(total, self._world_size, rank)) for rank in range(self._world_size)]
            for kind, result in enumerate(self._sum.flats):
                self._exchange.sum([node.flats[kind] for node in own], result, theirs, total)
            self._free += own[1:]
        pairs = zip(self._sum.views, self._present, strict=True)
        return [view.detach() if there or whole else None for view, there in pairs]

    def _added(self, left: _Node, right: _Node) -> _Node:
        for mine, value in zip(left.flats, right.flats, strict=True):
            mine.add_(value)
        self._free.append(right)
        return left

    def _new(self) -> _Node:
        if self._free:
            return self._free.pop()
        node = _Node([], [*self._like], [])
        for members in self._kinds:
            flat, views = packed([self._like[which] for which in members])
            node.flats.append(flat)
            for which, view in zip(members, views, strict=True):
                node.views[which] = view
            node.own.append(sharing(flat))
        return node
