"""Loads checkpoints from a directory or a URL, without trusting their content."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elastic_launch.snapshot.errors import (
    CheckpointGoneError,
    CheckpointReadError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    MalformedError,
)
from elastic_launch.snapshot.format import distributed, tree
from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format.files import check_sum, read_at, sum_of
from elastic_launch.snapshot.format.manifest import DATA, MAX_STATE_BYTES, METADATA, STATE, parse_json, parse_name
from elastic_launch.snapshot.location import Place
from elastic_launch.snapshot.storage.lineage import is_of_run
from elastic_launch.snapshot.storage.listing import (
    SCANS,
    CheckpointInfo,
    OnDamaged,
    faults,
    find,
    manifest_of,
)

_log = logging.getLogger(__name__)

Parts = Callable[[CheckpointInfo], Collection[str]]
"""Returns the keys of a checkpoint's state that are wanted; the tensors of others take no memory."""

Taking = Callable[[Mapping[str, Any]], tree.Take | None]
"""Returns, for a checkpoint's meta, what is kept of each tensor, which is in mapped memory; None: all of each."""

_LASTING = DamagedCheckpointError, ForeignCheckpointError
"""Errors of a checkpoint that another attempt would meet, too."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose checksums were verified, and its state, each tensor in its own host memory."""

    info: CheckpointInfo
    state: Any


def load(info: CheckpointInfo, parts: Parts | None = None, taking: Taking | None = None) -> LoadedCheckpoint:
    """Read a checkpoint; sizes and checksums are verified before its content is parsed.

    Args:
        info: the checkpoint, from :func:`find` or :func:`inspect`.
        parts: selects what to return of the state; None: all of it.
        taking: returns what is kept of each tensor.

    Raises:
        DamagedCheckpointError: if it differs from what its writer wrote, or from what ``info`` describes.
        ForeignCheckpointError: if it has another format.
        CheckpointGoneError: if it was removed in the meantime.
        CheckpointReadError: if it cannot be read.
    """
    take = taking(info.meta) if taking is not None else None
    read = tensorfile.read if take is None else tensorfile.mapped
    with faults(info.path) as storage:
        manifest, digest = manifest_of(storage)
        if digest != info.digest:
            raise MalformedError("it is not the one that was found before")
        data = storage.read(STATE, MAX_STATE_BYTES)
        check_sum(STATE, sum_of([data]), manifest.state)
        rest = parse_json(data)
        state, only = _selected(rest, info, parts)
        if DATA in manifest.tensors:
            about = storage.read(METADATA, distributed.MAX_METADATA_BYTES)
            check_sum(METADATA, sum_of([about]), manifest.tensors[METADATA])
            verified = storage.verified(DATA, manifest.tensors[DATA])
            with verified as descriptor, open(descriptor, "rb", buffering=0, closefd=False) as file:
                own = distributed.OwnTensors(rest, about, partial(read_at, file))
                return LoadedCheckpoint(info, tree.decode(state, own.only(only), take))
        tensors: dict[str, torch.Tensor] = {}
        for name, expected in manifest.tensors.items():
            with storage.verified(name, expected) as descriptor:
                more = read(descriptor, only)
            if both := tensors.keys() & more.keys():
                raise MalformedError(f"two files have a tensor {min(both)!r}")
            tensors.update(more)
        return LoadedCheckpoint(info, tree.decode(state, tensors, take))


def newest(
    directory: str | os.PathLike[str],
    on_damaged: OnDamaged | None = None,
    *,
    above: tuple[int, int] | None = None,
    run: str = "",
    step: int | None = None,
    parts: Parts | None = None,
    taking: Taking | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest intact checkpoint; return None if there is none. A warning names each that is skipped.

    Args:
        directory: a directory, which need not exist, or a URL.
        on_damaged: called once with the error of each checkpoint that is skipped, since it is damaged or foreign, or
            cannot be read and seems to be older than the one that is returned; it may raise to refuse that.
        above: consider only the run's own checkpoints, if they are newer than this (round, step).
        run: number of a run, whose own checkpoints come first; see ``lineage``.
        step: consider only checkpoints of this step.
        parts, taking: as for :func:`load`.

    Raises:
        CheckpointReadError: if the location, or what may be the newest checkpoint, cannot be read: that may pass, and
            an older state must not take its place.
    """
    told: set[Place] = set()
    unread: list[CheckpointReadError] = []

    def look(error: CheckpointReadError) -> None:
        if isinstance(error, _LASTING):
            skip(error)
        else:
            unread.append(error)

    def skip(error: CheckpointReadError) -> None:
        if error.path not in told and (step is None or step == (parse_name(error.path.name) or [step])[0]):
            told.add(error.path)
            _log.warning("a checkpoint is skipped: %s", error)
            if on_damaged is not None:
                on_damaged(error)

    gone: CheckpointGoneError | None = None
    for _ in range(SCANS):
        unread.clear()
        try:
            found = find(directory, look)
            if above is not None:
                found = [x for x in found if is_of_run(x.meta, run) and (x.round, x.step) > above]
            found.sort(key=lambda x: not is_of_run(x.meta, run))
            wanted = [x for x in found if step in (None, x.step)]
            least = max([above or (-1, -1), *((x.round, x.step) for x in wanted[:1])])
            for error in unread:
                numbers = parse_name(error.path.name)
                if numbers is not None and numbers[::-1] > least and step in (None, numbers[0]):
                    raise error
                skip(error)
            for info in wanted:
                try:
                    return load(info, parts, taking)
                except _LASTING as error:
                    skip(error)
            return None
        except CheckpointGoneError as error:
            # The process that removed it has a newer one.
            gone = error
    assert gone is not None
    raise gone


def _selected(state: Any, info: CheckpointInfo, parts: Parts | None) -> tuple[Any, dict[str, None] | None]:
    """Return the wanted parts of a state's JSON, and the names of their tensors; None: all tensors."""
    if parts is None or not isinstance(state, dict) or any(key.startswith("$") for key in state):
        return state, None
    wanted = parts(info)
    state = {name: part for name, part in state.items() if name in wanted}
    return state, tree.tensor_names(state)
