"""The tensors that each node writes to durable storage, if no node has the whole of a sharded state.

Each gathers a run of whole tensors, in nearly equal parts by bytes; see ``elastic_launch.snapshot.storage.shares`` for
how these become one checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_launch.snapshot.format.manifest import MAX_SHARES
from elastic_launch.snapshot.format.tensor_file import copied
from elastic_launch.snapshot.storage.shares import OwnShare, cuts
from elastic_launch.training.checkpoints.sharded import StateGatherer, bytes_in
from elastic_launch.training.checkpoints.split import here, named, owners
from elastic_launch.training.ranks.exchange import swap
from elastic_launch.training.ranks.spreading import Box, narrowed


def own_tensors(
    state: dict[str, Any],
    gatherer: StateGatherer,
    boxes: Sequence[Sequence[Box]],
    firsts: Sequence[int],
    rank: int,
    nonce: str = "",
) -> OwnShare | None:
    """Return the tensors that this rank's node writes to durable storage, each whole; called by all ranks.

    Args:
        state, gatherer, boxes: as for :func:`taken`.
        firsts: the first rank of each node.
        nonce: as for :class:`OwnShare`.

    Returns:
        None if there is a single share.
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
    tensors, rest, left = named(state, gatherer)
    found = {left[index]: tensor for index, tensor in whole.items()}
    if number == 0:
        found |= {name: copied(tensor.cpu()) for name, tensor in tensors.items() if not tensor.is_meta}
    return OwnShare(number, count, nonce, found, rest)
