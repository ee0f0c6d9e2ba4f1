"""A worker that leaves dead and living orphans behind: some in its session, some in their own sessions.

The pids of the living ones go to ``left.txt``. It needs no torch and ends by SIGTERM.
"""

import os
import pathlib
import sys
import time

directory = pathlib.Path(sys.argv[1])


def leave(daemon: bool, seconds: float) -> None:
    """Fork a process whose parent ends at once."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if daemon:
        os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(seconds)
    os._exit(0)


for number in range(20):
    leave(daemon=number % 2 == 0, seconds=0.0)
for daemon in (True, False):
    leave(daemon, 600.0)
with (directory / "started.txt").open("a") as file:
    file.write(f"{os.environ['RANK']} {os.environ['ELASTIC_LAUNCH_ROUND']} {sys.stdin and sys.stdin.read()!r}\n")
time.sleep(600)
