"""Workers' progress in shared memory, which their agent reads when needed, since each message would wake it up.

The agent creates it as an anonymous file (memfd) and passes the descriptor to its workers. Each has a place of its own.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
import zlib
from enum import IntEnum
from typing import NamedTuple

from elastic_launch.clock import MonotonicClock
from elastic_launch.system.plain_text import one_line, plain

__all__ = ["Activity", "SharedProgress", "WorkerProgress"]

_FIELDS = struct.Struct("<QQdQdQ32sdQQ")
_MOST = 2**53
_RECORD = struct.Struct(f"<{_FIELDS.size}sI")  # fields, their CRC-32
_PLACE = 128
"""Bytes of one worker's place."""

TRIES = 3
"""Attempts to read, since a read may overlap with the writer's few bytes."""


class Activity(IntEnum):
    """What a worker does after its last report; decides when it is late."""

    UNWATCHED = 0
    FIRST_STEP = 1
    STEP = 2
    CHECKPOINT = 3
    EVALUATION = 4
    PAUSE = 5
    """The script has announced a pause, and for how long."""


class WorkerProgress(NamedTuple):
    """The progress of one of a round's workers.

    Attributes:
        step: optimizer steps done.
        at: time of the last step, by the host's monotonic clock (:class:`elastic_launch.clock.MonotonicClock`).
        activity: an :class:`Activity`.
        limit: seconds that an announced pause may take.
        number: how many reports there were.
        what: what an announced pause is for, in a few words.
        loss: of the last step; None if the worker has reported none, or one that is not finite.
        batch: samples of a step, of all ranks; 0 if that is not known.
        passes: forward and backward passes of this worker in a step; likewise.
    """

    round: int
    step: int
    at: float
    activity: int = Activity.UNWATCHED
    limit: float = 0.0
    number: int = 0
    what: str = ""
    loss: float | None = None
    batch: int = 0
    passes: int = 0

    @property
    def possible(self) -> bool:
        """Whether this is plausible: a worker's script has access to the memory and may write anything."""
        known = self.activity <= max(Activity) and 0 <= self.limit < _MOST
        counts = self.round, self.step, self.batch, self.passes
        return known and max(counts) < _MOST and 0 <= self.at <= MonotonicClock().now()


class SharedProgress:
    """The shared memory.

    Args:
        descriptor: the descriptor of the memory; :meth:`close` closes it.
        local_rank: whose place :meth:`write` writes.

    Attributes:
        figures: loss, batch and passes of the next report.
    """

    def __init__(self, descriptor: int, local_rank: int = 0) -> None:
        self.descriptor = descriptor
        self._local_rank = local_rank
        self._file = _file(descriptor)
        self._last = WorkerProgress(0, 0, 0.0)
        self.figures: tuple[float | None, int, int] = (None, 0, 0)
        self._lock = threading.Lock()  # the number of a closed descriptor is soon reused

    @staticmethod
    def make(name: str) -> SharedProgress:
        """Create the memory, empty.

        Raises:
            OSError: if there are no descriptors left.
        """
        return SharedProgress(os.memfd_create(name, os.MFD_CLOEXEC))

    def write(
        self, round: int, step: int, activity: Activity = Activity.UNWATCHED, limit: float = 0.0, what: str = ""
    ) -> None:
        """Record that so many steps are done, and what follows.

        Raises:
            OSError: if the descriptor was closed by other code; its number may by now be another file's.
        """
        if _file(self.descriptor) != self._file:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        last = self._last
        at = last.at if (round, step) == last[:2] else MonotonicClock().now()
        self._last = WorkerProgress(round, step, at, activity, limit, last.number + 1, what, *self.figures)
        fields = _FIELDS.pack(
            *self._last[:6],
            what.encode(errors="replace"),
            math.nan if self._last.loss is None else self._last.loss,
            *self._last[8:],
        )
        os.pwrite(self.descriptor, _RECORD.pack(fields, zlib.crc32(fields)), self._local_rank * _PLACE)

    def read(self, local_rank: int = 0) -> WorkerProgress | None:
        """Return what a worker has written last; None if it has not, or if the memory is closed. Thread-safe."""
        for _ in range(TRIES):
            with self._lock:
                place = local_rank * _PLACE
                data = os.pread(self.descriptor, _RECORD.size, place) if self.descriptor >= 0 else b""
            if len(data) < _RECORD.size:
                return None
            fields, check = _RECORD.unpack(data)
            if zlib.crc32(fields) == check:
                reached = WorkerProgress(*_FIELDS.unpack(fields))
                loss = reached.loss if reached.loss is not None and math.isfinite(reached.loss) else None
                reached = reached._replace(what=_text(reached.what), loss=loss)
                return reached if reached.possible else None
        return None

    def close(self) -> None:
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)


def _text(data: bytes | str) -> str:
    assert isinstance(data, bytes)
    return one_line(plain(data.rstrip(b"\0").decode(errors="ignore")))


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
