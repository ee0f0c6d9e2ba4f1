"""Looks at a worker's processes from outside: whether they do anything, and where their threads stand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_agents.hangs.stacks import parse_dump, parse_py_spy
from elastic_agents.workers.frames import Stack
from elastic_agents.workers.processes import catches
from elastic_agents.workers.sessions import read_proc, session_members, status_of, threads_of
from elastic_launch.collective_dump import COLLECTIVES, LONGEST_DUMP, REQUESTS
from elastic_launch.errors import ProtocolError
from elastic_launch.stack_dump import SIGNAL, STACKS
from elastic_launch.system.private_files import read_small

CPU_SHARE = 0.005
"""Share of a CPU above which a thread does something: gloo's threads look a hundred times a second for what to do."""

BYTES_PER_SECOND = 1024.0
"""Bytes that it reads or writes, likewise: an upload needs hardly any CPU."""

DUMP = 2.0
"""Seconds that a process has to write its stacks, and then its collectives."""

MOST_BYTES = 1 << 20

PY_SPY = 5.0
"""Seconds that py-spy has to read them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of a session have used so far.

    Attributes:
        at: when this was read, by the monotonic clock.
        cpu: seconds of CPU, by thread.
        read_or_written: bytes.
        busy: threads that wait for a CPU, for a disk or for a file system of the network.
    """

    at: float
    cpu: Mapping[int, float]
    read_or_written: int
    busy: frozenset[int]


def usage(sid: int) -> Usage:
    """Read what a session has used."""
    cpu: dict[int, float] = {}
    moved_bytes = 0
    busy: set[int] = set()
    for pid in _members(sid):
        for task in threads_of(pid):
            cpu[task] = _cpu(f"/proc/{pid}/task/{task}")
            if _state(f"/proc/{pid}/task/{task}/stat") in ("R", "D"):
                busy.add(task)
        for line in read_proc(f"/proc/{pid}/io").splitlines()[:2]:  # rchar and wchar: of system calls
            moved_bytes += int(line.split()[1])
    return Usage(time.monotonic(), cpu, moved_bytes, frozenset(busy))


def moved(before: Usage, after: Usage) -> bool:
    """Whether a session has done anything between two looks, or a thread of it waits to."""
    seconds = max(after.at - before.at, 0.001)
    # A process that has ended takes what it used with it.
    moved_bytes = abs(after.read_or_written - before.read_or_written)
    runs = any(used - before.cpu.get(task, 0.0) > CPU_SHARE * seconds for task, used in after.cpu.items())
    return runs or moved_bytes > BYTES_PER_SECOND * seconds or bool(before.busy & after.busy)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal such as SIGSTOP."""
    return _state(f"/proc/{pid}/stat") == "T"


def stopped_after(pid: int) -> float | None:
    """Return the seconds of CPU after which a process was stopped by a signal; None if it is not stopped."""
    return sum(_cpu(f"/proc/{pid}/task/{task}") for task in threads_of(pid)) if is_stopped(pid) else None


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to a process."""
    return status_of(pid).get("TracerPid", "0") != "0"


def stacks_of(pid: int, directory: Path) -> list[Stack]:
    """Return the stacks of a process' threads, that of the main thread last; none if they cannot be read.

    By py-spy if it is installed and permitted, else as :mod:`elastic_launch.stack_dump` writes them to ``directory``.
    """
    return _by_py_spy(pid) or _by_signal(pid, directory / STACKS)


def collectives_of(pid: int, directory: Path) -> bytes:
    """Return the dump of a process' flight recorder, as :mod:`elastic_launch.collective_dump` writes it.

    Empty if the process does not answer.
    """
    if is_stopped(pid) or is_traced(pid):
        return b""
    file = directory / COLLECTIVES
    with suppress(OSError, ValueError):  # the process has ended, or cannot answer
        file.unlink(missing_ok=True)
        requests = os.open(directory / REQUESTS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(requests, "wb", buffering=0) as fifo:
            fifo.write(b"?")
        deadline = time.monotonic() + DUMP
        while time.monotonic() < deadline:
            time.sleep(0.05)
            with suppress(FileNotFoundError):  # not yet; or another thread asks, too, and has removed it
                return read_small(file, 2 * LONGEST_DUMP)
    return b""


def others_in_session(sid: int) -> list[int]:
    """Return the processes of a session other than its leader."""
    return [pid for pid in _members(sid) if pid != sid]


def _by_py_spy(pid: int) -> list[Stack]:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return []
    # It does not stop the process, which has stood still for long.
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PY_SPY, check=True)
        return parse_py_spy(done.stdout)
    except (OSError, subprocess.SubprocessError, ProtocolError):
        return []  # it may not look at other processes here


def _by_signal(pid: int, file: Path) -> list[Stack]:
    if not catches(pid, SIGNAL) or is_stopped(pid) or is_traced(pid):
        return []
    with suppress(OSError, ValueError):  # the process has ended, or the file is missing
        os.truncate(file, 0)
        os.kill(pid, SIGNAL)
        deadline, text = time.monotonic() + DUMP, ""
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, read_small(file, MOST_BYTES).decode(errors="replace")
            if text and text == before:
                return parse_dump(text)
    return []


def _cpu(thread: str) -> float:
    """Return the seconds of CPU that a thread has used."""
    if found := read_proc(f"{thread}/schedstat").split():
        return int(found[0]) / 1e9
    # Kernels without this file count in ticks: proc_pid_stat(5), utime and stime.
    fields = read_proc(f"{thread}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _members(sid: int) -> list[int]:
    try:
        return session_members({sid})
    except OSError:
        return []


def _state(path: str) -> str:
    return (read_proc(path).rpartition(")")[2].split() or [""])[0]
