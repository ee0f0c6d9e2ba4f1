"""Writes, lists and prunes checkpoints behind a URL, where nothing can be renamed or locked. Needs no torch.

The manifest commits a checkpoint: it is written last and removed first, and a directory without one is not a
checkpoint. Names are the same as in directories; because of the nonce in each, no two writers ever write to the same
object. Several nodes may write one checkpoint, see ``shares``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from elastic_launch.snapshot.errors import (
    CheckpointGoneError,
    CheckpointWriteError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    MalformedError,
    NotCommittedError,
    UnknownFormatError,
)
from elastic_launch.snapshot.format.files import FileSum
from elastic_launch.snapshot.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STATE,
    TENSORS,
    Manifest,
    assemble,
    directory_name,
    new_nonce,
    parse_name,
    share_file,
)
from elastic_launch.snapshot.location import Url
from elastic_launch.snapshot.storage.shares import MAX_SUM_BYTES, Division, OwnShare, Split, gather, pack_sum, parse_sum
from elastic_launch.snapshot.storage.url_storage import Entry, Storage, loading, saving

_SUM = ".sum"
"""Suffix to the name of a share's file: the size and checksum that its node reports."""


def candidates(url: Url) -> list[Url]:
    """Return the URLs that have a checkpoint's name and a manifest."""
    with loading(url):
        storage = Storage(url)
        return [path for path, entries in _directories(storage, url) if MANIFEST in entries]


def names(url: Url) -> list[str]:
    """Return the names of the directories behind a URL, with one request."""
    with loading(url):
        return [entry.name for entry in Storage(url).entries(url) if entry.is_directory]


def manifest_of(url: Url) -> tuple[Manifest, str]:
    """Return a checkpoint's manifest and its digest; call it within :func:`faults`."""
    return Manifest.parse(Storage(url).read(url / MANIFEST, MAX_MANIFEST_BYTES))


def sizes(url: Url) -> dict[str, int]:
    """Return the sizes in bytes of a checkpoint's files by name; call it within :func:`faults`."""
    return {entry.name: entry.bytes for entry in Storage(url).entries(url) if not entry.is_directory}


@contextmanager
def faults(url: Url) -> Iterator[None]:
    """Turn errors into errors that name the checkpoint."""
    with loading(url):
        try:
            yield
        except UnknownFormatError as error:
            raise ForeignCheckpointError(url, str(error)) from error
        except (MalformedError, FileNotFoundError) as error:
            # The manifest is removed first.
            if MANIFEST not in sizes(url):
                raise CheckpointGoneError(url) from error
            found = str(error) if isinstance(error, MalformedError) else "a file of it is missing"
            raise DamagedCheckpointError(url, found) from error


def write(
    url: Url,
    tensors: Iterable[bytes | memoryview] | Split,
    state: bytes,
    meta: Any,
    *,
    step: int,
    round: int,
    may_commit: Callable[[], bool],
) -> tuple[Url, str, int]:
    """Write a checkpoint; return its URL, its digest and its size in bytes.

    A process that dies before the end leaves a directory without a manifest, and perhaps parts of an upload.
    """
    nonce = tensors.nonce if isinstance(tensors, Split) else new_nonce()
    path = url / directory_name(step, round, nonce)
    with saving(url, "write a checkpoint in"):
        storage = Storage(url)
        try:
            if isinstance(tensors, Split):
                state_sum = storage.write(path / STATE, [state])
                tensor_sums = _write_split(storage, path, tensors.division)
            else:
                tensor_sums = {TENSORS: storage.write(path / TENSORS, tensors)}
                state_sum = storage.write(path / STATE, [state])
            data, digest = assemble(step, round, tensor_sums, state_sum, meta)
            if not may_commit():
                raise NotCommittedError(step)
            storage.put(path / MANIFEST, data)
        except BaseException:
            with suppress(CheckpointWriteError), saving(url, "tidy up in"):
                _remove(storage, path)
            raise
    return path, digest, sum(file.bytes for file in tensor_sums.values()) + state_sum.bytes


def write_share(url: Url, division: Division | OwnShare, index: int, *, step: int, round: int, nonce: str) -> None:
    """Write a share of a checkpoint that another node commits."""
    path = url / directory_name(step, round, nonce)
    name = share_file(index, len(division))
    with saving(url, "write a share of a checkpoint in"):
        storage = Storage(url)
        found = storage.write(path / name, division.parts(index))
        if MANIFEST in _names(storage, path):
            # The committer has not waited, and never looks at a share without a sum.
            storage.remove(path / name)
        else:
            storage.put(path / (name + _SUM), pack_sum(found))


def _write_split(storage: Storage, path: Url, division: Division | OwnShare) -> dict[str, FileSum]:
    count, began = len(division), time.monotonic()
    names = [share_file(index, count) for index in range(count)]
    with division.sums() as expected:
        sums = {0: storage.write(path / names[0], division.parts(0))}

        def look(indices: Collection[int]) -> dict[int, FileSum | None]:
            sizes = _names(storage, path)
            # Not every storage writes at once: an empty one is still being written.
            return {x: _said(storage, path / names[x], sizes) for x in indices if sizes.get(names[x] + _SUM)}

        def take(index: int, found: FileSum) -> bool:
            sums[index] = found
            return True

        def write(index: int) -> None:
            names[index] = share_file(index, count, again=True)
            sums[index] = storage.write(path / names[index], division.parts(index))

        gather(division, expected, look, take, write, division.patience + time.monotonic() - began)
    return {names[index]: sums[index] for index in range(count)}


def _said(storage: Storage, share: Url, sizes: dict[str, int]) -> FileSum | None:
    try:
        found = parse_sum(storage.read(Url(share + _SUM), MAX_SUM_BYTES))
    except (FileNotFoundError, MalformedError):
        return None
    return found if sizes.get(share.name) == found.bytes else None


def _names(storage: Storage, path: Url) -> dict[str, int]:
    return {entry.name: entry.bytes for entry in storage.entries(path)}


def remove(urls: Iterable[Url]) -> None:
    """Remove checkpoints, so that a half-removed one is never mistaken for a complete one."""
    for url in urls:
        with saving(url, "remove"):
            _remove(Storage(url), url)


def remove_abandoned(url: Url, newest: tuple[int, int]) -> None:
    """Remove the remains of dead writers.

    A run writes its checkpoints one by one, so a directory without a manifest that is older than a complete checkpoint
    will never get one.

    Args:
        newest: round and step of the newest complete checkpoint.
    """
    with saving(url, "remove old checkpoints in"):
        storage = Storage(url)
        for path, entries in _directories(storage, url):
            step, round = parse_name(path.name) or (0, 0)
            if MANIFEST not in entries and (round, step) < newest:
                storage.remove_all(path)


def probe(url: Url) -> None:
    """Check that the storage can be listed, written and written again.

    Raises:
        UsageError: if there is no driver for the URL.
        CheckpointReadError: if it cannot be listed.
        CheckpointWriteError: if objects cannot be written there or removed.
    """
    storage = Storage(url)
    with loading(url, "list"):
        storage.entries(url)
    with saving(url, "write to"):
        storage.probe()


@dataclass(frozen=True, slots=True)
class Tried:
    """What happened when a storage was tried."""

    checkpoints: int  # how many were listed
    wrote: float  # seconds that 1 MiB took
    read: float
    same: bool  # whether what was read is what was written
    modified: float | None  # when it was written by the storage's clock, in seconds since 1970, if that says


def try_out(url: Url) -> Tried:
    """List a storage, write 1 MiB, read it and remove it; raises the errors of :func:`probe`."""
    storage = Storage(url)
    with loading(url, "list"):
        found = sum(parse_name(entry.name) is not None for entry in storage.entries(url))
    file, data = url / f".probe-{new_nonce()}", os.urandom(1024 * 1024)
    began = time.monotonic()
    with saving(url, "write to"):
        storage.put(file, data)
    wrote = time.monotonic()
    try:
        with loading(url, "read from"):
            same = storage.read(file, len(data)) == data
            read = time.monotonic()
            modified = storage.modified(file)
    finally:
        with saving(url, "remove what was written to"):
            storage.remove(file)
    return Tried(found, wrote - began, read - wrote, same, modified)


def _directories(storage: Storage, url: Url) -> Iterator[tuple[Url, dict[str, Entry]]]:
    for found in storage.entries(url):
        if found.is_directory and parse_name(found.name) is not None:
            path = url / found.name
            yield path, {entry.name: entry for entry in storage.entries(path)}


def _remove(storage: Storage, path: Url) -> None:
    storage.remove(path / MANIFEST)
    storage.remove_all(path)
