"""The guard's process. It must start at once, so it imports very little. See :mod:`elastic_agents.workers.guard`."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from elastic_agents.workers.lease import Lease
from elastic_agents.workers.sessions import kill_sessions, stop_sessions

PIDS = 256
"""Most pids in a line: what fits into PIPE_BUF bytes is written as a whole or not at all."""


def watch(source: int, reports: int) -> None:
    """Follow the agent's lines on a descriptor to their end; the guard's main function.

    Args:
        reports: the descriptor on which the agent is informed of processes that are stopped.
    """
    # Signals to the agent's process group, or to all processes of a job, must not end the guard.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    for number in ends:
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(reports, False)  # a frozen agent does not read

    def tell(pids: list[int]) -> None:
        for first in range(0, len(pids), PIDS):
            with suppress(OSError):  # no room, or the agent is dead
                os.write(reports, f"{_now()!r} {' '.join(map(str, pids[first : first + PIDS]))}\n".encode())

    sids: set[int] = set()
    directories: set[str] = set()
    lease = Lease()
    ready = select.poll()
    ready.register(source, select.POLLIN)
    pending = b""
    while True:
        wait = lease.wait(_now())
        if ready.poll(None if wait is None else 1000 * wait):
            if not (data := os.read(source, 65536)):
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in map(bytes.decode, lines):
                if line.startswith("+"):
                    sids.add(int(line[1:]))
                elif line.startswith("-"):
                    sids.discard(int(line[1:]))
                elif line.startswith("="):
                    lease.renew(float(line[1:]))
                elif line.startswith("/"):
                    directories.add(line)
                else:
                    return
        if lease.over(_now()):
            stop_sessions(sids, tell)
    kill_sessions(sids)
    if directories:
        import shutil  # only now, as it takes long

        for directory in directories:  # the other guard process does so, too
            shutil.rmtree(directory, ignore_errors=True)


def _now() -> float:
    """Read the agent's clock; it counts time for which this host was suspended, as the clocks of the others do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
