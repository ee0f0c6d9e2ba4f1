"""Checkpoints of replicated state: one format, no pickle, no training code.

``write``, ``find``, ``inspect``, ``load``, ``newest``, ``prune`` and ``withdraw`` work on checkpoints in a directory or
behind a URL. ``BackgroundWriter`` writes them in a thread. ``state_sha256`` compares tensors to the bit.

A checkpoint exists once its directory is renamed to its final name; by then its files are on the disk, the manifest
last. A checkpoint that other tools copy file by file exists once its manifest is present with a correct checksum and
all files have their sizes. Behind a URL nothing can be renamed, so this rule applies there always. Several processes on
several hosts may write, read and prune in one directory at the same time.

``format/``   the contents of a checkpoint
``storage/``  directories and URLs: write, find, read, prune
``memory/``   snapshots in shared memory
``location``  a directory or a URL
``errors``    exceptions
``room``      how much memory snapshots may use
``stall``     reads that end when storage stops responding
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_launch.snapshot.errors import CheckpointError as CheckpointError
    from elastic_launch.snapshot.errors import CheckpointGoneError as CheckpointGoneError
    from elastic_launch.snapshot.errors import CheckpointReadError as CheckpointReadError
    from elastic_launch.snapshot.errors import CheckpointWriteError as CheckpointWriteError
    from elastic_launch.snapshot.errors import DamagedCheckpointError as DamagedCheckpointError
    from elastic_launch.snapshot.errors import ForeignCheckpointError as ForeignCheckpointError
    from elastic_launch.snapshot.errors import TornSnapshotError as TornSnapshotError
    from elastic_launch.snapshot.errors import UnsupportedStateError as UnsupportedStateError
    from elastic_launch.snapshot.format.dtypes import state_sha256 as state_sha256
    from elastic_launch.snapshot.storage.background import BackgroundWriter as BackgroundWriter
    from elastic_launch.snapshot.storage.background import WriteOutcome as WriteOutcome
    from elastic_launch.snapshot.storage.listing import CheckpointInfo as CheckpointInfo
    from elastic_launch.snapshot.storage.listing import find as find
    from elastic_launch.snapshot.storage.listing import inspect as inspect
    from elastic_launch.snapshot.storage.reading import LoadedCheckpoint as LoadedCheckpoint
    from elastic_launch.snapshot.storage.reading import load as load
    from elastic_launch.snapshot.storage.reading import newest as newest
    from elastic_launch.snapshot.storage.saving import prune as prune
    from elastic_launch.snapshot.storage.saving import withdraw as withdraw
    from elastic_launch.snapshot.storage.saving import write as write

# Loaded on first use: processes that copy checkpoints as files do not need torch, which takes seconds to import.
_HOMES = {
    name: module
    for module, names in {
        "errors": (
            "CheckpointError CheckpointGoneError CheckpointReadError CheckpointWriteError DamagedCheckpointError "
            "ForeignCheckpointError TornSnapshotError UnsupportedStateError"
        ),
        "format.dtypes": "state_sha256",
        "storage.background": "BackgroundWriter WriteOutcome",
        "storage.listing": "CheckpointInfo find inspect",
        "storage.reading": "LoadedCheckpoint load newest",
        "storage.saving": "prune withdraw write",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
