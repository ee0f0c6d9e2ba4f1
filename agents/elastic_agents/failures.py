"""What a dead worker left to say: its exception, or its signal and the end of its stderr."""

from __future__ import annotations

import hashlib
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from elastic_launch.error_file import read_error_file
from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.messages import Failure

__all__ = ["OutOfMemoryCounter", "describe", "report"]

# A report must fit into one message, whatever an exception has to say.
_DETAIL_LINES = 60
_LINE_LENGTH = 2000

_COUNTERS = (
    ("/sys/fs/cgroup/memory.events", "oom_kill"),
    ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"),
)


class OutOfMemoryCounter:
    """Counts the kernel's out-of-memory kills in this process' cgroup.

    They are in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1).
    """

    def __init__(self) -> None:
        self._files = [(Path(path), key) for path, key in _candidates()]
        self._last = self._read()

    def risen(self) -> bool:
        """Whether there were kills since the last call."""
        last, self._last = self._last, self._read()
        return self._last > last

    def _read(self) -> int:
        for path, key in self._files:
            try:
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == key:
                        return int(value)
            except (OSError, ValueError):
                continue
        return 0


def _candidates() -> list[tuple[str, str]]:
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((f"/sys/fs/cgroup{path}/memory.events", "oom_kill"))
        elif "memory" in controllers.split(","):
            found.append((f"/sys/fs/cgroup/memory{path}/memory.oom_control", "oom_kill"))
    return [*found, *_COUNTERS]


def describe(exit_code: int) -> str:
    """``exit code 3`` or ``signal 9 (SIGKILL)``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def report(
    *,
    node_id: str,
    round_number: int,
    rank: int,
    local_rank: int,
    pid: int,
    exit_code: int,
    ran: float,
    error_file: Path,
    log: Path,
    stderr: Sequence[str],
    preempted: bool,
    out_of_memory: bool,
) -> Failure:
    """Build the report on a failed worker."""
    how = describe(exit_code)
    error = read_error_file(error_file)
    if error is not None:
        text, detail = error.message, error.traceback
    else:
        text, detail = _exception_in(stderr) if exit_code > 0 else "", tuple(stderr)
    if ExitCode.DO_NOT_RETRY in (exit_code, error.exit_code if error is not None else 0):
        kind = "fatal"
    elif preempted:
        kind = "preemption"
    else:
        kind = "out of memory" if out_of_memory and exit_code == -signal.SIGKILL else "crash"
    hint = "; the kernel killed it for lack of memory" if kind == "out of memory" else ""
    message = f"{how}{hint}" + (f": {text.splitlines()[0][:_LINE_LENGTH]}" if text else "")
    signature = ""
    if exit_code > 0:
        # Of stderr only the exception counts: what else is there has times and ranks in it.
        seen = "\n".join([text, *detail]) if error is not None else text or "".join(detail[-1:])
        signature = hashlib.sha256(f"{exit_code} {seen}".encode()).hexdigest()[:16]
    return Failure(
        node_id=node_id,
        kind=kind,
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        exit_code=exit_code,
        message=message,
        detail=tuple(line[:_LINE_LENGTH] for line in detail[-_DETAIL_LINES:]),
        ran=ran,
        signature=signature,
        log=str(log),
        round=round_number,
        host=socket.gethostname(),
    )


def _exception_in(stderr: Sequence[str]) -> str:
    """Return the exception's line of a traceback in the output, if it holds one, or its end.

    torch writes the rank before each line once the process group is there.
    """
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in stderr]
    if not any(line.startswith(("Traceback (most recent call last)", '  File "')) for line in lines):
        return ""
    return next((line for line in reversed(lines) if line and not line.startswith((" ", "["))), "")
