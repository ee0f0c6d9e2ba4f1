"""``elasticctl doctor``: where logs and checkpoints go: can it be listed, written and read, is there space."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elastic_launch.errors import ElasticLaunchError
from elastic_launch.events.types import counted
from elastic_launch.snapshot.format.manifest import parse_name
from elastic_launch.snapshot.location import Url, place
from elastic_launch.snapshot.storage.url_storage import try_out
from elastic_launch.system.findings import (
    PATIENCE,
    SLOW,
    Finding,
    Findings,
    clock,
    error,
    good,
    timed,
    warning,
)

LITTLE_DISK = 1024 * 1024 * 1024

URL_PATIENCE = 30.0
"""Seconds that a store behind a URL has for all that is tried: drivers repeat what fails, and load slowly."""

REFUSED = 900.0
"""Seconds by which a clock may differ from that of S3 before it refuses all requests."""


def logs(directory: Path) -> Findings:
    """Examine the directory of the logs, which is made when it is needed."""
    yield from _directory(directory, "logs", "Give a directory{} with --log-dir.")


def checkpoints(given: str) -> Findings:
    """Examine a directory or a URL of checkpoints."""
    try:
        location = place(given)
    except ElasticLaunchError as problem:
        yield error(problem.message, problem.hint)
        return
    if isinstance(location, Url):
        yield from _url(location)
        return
    yield from _directory(location, "checkpoints", "Give the training a directory{} that all nodes see.")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            names, _ = timed(lambda: os.listdir(location), PATIENCE)
        except TimeoutError:
            yield error(f"{location} is not listed within {PATIENCE:g} s.", "Look at its file system's server.")
        except PermissionError as problem:
            yield error(f"{location} cannot be listed: {problem.strerror}.", "Let this user read it.")
        else:
            yield _seen(location, sum(parse_name(name) is not None for name in names))


def _seen(location: Path | Url, count: int) -> Finding:
    return good(f"{counted(count, 'checkpoint')} can be seen in {location}")


def _directory(directory: Path, what: str, remedy: str) -> Findings:
    """Examine a directory that is made when it is needed.

    Args:
        what: is written there.
        remedy: with a place for the words that say where another one is.
    """
    try:
        (where, free), took = timed(lambda: _written(directory), PATIENCE)
    except TimeoutError:
        yield error(f"{directory} does not take a file within {PATIENCE:g} s.", "Look at its file system's server.")
        return
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Free space there (df), or raise the quota." if full else remedy.format("")
        yield error(f"{what} cannot be written to {directory}: {problem.strerror}.", hint)
        return
    if took > SLOW:
        yield warning(f"writing 4 KiB to {where} takes {took:.1f} s.", remedy.format(" on a faster disk"))
    if free < LITTLE_DISK:
        yield warning(f"{where} has {free >> 20} MiB free.", remedy.format(" on another disk"))
        return
    made = "" if where == directory else ", which will be made"
    yield good(f"{what} can be written to {directory}{made}, with {free >> 30} GiB free")


def _written(directory: Path) -> tuple[Path, int]:
    """Write a file to a directory, or to that in which it would be made, and remove it; return where, and the room.

    Raises:
        OSError: if that fails, or if something else is read.
    """
    where = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    data = os.urandom(4096)
    with tempfile.NamedTemporaryFile(dir=where, buffering=0) as file:  # a buffer would be written again at its end
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())
        with open(file.name, "rb") as again:
            if again.read() != data:
                raise OSError(errno.EIO, "what was read is not what was written")
    return where, shutil.disk_usage(where).free


def _url(url: Url) -> Iterator[Finding]:
    if url.scheme == "memory":
        yield error(f"{url} is the memory of one process.", "Give a directory, or a URL of a store.")
        return
    began = time.time()
    try:
        tried, took = timed(lambda: try_out(url), URL_PATIENCE)
    except TimeoutError:
        remedy = "Check the network, proxies and the store's address on this host, such as AWS_ENDPOINT_URL."
        yield error(f"{url} does not answer within {URL_PATIENCE:g} s.", remedy)
        return
    except ElasticLaunchError as problem:
        yield error(problem.message, problem.hint)
        return
    if not tried.same:
        remedy = "Look for a cache or a proxy between this host and the store."
        yield error(f"what was read from {url} is not what was written.", remedy)
        return
    yield good(
        f"{url} can be listed, written, read and cleared: 1 MiB was written in {tried.wrote:.2f} s and read in "
        f"{tried.read:.2f} s; free space behind a URL is not known"
    )
    if tried.wrote > SLOW:
        yield warning(f"writing 1 MiB to {url} takes {tried.wrote:.1f} s.", "Use a store that is nearer to the nodes.")
    yield _seen(url, tried.checkpoints)
    if tried.modified is not None:  # when what was just written was, by the store's clock
        ahead, unsure = began + took / 2 - tried.modified, took / 2 + 1.0  # many stores note whole seconds
        remedy = f"Run an NTP client on this host: S3 refuses requests if clocks differ by {REFUSED:.0f} s or more."
        yield clock(ahead, unsure, f"that of {url.scheme}", ".", remedy)
