"""Checkpoints behind a URL, through fsspec (https://filesystem-spec.readthedocs.io). Needs no torch.

Object stores have no renaming, directories or locks. The manifest therefore commits a checkpoint: it is written last
and removed first, and a directory without one is not a checkpoint. Names are the same as in directories; because of the
nonce in each, no two writers ever write to the same object.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import BinaryIO

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import CheckpointWriteError, MalformedError, reading, writing
from elastic_launch.snapshot.format.files import FileSum, check_sum
from elastic_launch.snapshot.format.manifest import MANIFEST, directory_name, new_nonce, parse_name, share_file
from elastic_launch.snapshot.location import Url
from elastic_launch.snapshot.stall import advanced
from elastic_launch.snapshot.storage.shares import MAX_SUM_BYTES, pack_sum, parse_sum

_CHUNK = 8 * 1024 * 1024
"""Bytes hashed and sent at a time; the driver gathers them into its own parts."""

_DRIVERS = threading.Lock()  # fsspec's table of instances is not thread-safe

_SUM = ".sum"
"""Suffix to the name of a share's file: the size and checksum that its node reports."""


class UrlStorage:
    """Checkpoints behind a URL, or one of them; names are relative to it. Methods raise the driver's errors.

    Raises:
        UsageError: if no installed driver opens the URL.
    """

    def __init__(self, url: Url) -> None:
        check_driver(url)
        from fsspec.core import url_to_fs

        with _DRIVERS:
            self._fs, self._root = url_to_fs(str(url))
        self.url = url

    def names(self) -> list[str]:
        """Return the names of the directories in it, with one request."""
        return [name for name, size in self._listed().items() if size is None]

    def candidates(self) -> list[str]:
        """Return the names that are those of checkpoints, and have a manifest."""
        return [name for name, is_complete in self._directories() if is_complete]

    def is_gone(self) -> bool:
        """Whether this checkpoint was removed: its manifest is removed first."""
        return MANIFEST not in self.sizes()

    def _listed(self, name: str = "") -> dict[str, int | None]:
        """Return the size of each file in a directory, and None for directories; empty if it does not exist."""
        self._fs.invalidate_cache()
        path = self._path(name)
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            found = []
        advanced()
        listed: dict[str, int | None] = {}
        for info in found:
            where = info["name"].strip("/")
            if where != path.strip("/"):  # a store may list the directory itself, as an empty object
                size = None if info["type"] == "directory" else int(info.get("size") or 0)
                listed.setdefault(where.rpartition("/")[2], size)
        return listed

    def sizes(self, names: Iterable[str] = (), *, directory: str = "") -> dict[str, int]:
        """Return the sizes of the files in it, whatever their names, or of those in a directory there."""
        return {name: size for name, size in self._listed(directory).items() if size is not None}

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a small file; raise a MalformedError if it is larger than ``limit``."""
        with self._fs.open(self._path(name), "rb") as file:
            data = bytes(file.read(limit + 1))
        advanced()
        if len(data) > limit:
            raise MalformedError(f"{name} exceeds {limit} bytes")
        return data

    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for reading, which need not be written by this package."""
        file: AbstractContextManager[BinaryIO] = self._fs.open(self._path(name), "rb", block_size=_CHUNK)
        return file

    @contextmanager
    def verified(self, name: str, expected: FileSum) -> Iterator[int]:
        """Copy a file to an unnamed one, and verify its size and checksum: what is parsed must be what was verified."""
        digest, size = sha256(), 0
        with tempfile.TemporaryFile() as copy, self._fs.open(self._path(name), "rb", block_size=_CHUNK) as file:
            while size <= expected.bytes and (chunk := file.read(_CHUNK)):
                advanced()
                digest.update(chunk)
                size += len(chunk)
                copy.write(chunk)
            copy.flush()
            check_sum(name, FileSum(size, digest.hexdigest()), expected)
            yield copy.fileno()

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileSum:
        """Write a file of any size, and return its size and checksum.

        If this fails, part of the file may exist: its completeness must be recorded elsewhere.
        """
        digest, size, path = sha256(), 0, self._path(name)
        try:
            file = self._fs.open(path, "wb")
        except FileNotFoundError:
            self._make(path.rpartition("/")[0])
            file = self._fs.open(path, "wb")
        with file:
            for part in parts:
                for start in range(0, len(part), _CHUNK):
                    chunk = memoryview(part)[start : start + _CHUNK]
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
        return FileSum(size, digest.hexdigest())

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it, in one request if the storage supports it."""
        path = self._path(name)
        try:
            self._fs.pipe_file(path, data)
        except FileNotFoundError:
            self._make(path.rpartition("/")[0])
            self._fs.pipe_file(path, data)

    @contextmanager
    def draft(self, step: int, round: int, nonce: str = "") -> Iterator[UrlDraft]:
        """Begin a checkpoint, with a random nonce unless one is given; it is removed if an exception is raised.

        A process that dies before the end leaves a directory without a manifest, and perhaps parts of an upload.
        """
        name = directory_name(step, round, nonce or new_nonce())
        try:
            yield UrlDraft(self, name)
        except BaseException:
            with suppress(CheckpointWriteError), writing(self.url, "tidy up in"):
                self.remove(name)
            raise

    def write_share(
        self, step: int, round: int, nonce: str, share: tuple[int, int], parts: Iterable[bytes | memoryview]
    ) -> None:
        """Write a share of a checkpoint that another node commits; ``share`` is its index, and their number."""
        name = directory_name(step, round, nonce)
        file = f"{name}/{share_file(*share)}"
        found = self.write(file, parts)
        if MANIFEST in self.sizes(directory=name):
            # The committer has not waited, and never looks at a share without a sum.
            self.remove_file(file)
        else:
            self.put(file + _SUM, pack_sum(found))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, so that a half-removed one is never mistaken for a complete one."""
        self.remove_file(f"{name}/{MANIFEST}")
        self._remove_all(name)

    def remove_remains(self, newest: tuple[int, int]) -> None:
        """Remove the remains of dead writers.

        A run writes its checkpoints one by one, so a directory without a manifest that is older than ``newest``, the
        round and step of a complete checkpoint, will never get one.
        """
        for name, is_complete in self._directories():
            step, round = parse_name(name) or (0, 0)
            if not is_complete and (round, step) < newest:
                self._remove_all(name)

    def modified(self, name: str) -> float | None:
        """Return when a file was written, in seconds since 1970; None if the driver does not say."""
        try:
            found = self._fs.modified(self._path(name))
        except NotImplementedError:
            return None
        return float(found.timestamp()) if getattr(found, "tzinfo", None) is not None else None

    def _directories(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of checkpoints, and whether they have a manifest."""
        for name in self.names():
            if parse_name(name) is not None:
                yield name, MANIFEST in self.sizes(directory=name)

    def remove_file(self, name: str) -> None:
        """Remove a file, which need not exist."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _remove_all(self, name: str) -> None:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def _make(self, path: str) -> None:
        """Make a directory and its parents, but never the first part of a path, which may be a bucket."""
        if "/" not in path.strip("/") or self._fs.exists(path):
            return
        self._make(path.rpartition("/")[0])
        with suppress(FileExistsError):
            self._fs.mkdir(path, create_parents=False)


class UrlDraft:
    """A checkpoint that is being written, under its final name."""

    def __init__(self, storage: UrlStorage, name: str) -> None:
        self.name = name
        self._storage = storage
        self._manifest = b""

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileSum:
        """Write a file."""
        return self._storage.write(f"{self.name}/{name}", parts)

    def look(self, indices: Collection[int], count: int) -> dict[int, FileSum | None]:
        """Return, of these shares, those that exist, with what their nodes report; None if a report is invalid."""
        sizes = self._storage.sizes(directory=self.name)
        names = {index: share_file(index, count) for index in indices}
        # Not every storage writes at once: an empty one is still being written.
        return {index: self._reported(name, sizes) for index, name in names.items() if sizes.get(name + _SUM)}

    def take(self, index: int, count: int, size: int) -> bool:
        """Do nothing: a share is in its place."""
        return True

    def replacement(self, index: int, count: int) -> str:
        """Return the name of the file that is written in place of a share, whose node may still be writing."""
        return share_file(index, count, again=True)

    def finish(self, manifest: bytes) -> None:
        """Note the manifest; writing it would make the checkpoint appear."""
        self._manifest = manifest

    def publish(self) -> Url:
        """Make the checkpoint appear, and return its URL."""
        self._storage.put(f"{self.name}/{MANIFEST}", self._manifest)
        return self._storage.url / self.name

    def _reported(self, name: str, sizes: dict[str, int]) -> FileSum | None:
        try:
            found = parse_sum(self._storage.read(f"{self.name}/{name}{_SUM}", MAX_SUM_BYTES))
        except (FileNotFoundError, MalformedError):
            return None
        return found if sizes.get(name) == found.bytes else None


def check_driver(url: Url) -> None:
    """Check that an installed driver can open a URL; the UsageError names the package to install."""
    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError as error:
        raise UsageError(
            f"Checkpoints at {url} need fsspec, which is not installed.", "pip install 'elastic-launch[storage]'"
        ) from error
    try:
        fsspec.get_filesystem_class(url.scheme)
    except ImportError as error:
        known = known_implementations.get(url.scheme, {})
        package = known.get("class", "").split(".")[0]
        hint = f"pip install {package}" if package not in ("", "fsspec") else known.get("err", str(error))
        raise UsageError(f"Checkpoints at {url} need a driver that is not installed: {error}.", hint) from error
    except ValueError as error:
        raise UsageError(
            f"Checkpoints cannot be saved to {url}: fsspec knows no {url.scheme}://.",
            "Install the package that does, or choose another URL or a directory.",
        ) from error


@dataclass(frozen=True, slots=True)
class Tried:
    """What happened when a storage was tried."""

    checkpoints: int  # how many were listed
    wrote: float  # seconds that the file took
    read: float
    same: bool  # whether what was read is what was written
    modified: float | None  # when it was written by the storage's clock, in seconds since 1970, if that says


def try_out(url: Url, size: int = 1024 * 1024) -> Tried:
    """List a storage, write a file of some bytes, read it and remove it.

    Raises:
        UsageError: if there is no driver for the URL.
        CheckpointReadError: if it cannot be listed or read.
        CheckpointWriteError: if objects cannot be written there or removed.
    """
    storage = UrlStorage(url)
    with reading(url, "list"):
        found = sum(parse_name(name) is not None for name in storage.names())
    file, data = f".probe-{new_nonce()}", os.urandom(size)
    began = time.monotonic()
    with writing(url, "write to"):
        storage.put(file, data)
    wrote = time.monotonic()
    try:
        with reading(url, "read from"):
            same = storage.read(file, len(data)) == data
            read = time.monotonic()
            modified = storage.modified(file)
    finally:
        with writing(url, "remove what was written to"):
            storage.remove_file(file)
    return Tried(found, wrote - began, read - wrote, same, modified)
