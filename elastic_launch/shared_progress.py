"""Workers' progress in shared memory, which their agent reads when needed, since each message would wake it up.

The agent creates it as an anonymous file (memfd) and passes the descriptor to its workers, one of which writes.
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
"""Attempts to read, since a read may overlap with the writer's few bytes."""


class WorkerProgress(NamedTuple):
    """The progress of a round's workers.

    Attributes:
        step: optimizer steps done.
        at: time of the last step, by the host's monotonic clock (:class:`elastic_launch.clock.MonotonicClock`).
    """

    round: int
    step: int
    at: float

    @property
    def possible(self) -> bool:
        """Whether this is plausible: a worker's script has access to the memory and may write anything."""
        return max(self.round, self.step) < _MOST and 0 <= self.at <= MonotonicClock().now()


class SharedProgress:
    """The shared memory.

    Args:
        descriptor: the descriptor of the memory; :meth:`close` closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._file = _file(descriptor)
        self._lock = threading.Lock()  # the number of a closed descriptor is soon reused

    @staticmethod
    def make(name: str) -> SharedProgress:
        """Create the memory, empty.

        Raises:
            OSError: if there are no descriptors left.
        """
        return SharedProgress(os.memfd_create(name, os.MFD_CLOEXEC))

    def write(self, round: int, step: int) -> None:
        """Record that a step is done.

        Raises:
            OSError: if the descriptor was closed by other code; its number may by now be another file's.
        """
        if _file(self.descriptor) != self._file:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        fields = _FIELDS.pack(round, step, MonotonicClock().now())
        os.pwrite(self.descriptor, _RECORD.pack(fields, zlib.crc32(fields)), 0)

    def read(self) -> WorkerProgress | None:
        """Return what was last written; None if nothing was, or if it is closed. Thread-safe."""
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
