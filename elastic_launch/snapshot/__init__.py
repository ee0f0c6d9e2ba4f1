"""Checkpoints of replicated state: one format, no pickle, no training code.

``write``, ``find``, ``inspect``, ``load``, ``newest``, ``prune``   checkpoints in a directory
``BackgroundWriter``    writes them in a thread
``state_sha256``        compares tensors to the bit

A checkpoint exists from the moment at which its directory is renamed to its final name; by then its files, the manifest
last, are on the disk. Where one is copied file by file instead, by other tools, it exists from the moment at which its
manifest is there with its checksum and both files have their sizes. Several processes, on several hosts, may write,
read and prune in one directory at once.

``saving``      writes and prunes, by way of a ``draft``: a directory that becomes a checkpoint
``reading``     finds and loads
``background``  writes in a thread
``manifest``    what must be in a checkpoint, and the names in a directory
``tree``        nested state as named tensors and JSON; ``dtypes`` knows the bytes of tensors
``tensorfile``  tensors as safetensors; ``files`` are written with checksums, synced, and read without trust
"""

from elastic_launch.snapshot.background import BackgroundWriter, Outcome
from elastic_launch.snapshot.dtypes import state_sha256
from elastic_launch.snapshot.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointReadError,
    CheckpointWriteError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    UnsupportedStateError,
)
from elastic_launch.snapshot.reading import CheckpointInfo, LoadedCheckpoint, find, inspect, load, newest
from elastic_launch.snapshot.saving import prune, write

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
    "UnsupportedStateError",
    "find",
    "inspect",
    "load",
    "newest",
    "prune",
    "state_sha256",
    "write",
]
