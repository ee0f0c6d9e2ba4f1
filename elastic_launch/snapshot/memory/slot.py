"""A slot: memory that holds one snapshot and outlives the process that wrote it. Needs no torch.

The agent makes a slot as two unnamed files (memfd) and passes their descriptors to its workers: ``tensors`` has the
content of a checkpoint's tensor file; ``head`` has a header, the rest of the state, and the manifest's meta. They use
no space in /dev/shm, and are freed when the last process that has them is gone. The header's sequence number commits
the snapshot: it is 0 while the slot is written and is set last, so a writer that is killed leaves no snapshot rather
than a torn one.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from elastic_launch.snapshot.room import lacking
from elastic_launch.system.whole_writes import write_whole

_MAGIC = b"elsnap02"

_FIELDS = struct.Struct("<8sQQQQQQQ")
"""Magic, round, step, phase, training, bytes of tensors, of state, of meta."""

_HEADER = struct.Struct(f"<Q{_FIELDS.size}sI")
"""Sequence, fields, their CRC-32."""

_STATE_AT = 4096
_CHUNK = 8 * 1024 * 1024
_PIECE = 64 * 1024 * 1024

PART = "split"
"""Key in the meta of a slot with only a part of a snapshot: the ranks whose shards it has, and the number of all."""

_MOST = 2**53
"""Larger numbers cannot be a worker's counts."""


STEPPED, EVALUATED = 0, 1
"""Phases between two steps: the evaluation that follows the step is still to come, or there is none to come."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a slot."""

    sequence: int  # 1 or more, rising with every snapshot on its node
    round: int  # the round that took it; higher than the rounds of all states that it was resumed from
    step: int  # optimizer steps done
    phase: int  # STEPPED or EVALUATED
    training: int  # number of the training within its script, from 0
    tensors: int = 0  # this and the next two: sizes in bytes
    state: int = 0
    meta: int = 0

    @property
    def position(self) -> tuple[int, int, int]:
        """Round, step and phase: of two states of one training, the one with the higher position is newer."""
        return self.round, self.step, self.phase


class Slot:
    """One slot, with its two descriptors, which :meth:`close` closes."""

    def __init__(self, tensors: int, head: int) -> None:
        self.tensors = tensors
        self.head = head

    @staticmethod
    def make(name: str) -> Slot:
        """Make an empty slot; the name is shown in lists of the process' descriptors."""
        tensors = os.memfd_create(f"{name}-tensors", os.MFD_CLOEXEC)
        try:
            return Slot(tensors, os.memfd_create(f"{name}-head", os.MFD_CLOEXEC))
        except OSError:
            os.close(tensors)
            raise

    def close(self) -> None:
        os.close(self.tensors)
        os.close(self.head)

    def free(self) -> None:
        """Drop the content, and free its memory; a process that still uses it in a mapping gets SIGBUS."""
        os.ftruncate(self.head, 0)
        os.ftruncate(self.tensors, 0)

    @property
    def allocated(self) -> int:
        """Bytes of memory that the slot uses."""
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in (self.tensors, self.head))

    def allocate(self, size: int) -> None:
        """Give the tensors' file a size, and have memory for all of it, so that no later write can lack any.

        A control group answers an allocation beyond its limit with a kill, not with an error. Before each piece, what
        is still needed is therefore compared with what is free at that time, which other processes use, too.

        Raises:
            OSError: if memory is too short; the slot is then empty.
        """
        os.ftruncate(self.tensors, size)
        try:
            for begin in range(os.fstat(self.tensors).st_blocks * 512, size, _PIECE):
                if lack := lacking(size - begin, "one of them needs"):
                    raise OSError(errno.ENOMEM, lack)
                os.posix_fallocate(self.tensors, begin, min(_PIECE, size - begin))
            if size:
                os.posix_fallocate(self.tensors, 0, size)  # holes, if what was allocated before was not its beginning
        except OSError:
            os.ftruncate(self.tensors, 0)
            raise

    def header(self) -> Header | None:
        """Return the slot's header; None if the slot is empty or being written."""
        data = os.pread(self.head, _HEADER.size, 0)
        if len(data) < _HEADER.size:
            return None
        sequence, fields, check = _HEADER.unpack(data)
        magic, *numbers = _FIELDS.unpack(fields)
        if not sequence or magic != _MAGIC or zlib.crc32(fields) != check:
            return None
        header = Header(sequence, *numbers)
        # Any process with the descriptors may write anything, so check that the sizes in the header exist.
        sizes = [os.fstat(descriptor).st_size for descriptor in (self.tensors, self.head)]
        whole = header.tensors <= sizes[0] and _STATE_AT + header.state + header.meta <= sizes[1]
        return header if whole and max(sequence, *numbers) < _MOST else None

    def begin(self) -> None:
        """Mark the slot as being written, or its content as not to be used."""
        os.pwrite(self.head, bytes(8), 0)

    def commit(self, header: Header, state: bytes, meta: bytes) -> None:
        """Complete a snapshot whose tensors are written."""
        os.ftruncate(self.head, _STATE_AT + header.state + header.meta)
        write_whole(self.head, state, _STATE_AT)
        write_whole(self.head, meta, _STATE_AT + header.state)
        sequence, *numbers = astuple(header)
        fields = _FIELDS.pack(_MAGIC, *numbers)
        whole = _HEADER.pack(sequence, fields, zlib.crc32(fields))
        os.pwrite(self.head, whole[8:], 8)
        os.pwrite(self.head, whole[:8], 0)

    def state(self, header: Header) -> bytes:
        """Return the rest of the state, as JSON."""
        return os.pread(self.head, header.state, _STATE_AT)

    def meta(self, header: Header) -> bytes:
        """Return the manifest's meta, as JSON."""
        return os.pread(self.head, header.meta, _STATE_AT + header.state)

    def tensor_parts(self, header: Header) -> Iterator[bytes]:
        """Yield the content of the tensor file."""
        return self.tensor_bytes(0, header.tensors)

    def tensor_bytes(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of the tensor file from ``begin`` to before ``end``, a few MiB at a time."""
        for offset in range(begin, end, _CHUNK):
            yield os.pread(self.tensors, min(_CHUNK, end - offset), offset)
