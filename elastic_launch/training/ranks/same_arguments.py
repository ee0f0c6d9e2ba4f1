"""What a training is given must be the same on all ranks: compared before anything depends on it.

A rank with another seed or dataset takes samples that are not its own, and one without a checkpoint leaves the others
waiting for it. Each rank sees only its own arguments, so nothing else would notice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
import torch.distributed as dist

from elastic_launch.errors import UsageError
from elastic_launch.training.ranks.world import World

__all__ = ["check_same"]


def check_same(world: World, given: Mapping[str, object]) -> None:
    """Compare what the ranks were given; called by all ranks.

    Args:
        given: by the names that errors use; compared as text.

    Raises:
        UsageError: on all ranks, naming what differs first, and on which rank.
    """
    if world.world_size == 1:
        return
    text = json.dumps({name: str(value) for name, value in given.items()}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest, len(text)], dtype=torch.int64)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    most, least, longest = bounds.tolist()
    if most == -least:
        return
    mine = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(gathered, mine)
    raise UsageError(
        f"The ranks were given different things: {_difference([json.loads(bytes(x.tolist())) for x in gathered])}.",
        "Give all ranks the same. Each takes its own part of every global batch, and which of them reads and writes "
        "checkpoints is decided here.",
    )


def _difference(found: list[dict[str, str]]) -> str:
    first = found[0]
    for rank, other in enumerate(found):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                return f"rank {rank} has {name} {other.get(name, 'none')}, rank 0 has {first.get(name, 'none')}"
    raise AssertionError("their digests differ")
