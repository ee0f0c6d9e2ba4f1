"""The guard's own process; it must start at once, so it imports next to nothing. See :mod:`elastic_agents.guard`."""

from __future__ import annotations

import os
import signal

from elastic_agents.sessions import kill_sessions

__all__ = ["watch"]


def watch(source: int) -> None:
    """Follow the agent's lines on a descriptor until its end; the guard's main function."""
    # Whoever signals the agent's process group must not take the guard with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sids: set[int] = set()
    with os.fdopen(source, "r") as lines:
        for line in lines:
            if line.startswith("+"):
                sids.add(int(line[1:]))
            elif line.startswith("-"):
                sids.discard(int(line[1:]))
            else:
                return
    kill_sessions(sids)
