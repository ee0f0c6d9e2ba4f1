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
from elastic_launch.snapshot.format.files import FileSum, open_regular, read_small
from elastic_launch.snapshot.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse_name
from elastic_launch.snapshot.location import Place, Url, place
from elastic_launch.snapshot.storage import urls as remote
from elastic_launch.snapshot.storage.lineage import Order, order

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
        found, damaged, gone = _inspect_all(listed)
        # If a writer added one and removed another during the listing, the listing may have neither.
        if gone is None and _candidates(where) == listed:
            break
    if gone is not None and not found:
        raise gone
    if on_damaged is not None:
        for error in damaged:
            on_damaged(error)
    return sorted(found, key=lambda info: (order_of(info), info.path.name), reverse=True)


def positions(directory: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return (round, step) of every entry with a checkpoint's name, complete or not, with one listing."""
    where = place(directory)
    names = remote.names(where) if isinstance(where, Url) else _names(where)
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
    if isinstance(where, Url):
        with remote.faults(where):
            manifest, digest = _named(where, *remote.manifest_of(where))
            sizes = remote.sizes(where)
            for name, expected in manifest.files.items():
                check_size(name, sizes.get(name, 0), expected)
    else:
        with faults(where):
            manifest, digest = _named(where, *manifest_of(where))
            for name, expected in manifest.files.items():
                with open_regular(where / name) as descriptor:
                    check_size(name, os.fstat(descriptor).st_size, expected)
    return CheckpointInfo(where, manifest.step, manifest.round, digest, manifest.size, manifest.meta)


def _named(path: Place, manifest: Manifest, digest: str) -> tuple[Manifest, str]:
    numbers = parse_name(path.name)
    if numbers is not None and numbers != (manifest.step, manifest.round):
        raise MalformedError(f"its manifest is of step {manifest.step}, round {manifest.round}")
    return manifest, digest


def _inspect_all(
    paths: Sequence[Place],
) -> tuple[list[CheckpointInfo], list[CheckpointReadError], CheckpointGoneError | None]:
    found: list[CheckpointInfo] = []
    damaged: list[CheckpointReadError] = []
    gone: CheckpointGoneError | None = None
    for path in paths:
        try:
            if _is_link(path):
                raise DamagedCheckpointError(path, "it is a symbolic link")
            found.append(inspect(path))
        except CheckpointGoneError as error:
            gone = error
        except CheckpointReadError as error:
            damaged.append(error)
    return found, damaged, gone


def _is_link(path: Place) -> bool:
    if isinstance(path, Url):
        return False
    with reading(path):
        return path.is_symlink()


def _candidates(directory: Place) -> Sequence[Place]:
    if isinstance(directory, Url):
        return sorted(remote.candidates(directory))
    return [directory / name for name in sorted(_names(directory)) if parse_name(name) is not None]


def _names(directory: Path) -> list[str]:
    with reading(directory):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Turn errors into errors that name the checkpoint."""
    try:
        with reading(path):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError) as error:
                if not os.path.lexists(path):
                    raise CheckpointGoneError(path) from error
                name = os.path.basename(error.filename or "")
                raise MalformedError(f"there is no {name} in it") from error
    except UnknownFormatError as error:
        raise ForeignCheckpointError(path, str(error)) from error
    except MalformedError as error:
        raise DamagedCheckpointError(path, str(error)) from error


def manifest_of(path: Path) -> tuple[Manifest, str]:
    """Return a checkpoint's manifest and its digest."""
    return Manifest.parse(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))


def check_size(name: str, size: int, expected: FileSum) -> None:
    """Refuse a file whose size differs from its manifest."""
    if size != expected.bytes:
        raise MalformedError(f"{name} has {size} bytes instead of {expected.bytes}")
