"""Lets one worker of each node read a checkpoint from its directory; the others copy it from that worker's memory.

Storage is thus read once per node and not once per worker. The reader sends a message every few seconds. The others
wait for that message, so the reader's death ends their wait at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_launch import snapshot
from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.stall import STALL, while_advancing
from elastic_launch.snapshot.storage.shared_copies import CopiedFiles, Copies, Taking
from elastic_launch.training.ranks.exchange import numbers_of_all, receive_bytes, send_bytes
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

PATIENCE = STALL + 30.0
"""Seconds without a message from the reader after which a waiting worker fails."""


@dataclass(frozen=True, slots=True)
class DirectoryRead:
    """The result of reading a directory."""

    loaded: snapshot.LoadedCheckpoint | None  # the newest intact checkpoint, if any
    known: int  # highest round in any checkpoint's name
    damaged: snapshot.CheckpointReadError | None  # error of the first checkpoint that was skipped, if any
    taken: int = 0  # the directory's last epoch


def read_on_node(
    world: World, directory: Path, read: Callable[[Copies | None], DirectoryRead], taking: Taking
) -> DirectoryRead:
    """Read a directory, or get the result from another worker of this node that reads it; called by all ranks.

    Args:
        read: reads the directory, and keeps the files read in the ``Copies`` if there are any.

    Raises:
        CheckpointError: as raised by ``read``, on all workers of a node; or if the reader does not respond.
    """
    first, *others = _on_node(world)
    if not others:
        return while_advancing(directory, lambda: read(None))
    if world.rank == first:
        return _read_for(others, directory, read)
    return _have_read(first, world.rank, directory, read, taking)


def _on_node(world: World) -> list[int]:
    """Return the ranks of this node's workers, in order; only this one's unless all nodes' ranks are consecutive.

    Launchers number them so. A node may take part with some of its local ranks only.
    """
    found = numbers_of_all(world, [world.first_on_node, world.local_rank, world.local_world_size])
    begins = [rank for rank, (first, _, _) in enumerate(found) if first or not rank]
    nodes = [[*range(*ends)] for ends in pairwise([*begins, world.world_size])]
    consecutive = all(
        all(found[rank][2] == len(ranks) for rank in ranks)
        and all(found[rank][1] < found[after][1] for rank, after in pairwise(ranks))
        for ranks in nodes
    )
    return next(ranks for ranks in nodes if world.rank in ranks) if consecutive else [world.rank]


def _read_for(others: list[int], directory: Path, read: Callable[[Copies | None], DirectoryRead]) -> DirectoryRead:
    copies = Copies()
    try:
        try:
            found = while_advancing(directory, lambda: read(copies), lambda: _say(others, b""))
        except snapshot.CheckpointError as error:
            _say(others, json.dumps({"error": [error.message, error.hint]}).encode())
            raise
        told: dict[str, Any] = {
            "known": found.known,
            "taken": found.taken,
            "damaged": None,
            "copies": None,
            "alone": False,
        }
        if found.damaged is not None:
            told["damaged"] = [str(found.damaged.path), found.damaged.message, found.damaged.hint]
        if found.loaded is not None:
            told["alone"] = copies.info is None
            told["copies"] = copies.told() if copies.info is not None else None
        _say(others, json.dumps(told).encode())
        for other in others:
            receive_bytes(other)  # it has the files
        return found
    finally:
        copies.close()


def _have_read(
    reader: int, rank: int, directory: Path, read: Callable[[Copies | None], DirectoryRead], taking: Taking
) -> DirectoryRead:
    try:
        while not (said := receive_bytes(reader, PATIENCE)):  # it is still reading
            pass
    except RuntimeError as error:
        if "Timed out" not in str(error):
            raise  # the reader's end is the cause
        raise snapshot.CheckpointReadError(
            directory,
            f"Rank {reader}, which reads {directory} for rank {rank} too, has not responded for {PATIENCE:g} s.",
            "Check that process, and the file system that it reads.",
        ) from error
    told: dict[str, Any] = json.loads(said)
    if "error" in told:
        raise snapshot.CheckpointError(*told["error"])
    damaged = None
    if told["damaged"] is not None:
        path, message, hint = told["damaged"]
        damaged = snapshot.CheckpointReadError(Path(path), message, hint)
    loaded = None
    try:
        if told["copies"] is not None:
            loaded = snapshot.LoadedCheckpoint(*CopiedFiles(told["copies"]).load(taking))
    except (OSError, MalformedError) as error:
        _log.warning("rank %d reads the checkpoint by itself: what rank %d has read: %s", rank, reader, error)
        told["alone"] = True
    send_bytes(b"", reader)
    if told["alone"]:
        return while_advancing(directory, lambda: read(None))
    return DirectoryRead(loaded, told["known"], damaged, told["taken"])


def _say(others: list[int], data: bytes) -> None:
    """Send a message; an empty one means that another will follow."""
    for other in others:
        send_bytes(data, other)
