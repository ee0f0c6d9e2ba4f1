"""A file that appears on this host."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from elastic_agents.notices.types import Notice, Source, Trouble
from elastic_launch.config.launch_config import LONGEST_WAIT
from elastic_launch.config.notice_sources import NoticeSource


def seconds_in(text: str) -> float | None:
    """Return the number of seconds in a file's text; None if there is none."""
    try:
        found = float(text)
    except ValueError:
        return None
    return min(found, LONGEST_WAIT) if math.isfinite(found) and found >= 0 else None


class File(Source):
    """A file whose existence makes the node leave; it may contain the seconds that are left.

    A file that exists at the start counts, too: its author could not know whether the node had started.
    """

    name = "file"
    pause = 0.5

    def __init__(self, path: str) -> None:
        self._path = path
        self._empty = False
        self.watched = path

    def poll(self) -> Sequence[Notice]:
        try:
            os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            raise Trouble(f"{self._path} cannot be checked", str(error)) from None
        text = _beginning(self._path)
        if not text and not self._empty:
            self._empty = True  # it may be about to be written
            return []
        return [Notice(self.name, "request", f"{self._path} is there", seconds_in(text))]


def _beginning(path: str) -> str:
    """Return the beginning of a file; empty if it cannot be read or is not a regular file: it exists all the same."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 64).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def source(asked: NoticeSource, environ: Mapping[str, str]) -> File:
    return File(asked.path)
