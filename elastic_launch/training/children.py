"""What a worker starts: programs that are not to train with the others, and processes that its session waits for."""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from select import POLLIN, poll
from signal import SIGKILL, SIGTERM, pidfd_send_signal
from subprocess import Popen, TimeoutExpired
from types import TracebackType
from typing import Any

from elastic_launch.contract import FOR_WORKERS
from elastic_launch.errors import UsageError
from elastic_launch.events.sentences import ending
from elastic_launch.faults import ENV_DRILL, ENV_FAULTS
from elastic_launch.system.plain_text import clipped, one_line
from elastic_launch.training.durations import seconds_of
from elastic_launch.training.kinds import check_kind
from elastic_launch.training.ranks.world import ASYNC_ERROR_HANDLING, before_session
from elastic_launch.training.stopping import DrainedExit

_log = logging.getLogger(__name__)

_OTHERS = {ENV_DRILL, ENV_FAULTS, "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_TIMER_FILE"}
"""The training's faults; and what torchrun sets, or the agent if the user wants timers."""

_TERMINATION = 5.0
"""Seconds between SIGTERM and SIGKILL for a process whose time is over."""

_DEATH = 1.0
"""Seconds in which a process ends after SIGKILL, unless it is in uninterruptible sleep."""

_LOOK_EVERY = 0.5
"""Seconds between two looks at whether the run is stopped."""

_SHOWN = 80


def clean_environment() -> dict[str, str]:
    """Return a copy of ``os.environ`` for a program that a worker starts, and that is not to train with the others.

    ::

        subprocess.run([sys.executable, "evaluate.py"], env=el.clean_environment(), check=True)

    The program may use :func:`session`, as the only process of its world, or be a launcher with workers of its own.
    What a launcher sets for its workers is left out, such as ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
    ``TORCHELASTIC_RUN_ID`` and ``ELASTIC_LAUNCH_ROUND``, and so are the flags of this launch (``PET_*``) and planned
    faults. What may be the user's is kept: ``OMP_NUM_THREADS``, ``TORCH_NCCL_ASYNC_ERROR_HANDLING``,
    ``GLOO_SOCKET_IFNAME`` and ``CUDA_VISIBLE_DEVICES``. It is the same without a launcher.
    """
    left_out = (FOR_WORKERS | _OTHERS) - {ASYNC_ERROR_HANDLING}
    found = {**os.environ, **before_session()}
    kept = {name: value for name, value in found.items() if name not in left_out and not name.startswith("PET_")}
    return {name: value for name, value in kept.items() if value is not None}


class Background:
    """Processes that a session waits for at its end, or kills if an exception leaves it: :meth:`Run.background`.

    Args:
        stopped: whether this node or the run is to end, so that none is waited for any longer.
        on_stop: called once the processes have ended because of that, before a ``DrainedExit``.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False, on_stop: Callable[[], None] = lambda: None) -> None:
        self._stopped, self._on_stop = stopped, on_stop
        self._limits: dict[Popen[Any], float] = {}

    def add(self, process: Popen[Any], wait: float | str | None) -> None:
        """Add a process; see :meth:`Run.background`."""
        check_kind("run.background(process)", process, Popen, "Give what subprocess.Popen(...) returns.")
        self._limits[process] = math.inf  # from now on it is ended with the session
        if process.poll() is None and os.getsid(process.pid) != os.getsid(0):
            raise UsageError(
                f"run.background(): {_name(process)} has a session of its own, and would survive this process.",
                "Start it without start_new_session=True.",
            )
        self._limits[process] = math.inf if wait is None else 0.0 if wait == 0 else seconds_of(wait)
        self._settle()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        began = time.monotonic()
        try:
            self._settle()
            if kind is None:
                self._end([process for process, limit in self._limits.items() if not limit], _TERMINATION)
                for process, limit in sorted(self._limits.items(), key=lambda item: item[1]):
                    if not self._await(process, limit, began + limit):
                        self._end([process], _TERMINATION)
        finally:
            self._end([*self._limits], 0.0)

    def _await(self, process: Popen[Any], limit: float, deadline: float) -> bool:
        """Wait for the end of a process; return whether it has ended in time."""
        if process.poll() is None:
            most = "" if limit == math.inf else f" for up to {limit:g} s"
            _log.warning("the session's end waits%s for %s", most, _name(process))
        if process.stdin is not None:  # it may wait for the end of its input
            with suppress(OSError):
                process.stdin.close()
        while process.poll() is None and (left := deadline - time.monotonic()) > 0 and not self._stopped():
            with suppress(TimeoutExpired):
                process.wait(min(left, _LOOK_EVERY))
        self._settle()
        if process not in self._limits:
            return True
        if self._stopped():
            _log.warning("the run is stopped before the end of %s", ", ".join(map(_name, self._limits)))
            self._end([*self._limits], _TERMINATION)
            self._on_stop()
            raise DrainedExit(128 + SIGTERM)
        _log.warning("%s has not ended within %g s, and is terminated", _name(process), limit)
        return False

    def _end(self, processes: list[Popen[Any]], grace: float) -> None:
        """End processes, each with all that it has started: with SIGTERM, and after the grace in seconds with SIGKILL.

        A program that ends in order may need its own processes for that, such as those of a loader. So these get
        SIGTERM once it has ended, or after half of the grace. A shell that ends leaves behind what it waits for.
        """
        with ExitStack() as stack:
            families = {process.pid: _descent(process.pid) for process in processes if process.poll() is None}
            everyone = {descriptor for family in families.values() for descriptor in family.values()}
            for descriptor in everyone:
                stack.callback(os.close, descriptor)
            if grace:
                first = {family[pid] for pid, family in families.items() if pid in family}
                _send(first, SIGTERM)
                _await(first, grace / 2)
                _send(everyone - first, SIGTERM)
                _await(everyone, grace / 2)
            _send(everyone, SIGKILL)
            _await(everyone, _DEATH)
        for process in processes:
            if process.poll() is None:  # it had no descriptor, as this process has too many
                process.kill()
            self._limits.pop(process, None)

    def _settle(self) -> None:
        """Forget what has ended; say what has failed."""
        for process in list(self._limits):
            # Several threads may look at the same time.
            if process.poll() is not None and self._limits.pop(process, None) is not None and process.returncode:
                _log.warning("%s has ended with %s", _name(process), ending(process.returncode))


def _descent(pid: int) -> dict[int, int]:
    """Return a process, those in its process group, if it leads one, and all descendants: a descriptor for each pid."""
    parents: dict[int, set[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                _, parent, group, *_ = file.read().rpartition(")")[2].split()  # proc_pid_stat(5)
                parents[int(name)] = {int(parent), int(group)}
    found = [pid]
    for each in found:
        found += [child for child, those in parents.items() if each in those and child not in found]
    descriptors = {}
    for each in found:
        with suppress(OSError):
            descriptors[each] = os.pidfd_open(each)
    return descriptors


def _send(descriptors: Iterable[int], number: int) -> None:
    for descriptor in descriptors:
        with suppress(OSError):  # it has ended, or is another user's
            pidfd_send_signal(descriptor, number)


def _await(descriptors: Iterable[int], seconds: float) -> None:
    """Wait until all these processes have ended, for so many seconds at most."""
    deadline, running, poller = time.monotonic() + seconds, set(descriptors), poll()
    for descriptor in running:
        poller.register(descriptor, POLLIN)
    while running and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(1000 * left):
            poller.unregister(descriptor)
            running.discard(descriptor)


def _name(process: Popen[Any]) -> str:
    args = process.args
    command = os.fsdecode(args) if isinstance(args, str | bytes | os.PathLike) else shlex.join(map(os.fsdecode, args))
    return f"background process {process.pid} ({clipped(one_line(command), _SHOWN)})"
