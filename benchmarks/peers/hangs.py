"""Makes a training hang on request, under any launcher."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def ask(directory: Path, pid: int) -> None:
    """Ask a process to hang after its next step."""
    _request(directory, pid).touch()


def hanging(note: Callable[..., None], directory: Path, beat: Callable[[], None] | None = None) -> Callable[..., None]:
    """Return a function that notes a step and hangs if that was asked for.

    Args:
        beat: called after each step.
    """
    request = _request(directory, os.getpid())

    def note_step(step: int, **more: object) -> None:
        note(step, **more)
        while step and request.exists():
            time.sleep(1)
        if step and beat is not None:
            beat()

    return note_step


def _request(directory: Path, pid: int) -> Path:
    return directory / f"hang-{pid}"
