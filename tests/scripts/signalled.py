"""A worker that notes the signals it gets: ``<directory>/got-<rank>``; with ``deaf`` it installs no handlers.

It ends with 0 once ``<directory>/finish`` is there.
"""

import os
import pathlib
import signal
import sys
import time

directory, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]


def note(number, frame):
    with (directory / f"got-{rank}").open("a") as file:
        file.write(f"{signal.Signals(number).name}\n")


if "deaf" not in sys.argv[2:]:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
(directory / f"begun-{rank}").touch()
while not (directory / "finish").exists():
    time.sleep(0.02)
