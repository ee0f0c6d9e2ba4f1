"""Where checkpoints are: a directory, or a URL that fsspec opens."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elastic_launch.errors import UsageError

__all__ = ["Place", "Url", "place"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_PASSWORD = re.compile(r"[^/]*:[^/@]*@")


class Url(str):
    """A place in an object store, for example; has what is needed of a path, whose class would join its slashes."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        """Its last part."""
        return self.rpartition("/")[2]

    @property
    def scheme(self) -> str:
        """What comes before ``://``."""
        return self.partition("://")[0].lower()

    def absolute(self) -> Url:
        """Return itself."""
        return self


Place = Path | Url


def place(directory: str | os.PathLike[str]) -> Place:
    """Return a URL for what looks like one, else a path.

    Raises:
        UsageError: if it is a URL that would show a password, leads through a cache, or was a path in between.
    """
    if isinstance(directory, Path | Url):
        _check_path(directory)
        return directory
    text = os.fspath(directory)
    scheme = _URL.match(text)
    if scheme is None:
        return Path(text)
    if "::" in scheme[0]:
        raise UsageError(
            f"Checkpoints cannot be saved to {text!r}: it is a chain of file systems.",
            "Give the last URL alone: a cache in between would hide what others save.",
        )
    if _PASSWORD.match(text, scheme.end()):
        raise UsageError(
            f"The {scheme[0]} URL for checkpoints holds a password, which logs and process lists would show.",
            "Give it to the driver by its own variables, or those of fsspec, such as FSSPEC_FTP_PASSWORD.",
        )
    return Url(text.rstrip("/"))


def _check_path(path: Path | Url) -> None:
    if isinstance(path, Path) and _COLLAPSED.match(os.fspath(path)):
        raise UsageError(
            f"{os.fspath(path)!r} looks like a URL that lost a slash to pathlib.Path.",
            "Give URLs of checkpoints as strings.",
        )
