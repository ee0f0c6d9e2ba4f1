"""The guard's process. It must start at once, so it imports very little. See :mod:`elastic_agents.workers.guard`."""

from __future__ import annotations

import os
import signal

from elastic_agents.workers.sessions import kill_sessions


def watch(source: int) -> None:
    """Follow the agent's lines on a descriptor to their end; the guard's main function."""
    # Signals to the agent's process group, or to all processes of a job, must not end the guard.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    for number in ends:
        signal.signal(number, signal.SIG_IGN)
    sids: set[int] = set()
    directories: set[str] = set()
    with os.fdopen(source, "r") as lines:
        for line in lines:
            if line.startswith("+"):
                sids.add(int(line[1:]))
            elif line.startswith("-"):
                sids.discard(int(line[1:]))
            elif line.startswith("/"):
                directories.add(line.rstrip("\n"))
            else:
                return
    kill_sessions(sids)
    if directories:
        import shutil  # only now, as it takes long

        for directory in directories:  # the other guard process does so, too
            shutil.rmtree(directory, ignore_errors=True)
