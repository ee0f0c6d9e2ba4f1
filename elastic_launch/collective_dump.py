"""Lets a process' agent see which collectives it has begun: torch's flight recorder, written to a file on request.

A thread answers, also while the training waits for other ranks. It cannot while another one holds Python's lock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from elastic_launch.system.private_files import open_private

COLLECTIVES = "collectives.json"
"""Name of the file, beside the worker's error file.

Its ``dumps`` are those of the recorders. Its ``first`` has, for each of them, the lowest ``pg_id`` of a process group
that still exists; torch counts the groups of a process.
"""

REQUESTS = "collectives.fifo"
"""Name of the FIFO beside it; each byte that is written there is a request."""

LONGEST_DUMP = 16 << 20
"""A larger dump is left out. There are about 500 bytes for each of 2,000 collectives unless torch is told otherwise."""

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Torch's functions, for collectives on CPUs and for those of NCCL."""

_OF_ANOTHER_NAME = ("nccl2", "nccl-lazy")
"""Backends of torch 2.15 whose collectives the first of these functions knows, by this third argument."""

_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, MemoryError)
"""What these functions may raise, since they are not public and may change."""

_answering: list[threading.Thread] = []
_first: dict[str, int] = {}  # by recorder


def dump_collectives_on_request() -> None:
    """From now on, write what the recorder has on request, if an agent has started this process."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file or _answering:
        return
    directory = os.path.dirname(os.path.abspath(error_file))  # the script may change its working directory
    # Without the FIFO or the thread there is no dump. The training does not depend on it.
    with suppress(OSError):
        path = os.path.join(directory, REQUESTS)
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing, too: so that reading waits, instead of ending, while no agent has it open.
        requests = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        thread = threading.Thread(target=_answer, args=(requests, directory), name="collective dump", daemon=True)
        # Signals are the script's: it may wait for one that it has blocked in its own thread.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
            _answering.append(thread)
        except RuntimeError:  # no more threads
            os.close(requests)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def forget_collectives() -> None:
    """All process groups of this process are gone: later ones may have their names."""
    with suppress(*_FAILURES):
        for name, recorder in _recorders().items():
            groups = json.loads(recorder(False, False))["pg_status"]  # without collectives
            _first[name] = 1 + max(map(int, groups), default=-1)


def _answer(requests: int, directory: str) -> None:
    path = os.path.join(directory, COLLECTIVES)
    while os.read(requests, 1):
        with suppress(OSError, *_FAILURES):  # such as a full disk
            with open(open_private(f"{path}.tmp", os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(_dump())
            os.replace(f"{path}.tmp", path)


def _recorders() -> dict[str, Callable[[bool, bool], bytes]]:
    torch = sys.modules.get("torch._C._distributed_c10d")  # a process that has not imported it has begun none
    found = {name: getattr(torch, name) for name in _RECORDERS if hasattr(torch, name)}
    if hasattr(torch, "ProcessGroupNCCL2"):
        by_name = found[_RECORDERS[0]]
        found |= {name: lambda *what, name=name: by_name(*what, name) for name in _OF_ANOTHER_NAME}
    return found


def _dump() -> bytes:
    recorders = _recorders()
    # With collectives, of which the finished ones, too.
    dumps = b",".join(recorder(True, False) for recorder in recorders.values())
    if len(dumps) > LONGEST_DUMP:
        recorders, dumps = {}, b""
    first = json.dumps([_first.get(name, 0) for name in recorders]).encode()
    return b'{"first": %b, "dumps": [%b]}' % (first, dumps)
