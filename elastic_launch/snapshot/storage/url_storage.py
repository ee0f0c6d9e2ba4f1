"""Storage behind a URL, accessed through fsspec (https://filesystem-spec.readthedocs.io).

Object stores have no renaming, directories or locks, so nothing here relies on them. Needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.snapshot.errors import CheckpointReadError, CheckpointWriteError, MalformedError
from elastic_launch.snapshot.format.files import FileSum
from elastic_launch.snapshot.location import Url
from elastic_launch.snapshot.stall import advanced

_CHUNK = 8 * 1024 * 1024
"""Bytes hashed and sent at a time; the driver gathers them into its own parts."""

_DRIVERS = threading.Lock()  # fsspec's table of instances is not thread-safe


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a directory; ``bytes`` is the size of a file."""

    name: str
    bytes: int
    is_directory: bool


class Storage:
    """The file system of a URL. Methods raise the driver's errors: use it within :func:`loading` or :func:`saving`."""

    def __init__(self, url: Url) -> None:
        check_driver(url)
        from fsspec.core import url_to_fs

        with _DRIVERS:
            self._fs, self._root = url_to_fs(str(url))
        self._url = url

    def entries(self, url: Url) -> list[Entry]:
        """Return the entries of a directory; empty if it does not exist."""
        self._fs.invalidate_cache()
        path = self._path(url)
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            found = []
        advanced()
        # A store may list the directory itself, as an empty object.
        return [_entry(info) for info in found if info["name"].strip("/") != path.strip("/")]

    def read(self, url: Url, limit: int) -> bytes:
        """Return a file's content.

        Raises:
            MalformedError: if it is larger than ``limit`` bytes.
            FileNotFoundError: if it does not exist.
        """
        with self._fs.open(self._path(url), "rb") as file:
            data = bytes(file.read(limit + 1))
        advanced()
        if len(data) > limit:
            raise MalformedError(f"{url.name} exceeds {limit} bytes")
        return data

    def chunks(self, url: Url) -> Iterator[bytes]:
        """Yield a file's content, a few MiB at a time."""
        with self._fs.open(self._path(url), "rb", block_size=_CHUNK) as file:
            while part := file.read(_CHUNK):
                advanced()
                yield part

    def write(self, url: Url, parts: Iterable[bytes | memoryview]) -> FileSum:
        """Write a file of any size, and return its size and checksum.

        If this fails, part of the file may exist: its completeness must be recorded elsewhere.
        """
        digest, size = sha256(), 0
        with self._create(url) as file:
            for part in parts:
                for start in range(0, len(part), _CHUNK):
                    chunk = memoryview(part)[start : start + _CHUNK]
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
        return FileSum(size, digest.hexdigest())

    def put(self, url: Url, data: bytes) -> None:
        """Write a small file, in one request if the storage supports it."""
        try:
            self._fs.pipe_file(self._path(url), data)
        except FileNotFoundError:
            self._make(self._fs._parent(self._path(url)))
            self._fs.pipe_file(self._path(url), data)

    def remove(self, url: Url) -> None:
        """Remove a file, which need not exist."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(url))

    def remove_all(self, url: Url) -> None:
        """Remove a directory, which need not exist, and everything in it."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(url), recursive=True)

    def modified(self, url: Url) -> float | None:
        """Return when a file was written, in seconds since 1970; None if the driver does not say."""
        try:
            found = self._fs.modified(self._path(url))
        except NotImplementedError:
            return None
        return float(found.timestamp()) if getattr(found, "tzinfo", None) is not None else None

    def probe(self) -> None:
        """Write a tiny file, and remove it."""
        url = self._url / f".probe-{secrets.token_hex(8)}"
        self.put(url, b"elastic-launch\n")
        self.remove(url)

    def _path(self, url: Url) -> str:
        return str(self._root) + url[len(self._url) :]

    @contextmanager
    def _create(self, url: Url) -> Iterator[Any]:
        path = self._path(url)
        try:
            file = self._fs.open(path, "wb")
        except FileNotFoundError:
            self._make(self._fs._parent(path))
            file = self._fs.open(path, "wb")
        try:
            yield file
        finally:
            file.close()

    def _make(self, path: str) -> None:
        """Make a directory and its parents, but never the first part of a path, which may be a bucket."""
        if "/" not in path.strip("/") or self._fs.exists(path):
            return
        self._make(self._fs._parent(path))
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(path, create_parents=False)


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


@contextmanager
def loading(url: Url, what: str = "read") -> Iterator[None]:
    """Turn a driver's errors into a CheckpointReadError that says what could not be done, where and why."""
    try:
        yield
    except (ElasticLaunchError, MalformedError):
        raise
    except Exception as error:  # each driver behind fsspec has its own
        raise CheckpointReadError(url, f"Could not {what} {url}: {_cause(error)}.", _hint(error)) from error


@contextmanager
def saving(url: Url, what: str) -> Iterator[None]:
    """Turn a driver's errors into a CheckpointWriteError, like :func:`loading`."""
    try:
        yield
    except (ElasticLaunchError, MalformedError):
        raise
    except Exception as error:  # each driver behind fsspec has its own
        raise CheckpointWriteError(f"Could not {what} {url}: {_cause(error)}.", _hint(error)) from error


def _entry(info: dict[str, Any]) -> Entry:
    return Entry(
        name=info["name"].rstrip("/").rpartition("/")[2],
        bytes=int(info.get("size") or 0),
        is_directory=info["type"] == "directory",
    )


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or "no further word"
    return f"{type(error).__name__}: {text}"


def _hint(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "Free space there, or where temporary files are: TMPDIR names another place for these."
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return "Check the credentials, and what they allow: to list, read, write and delete."
    if isinstance(error, FileNotFoundError):
        return "Check the URL: the bucket must exist, since none is ever created."
    return "Check that this host reaches the storage."
