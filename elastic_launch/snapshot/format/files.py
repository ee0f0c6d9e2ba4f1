"""Single files of a checkpoint: written with their checksum and synced, read without trust."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.stall import advanced
from elastic_launch.system.whole_writes import write_whole

MAX_HEADER = 100_000_000
"""Maximum size in bytes of a header that safetensors reads."""

_CHUNK = 8 * 1024 * 1024
"""Bytes hashed and written at a time, so that they are still in the cache when written."""

_SYNC = 64 * 1024 * 1024
"""Bytes after which a file is synced: one sync at its end could take minutes without any progress."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and SHA-256 (64 hex digits) of a file."""

    bytes: int
    sha256: str


def create(path: Path) -> int:
    """Make a new file and return its descriptor, which the caller closes."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def write_all(descriptor: int, parts: Iterable[bytes | memoryview]) -> FileSum:
    """Write the parts in order to an empty file, sync it, and return its size and checksum."""
    digest, size, synced = hashlib.sha256(), 0, 0
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            chunk = memoryview(part)[start : start + _CHUNK]
            digest.update(chunk)
            size += len(chunk)
            write_whole(descriptor, chunk)
            if size - synced >= _SYNC:
                os.fdatasync(descriptor)
                synced = size
    os.fsync(descriptor)
    return FileSum(size, digest.hexdigest())


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a file for reading. Links could lead anywhere, and pipes would block: they are a MalformedError."""
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise MalformedError(f"{path.name} is not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MalformedError(f"{path.name} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def sum_of(parts: Iterable[bytes | memoryview]) -> FileSum:
    """Return the size and checksum of a file with this content."""
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += len(part)
    return FileSum(size, digest.hexdigest())


def check_size(name: str, size: int, expected: FileSum) -> None:
    """Refuse a file whose size differs from its manifest."""
    if size != expected.bytes:
        raise MalformedError(f"{name} has {size} bytes instead of {expected.bytes}")


def check_sum(name: str, found: FileSum, expected: FileSum) -> None:
    """Refuse a file whose size or checksum differs from its manifest."""
    check_size(name, found.bytes, expected)
    if found.sha256 != expected.sha256:
        raise MalformedError(f"{name} does not match its checksum")


def safetensors_header(entries: Mapping[str, Any]) -> bytes:
    """Return the first bytes of a safetensors file: the entries, and spaces by which the first tensor is aligned."""
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_chunks(descriptor: int) -> Iterator[memoryview]:
    """Yield a file's content, each part valid until the next one; its position is neither used nor changed."""
    buffer, offset = bytearray(min(_CHUNK, os.fstat(descriptor).st_size + 1)), 0
    while count := os.preadv(descriptor, [buffer], offset):
        advanced()
        yield memoryview(buffer)[:count]
        offset += count


def read_at(file: BinaryIO, name: str, offset: int, length: int) -> bytes:
    """Return so many bytes of an open file; a MalformedError, with the file's name, if it has not so many."""
    file.seek(offset)
    data = bytearray()
    while len(data) < length and (part := file.read(min(_CHUNK, length - len(data)))):
        data += part
        advanced()
    if len(data) < length:
        raise MalformedError(f"{name} ends before {offset + length} bytes")
    return bytes(data)


def read_in_parts(path: Path, limit: int) -> bytes:
    """Return a file's content; a MalformedError if it is larger than ``limit`` bytes, or not a regular file."""
    with open_regular(path) as descriptor:
        data = bytearray()
        while part := os.read(descriptor, min(_CHUNK, limit + 1 - len(data))):
            data += part
            advanced()
        if len(data) > limit:
            raise MalformedError(f"{path.name} exceeds {limit} bytes")
        return bytes(data)


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names in it survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it, without following links; another process may do so at the same time."""
    with suppress(FileNotFoundError):
        with os.scandir(path) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
        os.rmdir(path)
