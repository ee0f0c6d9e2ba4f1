"""A slot: memory that holds one snapshot and outlives the process that wrote it. Needs no torch.

The agent makes it, as two files without names (memfd), and hands their descriptors to its workers: ``tensors`` is what
a checkpoint's tensor file would be, ``head`` a header, the rest of the state, and the manifest's meta. They use no
room of /dev/shm, and are gone when the last process that has them is. The header's sequence number commits: it is 0
while the slot is written and goes in last, so a writer that is killed leaves no snapshot rather than a torn one.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Header", "Slot"]

_MAGIC = b"elsnap01"
_FIELDS = struct.Struct("<8sQQQQQQ")  # magic, round, step, training, bytes of tensors, of state, of meta
_HEADER = struct.Struct(f"<Q{_FIELDS.size}sI")  # sequence, fields, their CRC-32
_STATE_AT = 4096
_CHUNK = 8 * 1024 * 1024
_MOST = 2**53  # Numbers beyond are none that a worker has counted.


@dataclass(frozen=True, slots=True)
class Header:
    """What a slot holds.

    Attributes:
        sequence: 1 or more, rising with every snapshot on its node.
        round: that took it, higher than those of all that was resumed from.
        step: optimizer steps done.
        training: which of a script's trainings it is of, from 0.
        tensors, state, meta: sizes in bytes.
    """

    sequence: int
    round: int
    step: int
    training: int
    tensors: int
    state: int
    meta: int


class Slot:
    """One slot.

    Args:
        tensors, head: descriptors; closed by :meth:`close`.
    """

    def __init__(self, tensors: int, head: int) -> None:
        self.tensors = tensors
        self.head = head

    @staticmethod
    def make(name: str) -> Slot:
        """Make an empty slot.

        Args:
            name: for people who look at the process' descriptors.

        Raises:
            OSError: if there are no descriptors left.
        """
        tensors = os.memfd_create(f"{name}-tensors", os.MFD_CLOEXEC)
        try:
            return Slot(tensors, os.memfd_create(f"{name}-head", os.MFD_CLOEXEC))
        except OSError:
            os.close(tensors)
            raise

    def close(self) -> None:
        os.close(self.tensors)
        os.close(self.head)

    @property
    def allocated(self) -> int:
        """Bytes of memory that it takes."""
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in (self.tensors, self.head))

    def header(self) -> Header | None:
        """Return what is in the slot; None if nothing is, or it is being written."""
        data = os.pread(self.head, _HEADER.size, 0)
        if len(data) < _HEADER.size:
            return None
        sequence, fields, check = _HEADER.unpack(data)
        magic, *numbers = _FIELDS.unpack(fields)
        if not sequence or magic != _MAGIC or zlib.crc32(fields) != check:
            return None
        header = Header(sequence, *numbers)
        # Whoever has the descriptors may write what it likes: what is not there could not be read.
        sizes = [os.fstat(descriptor).st_size for descriptor in (self.tensors, self.head)]
        whole = header.tensors <= sizes[0] and _STATE_AT + header.state + header.meta <= sizes[1]
        return header if whole and max(sequence, *numbers) < _MOST else None

    def begin(self) -> None:
        """Say that the slot is being written, or that what it holds is not to be used."""
        os.pwrite(self.head, bytes(8), 0)

    def commit(self, header: Header, state: bytes, meta: bytes) -> None:
        """Complete a snapshot whose tensors are written."""
        os.ftruncate(self.head, _STATE_AT + header.state + header.meta)
        _write(self.head, state, _STATE_AT)
        _write(self.head, meta, _STATE_AT + header.state)
        numbers = (header.round, header.step, header.training, header.tensors, header.state, header.meta)
        fields = _FIELDS.pack(_MAGIC, *numbers)
        whole = _HEADER.pack(header.sequence, fields, zlib.crc32(fields))
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
        """Yield the bytes of the tensor file from one offset to another, a few MiB at a time."""
        for offset in range(begin, end, _CHUNK):
            yield os.pread(self.tensors, min(_CHUNK, end - offset), offset)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
