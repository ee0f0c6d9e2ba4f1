"""Checkpoints of replicated state: one format, no pickle, no training code.

``write``, ``find``, ``inspect``, ``load``, ``newest``, ``prune``   checkpoints in a directory
``BackgroundWriter``    writes them in a thread
``state_sha256``        compares tensors to the bit

``manifest``    the commit marker, and the names in a directory
``tree``        nested state as named tensors and JSON; ``dtypes`` knows the bytes of tensors
``tensorfile``  tensors as safetensors; ``files`` are written with checksums, synced, and read without trust
``draft``       directories that become checkpoints, and what dead writers leave
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
