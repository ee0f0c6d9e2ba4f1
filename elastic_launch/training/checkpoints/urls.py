"""Opens checkpoints behind a URL: rank 0 accesses the storage, and all ranks receive the result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elastic_launch import snapshot
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.location import Url
from elastic_launch.snapshot.stall import while_advancing
from elastic_launch.snapshot.storage import owner
from elastic_launch.snapshot.storage import urls as remote
from elastic_launch.snapshot.storage.lineage import epoch_of
from elastic_launch.snapshot.storage.listing import positions
from elastic_launch.snapshot.storage.shared_copies import Taking
from elastic_launch.training.checkpoints.branches import epoch_after
from elastic_launch.training.ranks.spreading import Cuts, state_from_first
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

Check = Callable[[dict[str, Any], int], None]


@dataclass(frozen=True)
class Found:
    """The checkpoints found behind a URL."""

    step: int  # of the newest checkpoint; 0 if there is none
    state: dict[str, Any] | None  # that checkpoint's state by part; None if there is none
    meta: dict[str, Any]  # that checkpoint's meta
    owner: str  # mark of this run, by which copies are checked; on rank 0
    highest: int  # highest round in any checkpoint's name
    taken: int = 0  # the URL's last epoch
    round: int = 0  # of the newest checkpoint
    path: str = ""  # its URL


def open_url(
    url: Url, world: World, run: str, check: Check, taking: Cuts, above: tuple[int, int] | None = None
) -> Found:
    """Check that a URL works, read its newest checkpoint, and take the URL for this run; called by all ranks.

    Args:
        check: called with the meta and step of a checkpoint; raises if it belongs to another training.
        above: round and step of a state in memory: only newer checkpoints, made by this run, are considered. The URL
            is then not taken, and failures are not errors.

    Raises:
        UsageError: as raised by ``check``, or if there is no driver; on all ranks.
        CheckpointError: if the storage cannot be listed, read or written, or does not respond; on all ranks.
    """
    if url.scheme == "memory" and world.round:
        raise UsageError(
            f"Checkpoints cannot be saved to {url} under elastic-launch: that is the memory of one process.",
            "Leave the checkpoint out: snapshots in the node's memory are taken anyway. Or give a directory.",
        )
    if above is None:
        look = partial(_open, url, run, check, world.round)
    else:
        look = partial(_open_newer, url, run, check, above)
    found = Found(**state_from_first(world, lambda taking: vars(while_advancing(url, partial(look, taking))), taking))
    if world.rank == 0:
        return found
    if found.state is not None:
        check(found.meta, found.step)
    return replace(found, owner="")


def _open(url: Url, run: str, check: Check, world_round: int, taking: Taking) -> Found:
    remote.probe(url)
    damaged: list[snapshot.CheckpointReadError] = []
    loaded = snapshot.newest(url, damaged.append, taking=taking)
    if loaded is None and damaged:
        # Starting from scratch would eventually overwrite checkpoints that may be repairable.
        raise damaged[0]
    if loaded is not None:
        check(loaded.meta, loaded.step)
    meta = {} if loaded is None else loaded.meta
    taken = max(owner.epoch_in(url), epoch_of(meta) or 0)
    # Last: a training that does not belong here must not take the URL from one that does.
    mine = owner.claim(url, run, again=world_round > 1, epoch=epoch_after(world_round, run, meta, taken))
    return _found(url, loaded, mine, taken)


def _open_newer(url: Url, run: str, check: Check, above: tuple[int, int], taking: Taking) -> Found:
    mine = owner.owned_by(run)
    try:
        if other := owner.other_owner(url, run):
            raise snapshot.CheckpointError(f"{url} was taken by run {other}.")
        taken = owner.epoch_in(url)
        loaded = snapshot.newest(url, above=above, epoch=taken, taking=taking)
        if loaded is not None:
            check(loaded.meta, loaded.step)
            mine = owner.claim(url, run, again=True, epoch=taken)
        return _found(url, loaded, mine, taken)
    except snapshot.CheckpointError as error:
        _log.warning("a checkpoint is skipped: %s", error)
        return Found(0, None, {}, mine, 0)


def _found(url: Url, loaded: snapshot.LoadedCheckpoint | None, mine: str, taken: int) -> Found:
    highest = max((number for number, _ in positions(url)), default=0)
    if loaded is None:
        return Found(0, None, {}, mine, highest, taken)
    info = loaded.info
    return Found(loaded.step, loaded.state, loaded.meta, mine, highest, taken, info.round, str(info.path))
