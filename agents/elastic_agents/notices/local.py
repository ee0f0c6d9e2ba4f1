"""Sources on this host: a file that appears, the end of a Slurm job."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_agents.notices.types import Notice, Trouble

__all__ = ["File", "Slurm", "seconds_in"]

LONGEST = 1e6
"""Seconds; see :data:`elastic_launch.config.launch_config.LONGEST_WAIT`."""

AHEAD = 60.0
"""Seconds before the end of a Slurm job at which the node leaves; then come SIGTERM, and after KillWait SIGKILL."""


def seconds_in(text: str) -> float | None:
    """Return the seconds that a file gives; None if it gives none."""
    try:
        found = float(text)
    except ValueError:
        return None
    return min(found, LONGEST) if math.isfinite(found) and found >= 0 else None


class File:
    """A file that makes the node leave once it is there; it may hold the seconds that are left.

    One that is there at the start counts, too: whoever made it was not asked whether it was early.
    """

    name = "file"
    pause = 0.5

    def __init__(self, path: str) -> None:
        self._path = path
        self._empty = False
        self.watched = path

    def poll(self) -> Sequence[Notice]:
        try:
            os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            raise Trouble(f"{self._path} cannot be looked for", str(error)) from None
        text = _beginning(self._path)
        if not text and not self._empty:
            self._empty = True  # it may be about to be written
            return []
        return [Notice(self.name, "request", f"{self._path} is there", seconds_in(text))]

    def farewell(self, notice: Notice) -> str:
        return ""

    def close(self) -> None:
        """Nothing is waited for."""


def _beginning(path: str) -> str:
    """Return how a file begins; nothing, if it cannot be read or is none: it is there all the same."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 64).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


class Slurm:
    """The end of a job as it was known when it began: SLURM_JOB_END_TIME, a Unix time (sbatch(1), since 22.05).

    The clocks of a cluster may be compared, since munge refuses who is five minutes off. It is done once, at the start.
    """

    name = "Slurm"
    pause = 1.0

    def __init__(
        self,
        environ: Mapping[str, str],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = environ.get("SLURM_JOB_ID", "")[:40]
        end = environ.get("SLURM_JOB_END_TIME", "")
        self.watched = f"the end of job {self._job}"
        self._clock = clock
        self._end = math.inf
        if end.isascii() and end.isdigit() and len(end) < 12:
            self._end = clock() + int(end) - now()
            if self._end <= clock():
                # The job was given more time since.
                self._end = math.inf
                self.watched += ", whose end as it was known at its start has passed"
        else:
            self.watched += ", of which SLURM_JOB_END_TIME does not tell"

    def poll(self) -> Sequence[Notice]:
        left = self._end - self._clock()
        if left > AHEAD:
            return []
        return [Notice(self.name, "time limit", f"the end of job {self._job}", max(0.0, left))]

    def farewell(self, notice: Notice) -> str:
        return ""

    def close(self) -> None:
        """Nothing is waited for."""
