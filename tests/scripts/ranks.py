"""What ranks of a script tell each other by files: where they are, so that one can end while the others are there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn


def come(directory: Path, place: str, rank: int) -> None:
    """Tell the others that this rank has come to a place."""
    (directory / f"come-{place}-{rank}").touch()


def await_ranks(directory: Path, place: str, ranks: Iterable[int]) -> None:
    """Wait until these ranks have come to a place."""
    _wait(f"ranks at {place}", lambda: all((directory / f"come-{place}-{rank}").exists() for rank in ranks))


def end(directory: Path) -> NoReturn:
    """Kill this process."""
    new = directory / f"ended.{os.getpid()}"
    new.write_text(str(os.getpid()))
    new.rename(directory / "ended")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def await_end(directory: Path) -> None:
    """Wait until a rank has killed itself."""

    def ended() -> bool:
        try:
            stat = Path("/proc", (directory / "ended").read_text(), "stat").read_text()
        except ProcessLookupError:
            return True
        except FileNotFoundError:
            return (directory / "ended").exists()
        return stat.rpartition(")")[2].split()[0] in "ZX"

    _wait("the end of a rank", ended)


def _wait(what: str, probe: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not probe():
        assert time.monotonic() < deadline, f"not seen: {what}"
        time.sleep(0.001)
