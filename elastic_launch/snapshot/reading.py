"""Checkpoints in a directory: found and loaded, without trust in what is there."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_launch.snapshot import tensorfile, tree
from elastic_launch.snapshot.errors import (
    CheckpointGoneError,
    CheckpointReadError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    MalformedError,
    UnknownFormatError,
    reading,
)
from elastic_launch.snapshot.files import FileSum, open_regular, read_small, sum_of
from elastic_launch.snapshot.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    STATE,
    TENSORS,
    Manifest,
    parse_json,
    parse_name,
)

__all__ = ["CheckpointInfo", "LoadedCheckpoint", "find", "inspect", "load", "newest"]

_log = logging.getLogger(__name__)

_SCANS = 10  # Somebody has to write or remove a checkpoint during each.

OnDamaged = Callable[[CheckpointReadError], None]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        path: its directory.
        step: optimizer steps that the state has behind it.
        round: number of the round that saved it.
        digest: 64 hex digits, equal for checkpoints of equal content (state, step, round, meta), wherever they are.
        bytes: size of its tensors and state.
        meta: what the writer wanted known before the state is read.
    """

    path: Path
    step: int
    round: int
    digest: str
    bytes: int
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose checksums were right.

    Attributes:
        state: as it was written; tensors are in host memory, each in memory of its own.
    """

    info: CheckpointInfo
    state: Any

    @property
    def step(self) -> int:
        """Optimizer steps that the state has behind it."""
        return self.info.step

    @property
    def round(self) -> int:
        """Number of the round that saved it."""
        return self.info.round

    @property
    def meta(self) -> dict[str, Any]:
        """What the writer wanted known before the state is read."""
        return self.info.meta


def find(directory: str | os.PathLike[str], on_damaged: OnDamaged | None = None) -> list[CheckpointInfo]:
    """Return the complete checkpoints in a directory, newest first: by round, then step, then name.

    Complete means: the manifest has its checksum, and both files have their sizes. Their content is not read.

    Args:
        directory: need not be there.
        on_damaged: is told of every directory that has a checkpoint's name and is none; may raise.

    Raises:
        CheckpointReadError: if the directory cannot be listed.
        CheckpointGoneError: if other processes keep removing what is there.
    """
    directory = Path(directory)
    for _ in range(_SCANS):
        listed = _candidates(directory)
        found, damaged, gone = _inspect_all(listed)
        # Somebody may have written one and removed another meanwhile, of which the listing then has neither.
        if gone is None and _candidates(directory) == listed:
            break
    if gone is not None and not found:
        raise gone
    if on_damaged is not None:
        for error in damaged:
            on_damaged(error)
    return sorted(found, key=lambda info: (info.round, info.step, info.path.name), reverse=True)


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Return what the checkpoint in this directory is, whatever the directory's name.

    Raises:
        DamagedCheckpointError: if it is incomplete or altered.
        ForeignCheckpointError: if it has another format.
        CheckpointGoneError: if there is no such directory.
        CheckpointReadError: if it cannot be read.
    """
    path = Path(path)
    with _faults(path):
        manifest, digest = _manifest(path)
        numbers = parse_name(path.name)
        if numbers is not None and numbers != (manifest.step, manifest.round):
            raise MalformedError(f"its manifest is of step {manifest.step}, round {manifest.round}")
        for name, expected in ((TENSORS, manifest.tensors), (STATE, manifest.state)):
            with open_regular(path / name) as descriptor:
                _check_size(name, os.fstat(descriptor).st_size, expected)
    size = manifest.tensors.bytes + manifest.state.bytes
    return CheckpointInfo(path, manifest.step, manifest.round, digest, size, manifest.meta)


def load(info: CheckpointInfo) -> LoadedCheckpoint:
    """Read a checkpoint and verify sizes and checksums before anything is made of its content.

    Raises:
        DamagedCheckpointError: if it is not what its writer wrote, or not what ``info`` describes.
        ForeignCheckpointError: if it has another format.
        CheckpointGoneError: if it was removed meanwhile.
        CheckpointReadError: if it cannot be read.
    """
    with _faults(info.path):
        manifest, digest = _manifest(info.path)
        if digest != info.digest:
            raise MalformedError("it is not the one that was found before")
        state = _load_state(info.path / STATE, manifest.state)
        tensors = _load_tensors(info.path / TENSORS, manifest.tensors)
        return LoadedCheckpoint(info, tree.decode(state, tensors))


def newest(directory: str | os.PathLike[str], on_damaged: OnDamaged | None = None) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that is sound; None if there is none.

    Args:
        directory: need not be there.
        on_damaged: is told once of each checkpoint that is skipped, or raises to refuse that; without it a warning is
            logged.

    Raises:
        CheckpointReadError: if the directory cannot be listed.
        CheckpointGoneError: if other processes keep removing what is there.
    """
    told: set[Path] = set()

    def skip(error: CheckpointReadError) -> None:
        if error.path not in told:
            told.add(error.path)
            (on_damaged or _warn)(error)

    gone: CheckpointGoneError | None = None
    for _ in range(_SCANS):
        try:
            return _first_sound(find(directory, skip), skip)
        except CheckpointGoneError as error:
            # Whoever removed it has a newer one.
            gone = error
    assert gone is not None
    raise gone


def _first_sound(infos: list[CheckpointInfo], skip: OnDamaged) -> LoadedCheckpoint | None:
    for info in infos:
        try:
            return load(info)
        except CheckpointGoneError:
            raise
        except CheckpointReadError as error:
            skip(error)
    return None


def _warn(error: CheckpointReadError) -> None:
    _log.warning("skipped a checkpoint. %s", error)


def _inspect_all(
    paths: list[Path],
) -> tuple[list[CheckpointInfo], list[CheckpointReadError], CheckpointGoneError | None]:
    found: list[CheckpointInfo] = []
    damaged: list[CheckpointReadError] = []
    gone: CheckpointGoneError | None = None
    for path in paths:
        try:
            if path.is_symlink():
                raise DamagedCheckpointError(path, "it is a symbolic link")
            found.append(inspect(path))
        except CheckpointGoneError as error:
            gone = error
        except CheckpointReadError as error:
            damaged.append(error)
    return found, damaged, gone


def _candidates(directory: Path) -> list[Path]:
    with reading(directory):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
    return [directory / name for name in sorted(names) if parse_name(name) is not None]


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Say of which checkpoint it is that something was wrong."""
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


def _manifest(path: Path) -> tuple[Manifest, str]:
    return Manifest.parse(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))


def _load_state(path: Path, expected: FileSum) -> Any:
    data = read_small(path, MAX_STATE_BYTES)
    _check_size(STATE, len(data), expected)
    _check_hash(STATE, hashlib.sha256(data).hexdigest(), expected)
    return parse_json(data)


def _load_tensors(path: Path, expected: FileSum) -> dict[str, torch.Tensor]:
    with open_regular(path) as descriptor:
        _check_size(TENSORS, os.fstat(descriptor).st_size, expected)
        _check_hash(TENSORS, sum_of(descriptor).sha256, expected)
        return tensorfile.read(descriptor)


def _check_size(name: str, size: int, expected: FileSum) -> None:
    if size != expected.bytes:
        raise MalformedError(f"{name} has {size} bytes instead of {expected.bytes}")


def _check_hash(name: str, sha256: str, expected: FileSum) -> None:
    if sha256 != expected.sha256:
        raise MalformedError(f"{name} does not have its checksum")
