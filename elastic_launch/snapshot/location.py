"""Locations of checkpoints: a directory, or a URL that fsspec can open."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elastic_launch.errors import UsageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_PASSWORD = re.compile(r"[^/]*:[^/@]*@")


class Url(str):
    """A URL, for example in an object store, with the few methods of ``Path`` that are needed here.

    ``Path`` itself would collapse the double slash.
    """

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.rpartition("/")[2]

    @property
    def scheme(self) -> str:
        """The part before ``://``, in lower case."""
        return self.partition("://")[0].lower()

    def absolute(self) -> Url:
        return self


Place = Path | Url


def place(directory: str | os.PathLike[str]) -> Place:
    """Return a ``Url`` if the argument looks like a URL, else a ``Path``.

    Raises:
        UsageError: if it is a URL that contains a password, is a chain of file systems, or lost a slash as a ``Path``.
    """
    if isinstance(directory, Path) and _COLLAPSED.match(os.fspath(directory)):
        raise UsageError(
            f"{os.fspath(directory)!r} looks like a URL that lost a slash to pathlib.Path.",
            "Give URLs of checkpoints as strings.",
        )
    if isinstance(directory, Path | Url):
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
