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
from bisect import bisect_left
from enum import IntEnum
from typing import NamedTuple

from elastic_launch.clock import MonotonicClock
from elastic_launch.system.plain_text import one_line

STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds: steps are counted by the first of these that they did not exceed."""

_COUNTS = len(STEP_BOUNDS) + 1
_FIELDS = struct.Struct(f"<QQdQdQ32sdQQdd{_COUNTS}QQ")
_MOST = 2**53
_RECORD = struct.Struct(f"<{_FIELDS.size}sI")  # fields, their CRC-32
_PLACE = 512
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
    FORMING = 6
    """It takes its place in a round, and does nothing but wait for the other ranks of it, or receive from them."""
    RESTORE = 7
    """It does the rest of that: it reads from storage, or runs what the script does as a state is restored."""
    REHEARSED_STEP = 8
    """Its first step in the round, after a rehearsal."""
    RESUMED_STEP = 9
    """Its first step in the round, after steps in an earlier one."""


FIRST_STEPS = Activity.FIRST_STEP, Activity.REHEARSED_STEP, Activity.RESUMED_STEP
"""What a worker does until its first step in a round is done."""


_LAST = max(Activity)


class WorkerProgress(NamedTuple):
    """The progress of one of a round's workers.

    Attributes:
        step: optimizer steps done.
        at: time of the last step, by the host's monotonic clock (:class:`elastic_launch.clock.MonotonicClock`).
        activity: an :class:`Activity`.
        limit: seconds that an announced pause may take.
        number: how many reports there were.
        what: what an announced pause is for, in a few words.
        loss: loss of the last step; None if the worker has reported none, or one that is not finite.
        batch: samples of a step, of all ranks; 0 if that is not known.
        passes: forward and backward passes of this worker in a step; likewise.
        lr: learning rate of the first parameter group; None if the worker has not reported it.
        steps_s: seconds of all steps of the workers that had this place, each from the end of the one before.
        durations: numbers of these steps by their durations, see :data:`STEP_BOUNDS`; the last are longer than all.
        training: the number of the script's training that is under way, from 0; ``step`` counts in it.
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
    lr: float | None = None
    steps_s: float = 0.0
    durations: tuple[int, ...] = (0,) * _COUNTS
    training: int = 0

    @property
    def position(self) -> tuple[int, int, int]:
        """The round, the training and the step, by which reports are ordered."""
        return self.round, self.training, self.step

    @property
    def possible(self) -> bool:
        """Whether this is plausible: a worker's script has access to the memory and may write anything."""
        known = self.activity <= _LAST and 0 <= self.limit < _MOST
        counts = self.round, self.step, self.batch, self.passes, self.training, *self.durations
        return known and max(counts) < _MOST > self.steps_s >= 0 and 0 <= self.at <= MonotonicClock().now()


class SharedProgress:
    """The shared memory.

    Args:
        descriptor: the descriptor of the memory; :meth:`close` closes it.
        local_rank: whose place :meth:`write` writes.

    Attributes:
        figures: loss, batch, passes and learning rate of the next report.
        training: see :class:`WorkerProgress`.
    """

    def __init__(self, descriptor: int, local_rank: int = 0) -> None:
        self.descriptor = descriptor
        self._local_rank = local_rank
        self._file = _file(descriptor)
        self.figures: tuple[float | None, int, int, float | None] = (None, 0, 0, None)
        self.training = 0
        self._lock = threading.Lock()  # the number of a closed descriptor is soon reused
        # Counters go on after the worker that had this place before.
        before = self.read(local_rank) or WorkerProgress(0, 0, 0.0)
        self._last = WorkerProgress(0, 0, 0.0, steps_s=before.steps_s, durations=before.durations)

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
        begins = activity in FIRST_STEPS  # then the steps up to this one were not done in this round
        same = (round, self.training) == (last.round, last.training)
        at = last.at if same and step == last.step and not begins else MonotonicClock().now()
        steps_s, durations = last.steps_s, last.durations
        if same and step > last.step and not begins:
            place = bisect_left(STEP_BOUNDS, (at - last.at) / (step - last.step))
            durations = (*durations[:place], durations[place] + step - last.step, *durations[place + 1 :])
            steps_s += at - last.at
        count, figures = last.number + 1, self.figures
        known = round, step, at, activity, limit, count, what
        self._last = WorkerProgress(*known, *figures, steps_s, durations, self.training)
        loss, batch, passes, lr = (math.nan if figure is None else figure for figure in figures)
        words = what.encode(errors="replace")
        fields = _FIELDS.pack(*self._last[:6], words, loss, batch, passes, lr, steps_s, *durations, self.training)
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
                found = _FIELDS.unpack(fields)
                *known, what, loss, batch, passes, lr, steps_s = found[: -_COUNTS - 1]
                figures = (_finite(loss), batch, passes, _finite(lr), steps_s, found[-_COUNTS - 1 : -1], found[-1])
                reached = WorkerProgress._make((*known, one_line(what.rstrip(b"\0").decode(errors="ignore")), *figures))
                return reached if reached.possible else None
        return None

    def close(self) -> None:
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
