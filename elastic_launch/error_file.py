"""Error files, to which a worker writes the exception that ends it.

``TORCHELASTIC_ERROR_FILE`` is the path of a worker's error file. The format is that of torch.distributed.elastic's
``@record``: JSON in which ``message`` is a string, or an object with ``message``, ``errorCode`` and ``extraInfo``; the
last contains ``py_callstack`` and ``timestamp``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from elastic_launch.errors import ExitCode
from elastic_launch.system.private_files import read_small

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

MOST_BYTES = 16 * 1024 * 1024
"""Largest error file that is read, in bytes; a larger one is ignored."""


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """The content of an error file.

    Attributes:
        exit_code: the exit code that the worker requests; 0 for none.
        at: when it was written, by the host's wall clock.
    """

    message: str
    traceback: tuple[str, ...] = ()
    exit_code: int = 0
    at: float = 0.0


def read_error_file(path: Path) -> ErrorFile | None:
    """Return the content of an error file; None if it does not exist or is not valid.

    The worker controls the file, so only a regular file of bounded size is read. Invalid text is escaped.
    """
    try:
        value, at = json.loads(read_small(path, MOST_BYTES)), os.stat(path).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    message = value.get("message") if isinstance(value, dict) else None
    if isinstance(message, str):
        return ErrorFile(_escaped(message), at=at)
    if not isinstance(message, dict):
        return None
    extra, code = message.get("extraInfo"), message.get("errorCode")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    return ErrorFile(
        _escaped(str(message.get("message", ""))),
        tuple(_escaped(callstack).splitlines()),
        code if type(code) is int else 0,
        at,
    )


def write_error_file(path: Path, error: ErrorFile) -> None:
    """Write what torch's ``@record`` would write.

    Raises:
        OSError: if that fails.
    """
    extra = {"py_callstack": "\n".join(error.traceback), "timestamp": str(int(error.at))}
    message = {"message": error.message, "extraInfo": extra, "errorCode": error.exit_code}
    path.write_text(json.dumps({"message": message}))


def do_not_retry(reason: str) -> NoReturn:
    """End this worker, and with it the run, because a restart would fail in the same way.

    The run ends with exit code 93 even if restarts are left, and shows ``reason`` as the root cause, with the traceback
    of the exception being handled, if any. ``finally`` blocks and ``atexit`` functions run. A worker in another
    language achieves the same with exit code 93.

    Raises:
        SystemExit: with code 93.
    """
    handled = sys.exception()
    trace = "".join(traceback.format_exception(handled) if handled else _stack(sys._getframe(1)))
    if path := os.environ.get(ENV_ERROR_FILE):
        error = ErrorFile(reason, tuple(trace.splitlines()), int(ExitCode.DO_NOT_RETRY), time.time())
        with suppress(OSError):
            write_error_file(Path(path), error)
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        sys.stderr.write(f"{trace if handled else ''}{reason}\n")
    raise SystemExit(int(ExitCode.DO_NOT_RETRY))


def _stack(caller: FrameType) -> list[str]:
    """Return the script's own frames down to the caller's, without the launcher's frames in a forked worker."""
    frames = takewhile(
        lambda entry: not str(entry[0].f_globals.get("__name__", "")).startswith("elastic_agents."),
        traceback.walk_stack(caller),
    )
    return traceback.StackSummary.extract(reversed(list(frames))).format()


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
