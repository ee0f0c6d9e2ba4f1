"""Finds checkpoints in a directory or behind a URL, without trusting its content. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_launch.snapshot.errors import (
    CheckpointGoneError,
    CheckpointReadError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    MalformedError,
    UnknownFormatError,
    reading,
)
from elastic_launch.snapshot.format.files import check_size
from elastic_launch.snapshot.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse_name
from elastic_launch.snapshot.location import Place, Url, place
from elastic_launch.snapshot.storage.directory import Directory
from elastic_launch.snapshot.storage.lineage import Order, order
from elastic_launch.snapshot.storage.url_storage import UrlStorage

SCANS = 10
"""Maximum number of scans. A scan is repeated only if a checkpoint was written or removed during it."""

OnDamaged = Callable[[CheckpointReadError], None]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        path: its directory or URL.
        step: optimizer steps done when the state was taken.
        round: number of the round that saved it.
        digest: 64 hex digits; equal for checkpoints with equal content (state, step, round, meta), in any location.
        bytes: size of its tensors and state.
        meta: the writer's metadata, which can be read without the state.
    """

    path: Place
    step: int
    round: int
    digest: str
    bytes: int
    meta: dict[str, Any]


def storage_at(where: Place) -> Directory | UrlStorage:
    """Return the storage of a directory or URL of checkpoints, or of one checkpoint."""
    return UrlStorage(where) if isinstance(where, Url) else Directory(where)


def order_of(info: CheckpointInfo) -> Order:
    """Return what checkpoints are compared by; the highest is the newest."""
    return order(info.meta, info.round, info.step)


def find(directory: str | os.PathLike[str], on_damaged: OnDamaged | None = None) -> list[CheckpointInfo]:
    """Return the complete checkpoints in a directory, newest first: by epoch, then round, then step, then name.

    Complete means that the manifest has the right checksum and all files have their sizes. The files' content is not
    read.

    Args:
        directory: a directory, which need not exist, or a URL.
        on_damaged: called with an error for every directory that has a checkpoint's name but is none; may raise.

    Raises:
        CheckpointReadError: if the directory cannot be listed.
        CheckpointGoneError: if other processes keep removing checkpoints.
    """
    where = place(directory)
    for _ in range(SCANS):
        listed = _candidates(where)
        found: list[CheckpointInfo] = []
        damaged: list[CheckpointReadError] = []
        gone: CheckpointGoneError | None = None
        for path in listed:
            try:
                with reading(path):
                    if isinstance(path, Path) and path.is_symlink():
                        raise DamagedCheckpointError(path, "it is a symbolic link")
                found.append(inspect(path))
            except CheckpointGoneError as error:
                gone = error
            except CheckpointReadError as error:
                damaged.append(error)
        # If a writer added one and removed another during the listing, the listing may have neither.
        if gone is None and _candidates(where) == listed:
            break
    if gone is not None and not found:
        raise gone
    if on_damaged is not None:
        for problem in damaged:
            on_damaged(problem)
    return sorted(found, key=lambda info: (order_of(info), info.path.name), reverse=True)


def positions(directory: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return (round, step) of every entry with a checkpoint's name, complete or not, with one listing."""
    where = place(directory)
    with reading(where):
        names = storage_at(where).names()
    return [(numbers[1], numbers[0]) for name in names if (numbers := parse_name(name)) is not None]


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Return the description of the checkpoint in a directory, which may have any name.

    Args:
        path: the checkpoint's own directory or URL.

    Raises:
        DamagedCheckpointError: if it is incomplete or altered.
        ForeignCheckpointError: if it has another format.
        CheckpointGoneError: if the directory does not exist.
        CheckpointReadError: if it cannot be read.
    """
    where = place(path)
    with faults(where) as storage:
        manifest, digest = manifest_of(storage)
        numbers = parse_name(where.name)
        if numbers is not None and numbers != (manifest.step, manifest.round):
            raise MalformedError(f"its manifest is of step {manifest.step}, round {manifest.round}")
        sizes = storage.sizes(manifest.files)
        for name, expected in manifest.files.items():
            check_size(name, sizes.get(name, 0), expected)
    return CheckpointInfo(where, manifest.step, manifest.round, digest, manifest.size, manifest.meta)


def _candidates(where: Place) -> Sequence[Place]:
    with reading(where):
        return [where / name for name in sorted(storage_at(where).candidates())]


@contextmanager
def faults(where: Place) -> Iterator[Directory | UrlStorage]:
    """Yield the storage of a checkpoint, and turn errors into errors that name the checkpoint."""
    with reading(where):
        storage = storage_at(where)
        try:
            yield storage
        except UnknownFormatError as error:
            raise ForeignCheckpointError(where, str(error)) from error
        except (MalformedError, FileNotFoundError, NotADirectoryError) as error:
            if storage.is_gone():
                raise CheckpointGoneError(where) from error
            found = str(error)
            if isinstance(error, OSError):
                missing = os.path.basename(error.filename or "")
                found = f"there is no {missing} in it" if missing else "a file of it is missing"
            raise DamagedCheckpointError(where, found) from error


def manifest_of(storage: Directory | UrlStorage) -> tuple[Manifest, str]:
    """Return a checkpoint's manifest and its digest."""
    return Manifest.parse(storage.read(MANIFEST, MAX_MANIFEST_BYTES))
