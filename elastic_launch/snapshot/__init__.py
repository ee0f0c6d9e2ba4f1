"""Checkpoints of replicated state: one format, no pickle, no training code.

``write``, ``find``, ``inspect``, ``load``, ``newest``, ``prune``   checkpoints in a directory, or behind a URL
``BackgroundWriter``    writes them in a thread
``state_sha256``        compares tensors to the bit

A checkpoint exists from the moment at which its directory is renamed to its final name; by then its files, the manifest
last, are on the disk. Where one is copied file by file instead, by other tools, it exists from the moment at which its
manifest is there with its checksum and all files have their sizes. Several processes, on several hosts, may write,
read and prune in one directory at once. Behind a URL nothing can be renamed: there it is always the manifest.

``saving``      writes and prunes, by way of a ``draft``: a directory that becomes a checkpoint
``listing``     finds; ``reading`` loads
``shares``      are what several nodes write of one checkpoint
``remote``      does for URLs what differs; ``storage`` is what it needs of fsspec, ``place`` tells URLs from paths
``owner``       which run a URL belongs to
``slot``        memory that holds one snapshot and outlives the process that wrote it
``background``  writes in a thread
``manifest``    what must be in a checkpoint, and the names in a directory
``plain``       nested plain values as JSON
``tree``        nested state as named tensors and JSON; ``dtypes`` knows the bytes of tensors
``tensorfile``  tensors as safetensors; ``files`` are written with checksums, synced, and read without trust
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_launch.snapshot.background import BackgroundWriter as BackgroundWriter
    from elastic_launch.snapshot.background import Outcome as Outcome
    from elastic_launch.snapshot.dtypes import state_sha256 as state_sha256
    from elastic_launch.snapshot.errors import CheckpointError as CheckpointError
    from elastic_launch.snapshot.errors import CheckpointGoneError as CheckpointGoneError
    from elastic_launch.snapshot.errors import CheckpointReadError as CheckpointReadError
    from elastic_launch.snapshot.errors import CheckpointWriteError as CheckpointWriteError
    from elastic_launch.snapshot.errors import DamagedCheckpointError as DamagedCheckpointError
    from elastic_launch.snapshot.errors import ForeignCheckpointError as ForeignCheckpointError
    from elastic_launch.snapshot.errors import TornSnapshotError as TornSnapshotError
    from elastic_launch.snapshot.errors import UnsupportedStateError as UnsupportedStateError
    from elastic_launch.snapshot.listing import CheckpointInfo as CheckpointInfo
    from elastic_launch.snapshot.listing import find as find
    from elastic_launch.snapshot.listing import inspect as inspect
    from elastic_launch.snapshot.reading import LoadedCheckpoint as LoadedCheckpoint
    from elastic_launch.snapshot.reading import load as load
    from elastic_launch.snapshot.reading import newest as newest
    from elastic_launch.snapshot.saving import prune as prune
    from elastic_launch.snapshot.saving import write as write

# Loaded on first use: whoever copies checkpoints as files needs no torch, which takes seconds to import.
_HOMES = {
    "BackgroundWriter": "background",
    "CheckpointError": "errors",
    "CheckpointGoneError": "errors",
    "CheckpointInfo": "listing",
    "CheckpointReadError": "errors",
    "CheckpointWriteError": "errors",
    "DamagedCheckpointError": "errors",
    "ForeignCheckpointError": "errors",
    "LoadedCheckpoint": "reading",
    "Outcome": "background",
    "TornSnapshotError": "errors",
    "UnsupportedStateError": "errors",
    "find": "listing",
    "inspect": "listing",
    "load": "reading",
    "newest": "reading",
    "prune": "saving",
    "state_sha256": "dtypes",
    "write": "saving",
}

__all__ = [
    "BackgroundWriter",
    "CheckpointError",
    "CheckpointGoneError",
    "CheckpointInfo",
    "CheckpointReadError",
    "CheckpointWriteError",
    "DamagedCheckpointError",
    "ForeignCheckpointError",
    "LoadedCheckpoint",
    "Outcome",
    "TornSnapshotError",
    "UnsupportedStateError",
    "find",
    "inspect",
    "load",
    "newest",
    "prune",
    "state_sha256",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
