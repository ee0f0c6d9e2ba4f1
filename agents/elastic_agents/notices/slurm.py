"""The end of a Slurm job."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_agents.notices.types import Notice, Source
from elastic_launch.config.notice_sources import NoticeSource

_log = logging.getLogger("elastic_launch.notices")

AHEAD = 60.0
"""Seconds before the end of a Slurm job at which the node leaves; then come SIGTERM, and SIGKILL after KillWait."""

AGAIN = 60.0
"""Seconds after which Slurm is asked again if it did not answer, and the end is not known otherwise."""

ANSWER = 10.0
"""Seconds to wait for squeue."""


class Slurm(Source):
    """The end of a job: SLURM_JOB_END_TIME, a Unix time, as known when the job began.

    Slurm is asked a minute before that, since the job's time may have been extended, and at the start if the variable
    is not set, as by Slurm 22.05; then again every minute until it answers. Comparing the cluster's clocks is safe,
    since munge rejects hosts that are five minutes off.
    """

    name = "Slurm"
    pause = 1.0

    def __init__(
        self,
        environ: Mapping[str, str],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        ask: Callable[[str], float | None] | None = None,
    ) -> None:
        self._job = environ.get("SLURM_JOB_ID", "")[:40]
        end = environ.get("SLURM_JOB_END_TIME", "")
        self.watched = f"the end of job {self._job}"
        self._clock = clock
        self._ask = ask or seconds_left
        self._end = math.inf
        self._ask_at = -math.inf
        self._said = ""
        if end.isascii() and end.isdigit() and len(end) < 12:
            self._end = clock() + int(end) - now()
            self._ask_at = self._end - AHEAD

    def poll(self) -> Sequence[Notice]:
        if self._clock() >= self._ask_at:
            self._look()
        left = self._end - self._clock()
        if left > AHEAD:
            return []
        return [Notice(self.name, "time limit", f"the end of job {self._job}", max(0.0, left))]

    def _look(self) -> None:
        """Ask Slurm when the job ends, and determine when to ask again."""
        found, now = self._ask(self._job), self._clock()
        if found is not None:
            self._end = now + found
        elif self._end <= now:
            self._end = math.inf
        if self._end - now <= AHEAD:
            self._ask_at = math.inf
            return
        self._ask_at = now + AGAIN if found is None else self._end - AHEAD
        if (said := _later(found)) != self._said:
            self._said = said
            _log.info("notices from Slurm: %s is %s", self.watched, said)


def _later(left: float | None) -> str:
    return "not known" if left is None else f"{left:.0f} s away" if math.isfinite(left) else "not limited"


def seconds_left(job: str) -> float | None:
    """Return the seconds until Slurm's time limit of a job, as squeue shows it; None if it does not.

    One task of a job array has the array's id, and the first component of a heterogeneous job has that of the whole
    job: asked for it, squeue shows the others, too.
    """
    import subprocess  # needed in Slurm only

    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%A %L"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    shown = re.search(rf"^\s*{re.escape(job)}\s+(\S+)\s*$", done.stdout, re.MULTILINE)
    text = shown[1] if shown else ""
    if text == "UNLIMITED":
        return math.inf
    found = re.fullmatch(r"(?:(?:(\d{1,5})-)?(\d{1,2}):)?(\d{1,2}):(\d{2})", text, re.ASCII)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def source(asked: NoticeSource, environ: Mapping[str, str]) -> Slurm:
    return Slurm(environ)
