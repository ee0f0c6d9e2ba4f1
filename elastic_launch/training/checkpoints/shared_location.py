"""Which ranks use a location of checkpoints, and what all ranks read there.

The nodes may share a directory, or each have its own. The path alone does not show it: ``/checkpoints`` may be one
network file system or the local disk of each node. So the first rank writes a file there, which others see or not.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_launch import snapshot
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.location import Place, Url
from elastic_launch.snapshot.stall import while_advancing
from elastic_launch.snapshot.storage.lineage import order
from elastic_launch.snapshot.storage.reading import Taking
from elastic_launch.training.live.waits import on_host
from elastic_launch.training.ranks.exchange import broadcast_state, bytes_of_all, exchanging, numbers_of_all
from elastic_launch.training.ranks.spreading import Cuts, in_place, spread_state
from elastic_launch.training.ranks.world import World

Failure = UsageError | snapshot.CheckpointError


@dataclass(frozen=True, slots=True)
class Writers:
    """Which ranks write checkpoints, and read them."""

    me: bool  # whether this rank writes: rank 0, and the first rank of each node that has its own directory
    drawn: int = 0  # a random number, the same on all ranks, if all nodes share one location; else 0
    reads: bool = True  # whether this rank reads


def writers(where: Place, world: World) -> Writers:
    """Find out which ranks write checkpoints and read them; called by all ranks together.

    Of the ranks that use one location, the first one does. If rank 0 cannot write to its directory, nothing is known
    about the others: only rank 0 keeps trying, and the first rank of each node reads.
    """
    first = world.rank == 0
    if world.world_size == world.local_world_size:
        return Writers(first, reads=first)
    mark = (_draw() if isinstance(where, Url) else _put(where)) if first else 0
    told = torch.tensor([mark], device="cpu")
    with exchanging():
        on_host(dist.broadcast, told, src=0)
    drawn = int(told)
    if isinstance(where, Url):
        return Writers(first, drawn, reads=first)
    # The name is new, so that no cache of a network file system can know it as absent.
    own = bool(drawn) and world.first_on_node and not _path(where, drawn).exists()
    others = any(own for (own,) in numbers_of_all(world, [int(own)]))  # also waits until all ranks have looked
    if mark:
        with suppress(OSError):
            _path(where, mark).unlink()
    return Writers(first or own, 0 if others else drawn, reads=first or own or (not drawn and world.first_on_node))


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


@dataclass(frozen=True, slots=True)
class LocationRead:
    """What one rank has read in a location."""

    loaded: snapshot.LoadedCheckpoint | None = None  # the newest intact checkpoint, if any
    own: int = 0  # 2: it is of this run; 1: it is what the location's last run had, or that began with none; 0: neither
    known: int = 0  # highest round in any checkpoint's name
    taken: int = 0  # the location's last epoch
    damaged: Failure | None = None  # error of the first checkpoint that was skipped, if any


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that any rank has read, on all ranks."""

    known: int  # as in LocationRead, the highest of all
    taken: int
    damaged: Failure | None = None  # if there is no intact checkpoint
    round: int = 0
    step: int = 0
    path: str = ""
    state: dict[str, Any] | None = None  # what this rank keeps of it, by part; None if there is no checkpoint
    meta: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


def read_together(
    world: World, where: Place, read: Callable[[Taking], LocationRead], taking: Cuts, *, reads: bool
) -> Found:
    """Read a location on the ranks that are to, and return what all keep of the newest checkpoint; called by all.

    ``read`` gets what is kept of each tensor.

    Raises:
        UsageError, CheckpointError: as raised by ``read``, on all ranks; a subclass only on the rank that reads.
    """
    mine, error = LocationRead(), None
    if reads:
        cuts = taking if world.world_size == 1 else in_place(taking)
        try:
            # The ranks that wait exchange numbers meanwhile, so that a long read does not exceed their timeout.
            mine = while_advancing(where, lambda: read(cuts), lambda: numbers_of_all(world, [0]))
        except (UsageError, snapshot.CheckpointError) as failure:
            error = failure
    while not all(done for (done,) in numbers_of_all(world, [1])):
        pass
    if failed := _first_of(world, error):
        raise failed
    # On a node that has joined late, an earlier run may have left checkpoints with higher numbers.
    loaded, numbers = mine.loaded, [mine.own, 0, 0, 0, 0]
    if loaded is not None:
        info = loaded.info
        numbers = [mine.own, *order(info.meta, info.round, info.step), int(info.digest[:15], 16)]
    everywhere = numbers_of_all(world, [*numbers, mine.known, mine.taken])
    best = max(each[:5] for each in everywhere)
    known, taken = (max(each[x] for each in everywhere) for x in (5, 6))
    if not any(best[1:]):
        return Found(known, taken, _first_of(world, mine.damaged))
    holders = [rank for rank, each in enumerate(everywhere) if each[:5] == best]
    told: dict[str, Any] = {} if loaded is None else {"meta": loaded.info.meta, "path": str(loaded.info.path)}
    if loaded is not None:
        told["digest"] = loaded.info.digest
    state = None if loaded is None else loaded.state
    if world.world_size > 1:
        told = broadcast_state(told, holders[0], world.rank)
        cut = taking(told["meta"])
        if cut is not None or len(holders) < world.world_size:
            state = spread_state(state, holders, world, cut)
    return Found(known, taken, None, best[2], best[3], told["path"], state, dict(told["meta"]), told["digest"])


def _first_of(world: World, error: Failure | None) -> Failure | None:
    """Return this rank's error, or else that of the first rank that has one; called by all ranks."""
    mine: list[Any] = []
    if error is not None:
        mine = [isinstance(error, UsageError), error.message, error.hint, getattr(error, "__notes__", [])]
    for usage, message, hint, notes in filter(None, map(json.loads, bytes_of_all(world, json.dumps(mine).encode()))):
        if error is None:
            error = (UsageError if usage else snapshot.CheckpointError)(message, hint)
            error.__notes__ = notes
        return error
    return None
