"""Shares a checkpoint that one process has read with the other processes of its host: its verified files in memory.

The files are unnamed (memfd): they use no space in /dev/shm, other processes open them through the reader's descriptors
in /proc, and they are freed when the last process that has them is gone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.files import FileSum, read_chunks, write_all
from elastic_launch.snapshot.format.manifest import encode_meta, parse_json
from elastic_launch.snapshot.format.plain import Decoder
from elastic_launch.snapshot.room import free_memory
from elastic_launch.snapshot.storage.listing import CheckpointInfo

Taking = Callable[[Mapping[str, Any]], tree.Take | None]
"""Returns, for a checkpoint's meta, what is kept of each tensor, which is in mapped memory; None: all of each."""

MOST = 0.5
"""Fraction of the free memory that copies may use."""


class Copies:
    """Files of one checkpoint in this process' memory, read only once."""

    def __init__(self) -> None:
        self.info: CheckpointInfo | None = None  # None: there is no checkpoint, or no room for its files
        self._state = -1
        self._tensors: list[int] = []

    def begin(self, info: CheckpointInfo) -> None:
        """Start with a checkpoint, if there is room for it, and drop the previous one."""
        self.close()
        if info.bytes <= MOST * free_memory():
            self.info = info

    def keep_state(self, data: bytes) -> None:
        """Keep the content of the state's file."""
        if self.info is None:
            return
        self._state = os.memfd_create("elastic-launch-state", os.MFD_CLOEXEC)
        try:
            with open(self._state, "wb", closefd=False) as file:
                file.write(data)
        except OSError:
            self.close()

    def take(self, source: int) -> tuple[int, FileSum] | None:
        """Read a tensor file into memory, from its descriptor, and keep it.

        Returns:
            A descriptor of the copy, with its size and checksum; None if there is no room. Then nothing is kept, and
            the file must be read in another way.
        """
        if self.info is None:
            return None
        copy = os.memfd_create("elastic-launch-tensors", os.MFD_CLOEXEC)
        self._tensors.append(copy)
        try:
            return copy, write_all(copy, read_chunks(source))
        except OSError:
            self.close()
            return None

    def told(self) -> dict[str, Any]:
        """Return, as a JSON value, what another process of this host needs to open the copies."""
        assert self.info is not None
        info = self.info
        return {
            "pid": os.getpid(),
            "state": self._state,
            "tensors": self._tensors,
            "info": [str(info.path), info.step, info.round, info.digest, info.bytes],
            "meta": json.dumps(encode_meta(info.meta), allow_nan=False),
        }

    def close(self) -> None:
        """Free the memory unless another process has it open."""
        for descriptor in [self._state, *self._tensors]:
            if descriptor >= 0:
                os.close(descriptor)
        self.info, self._state, self._tensors = None, -1, []


class CopiedFiles:
    """The files that another process of this host keeps in :class:`Copies`.

    Args:
        told: the result of that process' :meth:`Copies.told`.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told

    def load(self, taking: Taking | None = None) -> tuple[CheckpointInfo, Any]:
        """Return the checkpoint and its state, each tensor in its own memory.

        Raises:
            OSError: if the files cannot be opened: the process is gone, or belongs to another user.
            MalformedError: if the files have changed.
        """
        path, step, round, digest, size = self._told["info"]
        meta = dict(Decoder().decode(parse_json(self._told["meta"].encode())))
        take = taking(meta) if taking is not None else None
        read = tensorfile.read if take is None else tensorfile.mapped
        tensors: dict[str, torch.Tensor] = {}
        for number in self._told["tensors"]:
            descriptor = self._open(number)
            try:
                tensors.update(read(descriptor))
            finally:
                os.close(descriptor)
        descriptor = self._open(self._told["state"])
        with open(descriptor, "rb") as file:
            state = tree.decode(parse_json(file.read()), tensors, take)
        return CheckpointInfo(Path(path), step, round, digest, size, meta), state

    def _open(self, number: int) -> int:
        return os.open(f"/proc/{int(self._told['pid'])}/fd/{int(number)}", os.O_RDONLY | os.O_CLOEXEC)
