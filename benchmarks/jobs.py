"""Runs launchers for a benchmark: watches them, and ends them with all processes that they started.

All times are from the monotonic clock, which all processes of a Linux host share. Every wait is bounded.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

STEP_SLEEP = 0.02
RUN_ID = "benchmark"
POLL = 0.01
KILL_TIMEOUT = 15.0
CPUS = os.cpu_count() or 1
IDLE_SHARE = 0.1
IDLE_SAMPLE = 1.0
PR_SET_CHILD_SUBREAPER = 36
# Variables that would change a launch are removed, so that both launchers start alike.
DROPPED = ("PET_", "TORCH", "ELASTIC_LAUNCH_", "MASTER_", "GLOO_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE")
# Installed packages come with bytecode; with this variable, an editable install would be compiled at every start.
COMPILES_ANEW = "PYTHONDONTWRITEBYTECODE"
# torch's stores look up the names of all addresses that they connect: a slow name server would be measured, too.
COMMON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "attempts:0"}

Record = dict[str, Any]
Figures = dict[str, float]
"""The figures of one measurement, by key."""


class Missing(Exception):
    """A measurement returned no figure."""


class Stopped(Exception):
    """A signal asked the benchmark to stop."""


@dataclass
class Stop:
    """The signal that asked the benchmark to stop, if any."""

    number: int = 0

    def catch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._caught)

    def check(self) -> None:
        if self.number:
            raise Stopped(f"stopped by {signal.Signals(self.number).name}")

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        self.number = number


class Tail:
    """The complete lines of a JSON lines file that grows, or does not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._records: list[Record] = []

    def read(self) -> list[Record]:
        """All records so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._records += map(json.loads, whole.splitlines())
        return self._records


def life(record: Record) -> tuple[int, int]:
    """A process in one round: a launcher may start new processes for a new round, or keep them."""
    return record["pid"], record["round"]


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds spent on this machine or stolen by its host, and the part of them spent by this process' children."""
    numbers = map(int, Path("/proc/stat").read_text().split()[1:9])
    user, nice, system, _idle, _iowait, irq, softirq, steal = numbers
    spent = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent, ours.ru_utime + ours.ru_stime


class Others:
    """How much of the machine's CPU other programs use during measurements.

    Args:
        patience: seconds to wait for an idle moment before a measurement.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._used = self._offered = 0.0

    @property
    def share(self) -> float:
        """The fraction of the CPU used by others in all measurements so far, from 0 to 1."""
        return max(0.0, self._used / self._offered) if self._offered else 0.0

    def begin(self, stop: Stop) -> None:
        self._wait(stop)
        self._began, self._before = time.monotonic(), cpu_seconds()

    def end(self) -> None:
        """Call only when all children are reaped: their CPU time is not known before."""
        spent, ours = cpu_seconds()
        self._used += spent - self._before[0] - (ours - self._before[1])
        self._offered += (time.monotonic() - self._began) * CPUS

    def _wait(self, stop: Stop) -> None:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            stop.check()
            before = cpu_seconds()[0]
            time.sleep(IDLE_SAMPLE)
            if cpu_seconds()[0] - before < IDLE_SHARE * IDLE_SAMPLE * CPUS:
                return


class Job:
    """The launchers of one measurement, and the files in the measurement's directory; ends the launchers.

    Args:
        stop: checked while waiting.
        timeout: seconds that the whole measurement may take.
        others: notified when the measurement begins and ends.
    """

    def __init__(self, stop: Stop, timeout: float, others: Others) -> None:
        self._stop = stop
        self._timeout = timeout
        self._others = others
        self._launchers: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Job:
        self._others.begin(self._stop)
        self._temporary = tempfile.TemporaryDirectory(prefix="fault-benchmark-")
        self.directory = Path(self._temporary.name)
        self.steps = Tail(self.directory / "steps.jsonl")
        self._deadline = time.monotonic() + self._timeout
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            kill_descendants()
            self._others.end()
        finally:
            if isinstance(error, Missing):
                error.args = (f"{error}\n{self._last_words()}",)
            for _command, process in self._launchers:
                process.poll()
            self._temporary.cleanup()

    def script(self, workload: str, *options: str, sleep: float = STEP_SLEEP) -> list[str]:
        """The command of a workload that logs its steps, with further options."""
        noted = ["--file", str(self.directory / "steps.jsonl"), "--sleep", str(sleep)]
        return [str(Path(__file__).resolve().with_name(workload)), *noted, *options]

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[int, float]:
        """Start a launcher; return its pid and the time just before the start."""
        env = {name: value for name, value in os.environ.items() if not name.startswith((*DROPPED, COMPILES_ANEW))}
        env |= {**COMMON, **(environ or {}), "TMPDIR": str(self.directory)}
        with (self.directory / f"output-{len(self._launchers)}.log").open("wb") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the benchmark
            )
        self._launchers.append((shlex.join(command), process))
        return process.pid, began

    def limit(self, seconds: float) -> None:
        """Limit waiting to this many seconds from now."""
        self._timeout = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def running(self) -> bool:
        """Whether a launcher is running."""
        return any(process.poll() is None for _command, process in self._launchers)

    def sleep(self, until: float) -> None:
        """Wait until a time of the monotonic clock, or until all launchers have ended."""
        while (left := until - time.monotonic()) > 0 and self.running:
            self._stop.check()
            time.sleep(min(left, 10 * POLL))

    def step(self, rank: int, world: int, at_least: int = 1, other_than: Collection[tuple[int, int]] = ()) -> Record:
        """Wait for a rank's first step with this world size, excluding these lives."""
        wanted = f"rank {rank} of {world} to do step {at_least}" + (" after its restart" if other_than else "")
        return self._wait(
            wanted,
            self.steps,
            lambda x: (x["rank"], x["world"]) == (rank, world) and x["step"] >= at_least and life(x) not in other_than,
        )

    def until(self, wanted: str, match: Callable[[Record], bool]) -> Record:
        """Wait for the first step that matches."""
        return self._wait(wanted, self.steps, match)

    def event(self, source: str, name: str, after: float = 0.0, **fields: object) -> Record:
        """Wait for the first event of this name and with these fields in a node's log, after a given time."""
        wanted = {"event": name, **fields}
        return self._wait(
            f"{name} of {source}", self._log(source), lambda x: x["clock"] > after and wanted.items() <= x.items()
        )

    def events(self, source: str) -> list[Record]:
        """All events so far of a node of elastic-launch; none for another launcher."""
        return self._log(source).read()

    def _log(self, source: str) -> Tail:
        return Tail(self.directory / "logs" / RUN_ID / f"events-{source}.jsonl")

    def _wait(self, wanted: str, tail: Tail, match: Callable[[Record], bool]) -> Record:
        while True:
            codes = [process.poll() for _command, process in self._launchers]
            for record in tail.read():
                if match(record):
                    return record
            self._stop.check()
            if None not in codes:
                raise Missing(f"waited for {wanted}, but the launcher ended with {codes}")
            if time.monotonic() > self._deadline:
                raise Missing(f"waited for {wanted}, but {self._timeout:g} s are over")
            time.sleep(POLL)

    def _last_words(self) -> str:
        texts = []
        for number, (command, _process) in enumerate(self._launchers):
            output = (self.directory / f"output-{number}.log").read_text(errors="replace").splitlines()
            texts += [f"  {command}", *(f"    {line}" for line in output[-25:])]
        return "\n".join(texts)


def descendants(root: int) -> list[int]:
    """All descendants of a process; for this process also orphans, as it is their subreaper."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may contain anything.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """Kill and reap all descendants, and what they start meanwhile.

    Raises:
        RuntimeError: if some still exist after KILL_TIMEOUT.
    """
    deadline = time.monotonic() + KILL_TIMEOUT
    while pids := descendants(os.getpid()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} cannot be killed")
        for pid in pids:
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue
        time.sleep(POLL)


def kill(pid: int) -> None:
    signal_all([pid], signal.SIGKILL)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Signal processes; those that are gone are skipped."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def become_subreaper() -> None:
    """Make orphans among our descendants our children, so that none escapes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def program(name: str) -> str:
    """The path of a console script in the environment whose Python runs this, else the one that PATH has."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or str(beside)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
