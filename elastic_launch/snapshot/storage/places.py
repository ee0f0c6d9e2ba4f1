"""Opens the storage of a place: a directory or a URL, behind one interface."""

from __future__ import annotations

from elastic_launch.snapshot.location import Place, Url
from elastic_launch.snapshot.storage.directory import Directory
from elastic_launch.snapshot.storage.url_storage import UrlStorage


def storage_at(where: Place) -> Directory | UrlStorage:
    """Return the storage of a directory or URL of checkpoints, or of one checkpoint."""
    return UrlStorage(where) if isinstance(where, Url) else Directory(where)
