"""Whether the nodes' checkpoint directories are one, found out by putting a file there.

A path tells nothing: ``/checkpoints`` may be one network file system or the local disks of as many nodes.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_launch.training.ranks.world import World

__all__ = ["Writers", "behind_url", "in_directory"]


@dataclass(frozen=True, slots=True)
class Writers:
    """Who writes checkpoints.

    Attributes:
        me: whether this rank does: the first one, and the first of each node that has a directory of its own.
        drawn: a random number, the same on all ranks, if all nodes have one and the same place; else 0.
    """

    me: bool
    drawn: int = 0


def in_directory(directory: Path, world: World) -> Writers:
    """Find out who is to write checkpoints; called by all ranks at once.

    The first rank is, and on each node that does not see its directory the first local rank: each directory has one
    writer. Where the first rank cannot write, nothing is known, and it alone tries on.
    """
    if world.world_size == world.local_world_size:
        return Writers(world.rank == 0)
    mark = _put(directory) if world.rank == 0 else 0
    drawn = _broadcast(mark)
    # The name is new, so that no cache of a network file system can know it as absent.
    own = bool(drawn) and world.local_rank == 0 and not os.path.exists(_path(directory, drawn))
    others = torch.tensor([float(own)])
    dist.all_reduce(others)  # and nobody goes on before all have looked
    if mark:
        with suppress(OSError):
            _path(directory, mark).unlink()
    return Writers(world.rank == 0 or own, 0 if others.item() else drawn)


def behind_url(world: World) -> Writers:
    """As :func:`in_directory`, for what is one place for all nodes."""
    if world.world_size == world.local_world_size:
        return Writers(world.rank == 0)
    return Writers(world.rank == 0, _broadcast(_draw() if world.rank == 0 else 0))


def _broadcast(number: int) -> int:
    told = torch.tensor([number])
    dist.broadcast(told, src=0)
    return int(told)


def _draw() -> int:
    return secrets.randbits(62) | 1


def _put(directory: Path) -> int:
    """Put a file with a random number in its name, and return the number; 0 if it cannot be put."""
    number = _draw()
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        _path(directory, number).touch()
        return number
    return 0


def _path(directory: Path, number: int) -> Path:
    return directory / f".shared-{number:x}"
