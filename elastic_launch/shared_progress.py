"""How far workers are, in memory that their agent looks into when it wants to know: each word of theirs would wake it.

The agent makes it, as a file without a name (memfd), and hands its descriptor to its workers, one of which writes.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import zlib
from typing import NamedTuple

from elastic_launch.clock import MonotonicClock

__all__ = ["SharedProgress", "WorkerProgress"]

_FIELDS = struct.Struct("<QQd")
_MOST = 2**53
_RECORD = struct.Struct(f"<{_FIELDS.size}sI")  # fields, their CRC-32

TRIES = 3
"""Reads that may meet the writer in the middle of its few bytes."""


class WorkerProgress(NamedTuple):
    """How far a round's workers are.

    Attributes:
        step: optimizer steps done.
        at: when the last of them was, by the host's monotonic clock (:class:`elastic_launch.clock.MonotonicClock`).
    """

    round: int
    step: int
    at: float

    @property
    def possible(self) -> bool:
        """Whether a worker can have come so far: the memory is open to its script, which may write anything."""
        return max(self.round, self.step) < _MOST and 0 <= self.at <= MonotonicClock().now()


class SharedProgress:
    """The memory.

    Args:
        descriptor: closed by :meth:`close`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._file = _file(descriptor)
        self._lock = threading.Lock()  # the number of a closed one is soon another's

    @staticmethod
    def make(name: str) -> SharedProgress:
        """Make it, with nothing in it.

        Raises:
            OSError: if there are no descriptors left.
        """
        return SharedProgress(os.memfd_create(name, os.MFD_CLOEXEC))

    def write(self, round: int, step: int) -> None:
        """Say that a step is done.

        Raises:
            OSError: if somebody has closed the descriptor, whose number may be another file's by now.
        """
        if _file(self.descriptor) != self._file:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        fields = _FIELDS.pack(round, step, MonotonicClock().now())
        os.pwrite(self.descriptor, _RECORD.pack(fields, zlib.crc32(fields)), 0)

    def read(self) -> WorkerProgress | None:
        """Return what was written last; None if nothing was, or it is closed. From any thread."""
        for _ in range(TRIES):
            with self._lock:
                data = os.pread(self.descriptor, _RECORD.size, 0) if self.descriptor >= 0 else b""
            if len(data) < _RECORD.size:
                return None
            fields, check = _RECORD.unpack(data)
            if zlib.crc32(fields) == check:
                reached = WorkerProgress(*_FIELDS.unpack(fields))
                return reached if reached.possible else None
        return None

    def close(self) -> None:
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
