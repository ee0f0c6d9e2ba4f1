"""A plain script that saves when it gets SIGUSR1, and notes which signals came, in the file that it is given."""

import signal
import sys


def note(text: str) -> None:
    with open(sys.argv[1], "a") as file:
        file.write(f"{text}\n")


waited = {signal.SIGUSR1, signal.SIGTERM}
signal.signal(signal.SIGUSR1, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
note("started")
while (number := signal.sigwait(waited)) != signal.SIGTERM:
    note(signal.Signals(number).name.removeprefix("SIG"))
note("TERM")
