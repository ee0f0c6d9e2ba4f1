"""Finds out whether the nodes share one checkpoint directory, by writing a file there.

The path alone does not show it: ``/checkpoints`` may be one network file system or the local disk of each node.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_launch.training.ranks.exchange import exchanging
from elastic_launch.training.ranks.world import World


@dataclass(frozen=True, slots=True)
class Writers:
    """Which ranks write checkpoints."""

    me: bool  # whether this rank does: rank 0, and the first rank of each node that has its own directory
    drawn: int = 0  # a random number, the same on all ranks, if all nodes share one location; else 0


def in_directory(directory: Path, world: World) -> Writers:
    """Find out which ranks write checkpoints; called by all ranks together.

    Rank 0 writes, and the first rank of each node that does not see rank 0's directory, so that each directory has one
    writer. If rank 0 cannot write, nothing is known about the directories, and only rank 0 keeps trying.
    """
    if world.world_size == world.local_world_size:
        return Writers(world.rank == 0)
    mark = _put(directory) if world.rank == 0 else 0
    drawn = _broadcast(mark)
    # The name is new, so that no cache of a network file system can know it as absent.
    own = bool(drawn) and world.first_on_node and not os.path.exists(_path(directory, drawn))
    others = torch.tensor([float(own)], device="cpu")
    with exchanging():
        dist.all_reduce(others)  # also waits until all ranks have looked
    if mark:
        with suppress(OSError):
            _path(directory, mark).unlink()
    return Writers(world.rank == 0 or own, 0 if others.item() else drawn)


def behind_url(world: World) -> Writers:
    """Like :func:`in_directory`, for a URL, which is one location for all nodes."""
    if world.world_size == world.local_world_size:
        return Writers(world.rank == 0)
    return Writers(world.rank == 0, _broadcast(_draw() if world.rank == 0 else 0))


def _broadcast(number: int) -> int:
    told = torch.tensor([number], device="cpu")
    with exchanging():
        dist.broadcast(told, src=0)
    return int(told)


def _draw() -> int:
    return secrets.randbits(62) | 1


def _put(directory: Path) -> int:
    """Write a file with a random number in its name, and return the number; 0 if it cannot be written."""
    number = _draw()
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        _path(directory, number).touch()
        return number
    return 0


def _path(directory: Path, number: int) -> Path:
    return directory / f".shared-{number:x}"
