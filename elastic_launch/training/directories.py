"""Whether the nodes' checkpoint directories are one, found out by putting a file there.

A path tells nothing: ``/checkpoints`` may be one network file system or the local disks of as many nodes.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_launch.training.world import World

__all__ = ["is_writer"]


def is_writer(directory: Path, world: World) -> bool:
    """Whether this rank is to write checkpoints; called by all ranks at once.

    The first rank does, and on each node that does not see its directory the first local rank: each directory has one
    writer. Where the first rank cannot write, nothing is known, and it alone tries on.
    """
    if world.world_size == world.local_world_size:
        return world.rank == 0
    mark = _put(directory) if world.rank == 0 else 0
    number = torch.tensor([mark])
    dist.broadcast(number, src=0)
    # The name is new, so that no cache of a network file system can know it as absent.
    own = bool(number) and world.local_rank == 0 and not os.path.exists(_path(directory, int(number)))
    dist.all_reduce(torch.zeros(1))  # nobody goes on before all have looked
    if mark:
        with suppress(OSError):
            _path(directory, mark).unlink()
    return world.rank == 0 or own


def _put(directory: Path) -> int:
    """Put a file with a random number in its name, and return the number; 0 if it cannot be put."""
    number = secrets.randbits(62) | 1
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        _path(directory, number).touch()
        return number
    return 0


def _path(directory: Path, number: int) -> Path:
    return directory / f".shared-{number:x}"
