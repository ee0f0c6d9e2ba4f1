"""Kills the workers' sessions if their agent is killed: a small process of its own that waits for the agent's end.

The agent writes ``+SID`` and ``-SID`` lines; end of file without ``bye`` means that it died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

__all__ = ["Guard", "watch"]


def watch(source: int) -> None:
    """Follow the agent's lines on a descriptor until its end; the guard's main function."""
    from elastic_agents.sessions import kill_sessions

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


class Guard:
    """The agent's side of the guard."""

    def __init__(self) -> None:
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        code = f"import sys; sys.path.append({root!r}); from elastic_agents.guard import watch; watch(0)"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # It needs to find its libraries, and none of the agent's secrets.
            env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
            start_new_session=True,
        )

    def add(self, sid: int) -> None:
        """Kill this session if the agent dies."""
        self._write(f"+{sid}\n")

    def remove(self, sid: int) -> None:
        """The session has ended."""
        self._write(f"-{sid}\n")

    def close(self) -> None:
        """Dismiss the guard."""
        self._write("bye\n")
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # somebody killed the guard; the workers run on without it
