"""How long launches and restarts take: elastic-launch and torchrun in turn, on one machine, in one run.

Prints medians and ratios as a Markdown table; asserts no figure. Every time is taken by the monotonic clock, which
all processes of a Linux host share. Every wait is bounded, and whatever a measurement started is killed at its end.

    python benchmarks/launch.py --runs 5 --json launch.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

WORKLOAD = Path(__file__).resolve().parent / "workload.py"
STEP_SLEEP = 0.02
STEPS_BEFORE_KILL = 10
POLL = 0.01
KILL_TIMEOUT = 15.0
CPUS = os.cpu_count() or 1
IDLE_SHARE = 0.1
IDLE_SAMPLE = 1.0
PR_SET_CHILD_SUBREAPER = 36
# Of the environment, what would change a launch; and what makes both sides' launches alike.
DROPPED = ("PET_", "TORCH", "ELASTIC_LAUNCH_", "MASTER_", "GLOO_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE")
# Installed packages have their bytecode; with this, an editable install would be compiled anew at every start.
COMPILES_ANEW = "PYTHONDONTWRITEBYTECODE"
COMMON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

Record = dict[str, Any]
Figures = tuple[float, ...]


class Missing(Exception):
    """A measurement gave no figure."""


class Stopped(Exception):
    """A signal asked the benchmark to stop."""


@dataclass
class Stop:
    """Which signal asked us to stop, if one did."""

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
    """The whole lines of a file of JSON lines that grows, or is not there yet."""

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


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds spent on this machine or stolen from it by its host, and those of them that our children had."""
    numbers = map(int, Path("/proc/stat").read_text().split()[1:9])
    user, nice, system, _idle, _iowait, irq, softirq, steal = numbers
    spent = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent, ours.ru_utime + ours.ru_stime


class Others:
    """What others use of the machine's CPU while measurements run.

    Args:
        patience: seconds to wait before a measurement until they use little.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._used = self._offered = 0.0

    @property
    def share(self) -> float:
        """Their part of the CPU in all measurements so far, from 0 to 1."""
        return max(0.0, self._used / self._offered) if self._offered else 0.0

    def begin(self, stop: Stop) -> None:
        self._wait(stop)
        self._began, self._before = time.monotonic(), cpu_seconds()

    def end(self) -> None:
        """Only when all children are reaped, whose part is not known before."""
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
    """The launchers of one measurement, what they left in the measurement's directory, and their end.

    Args:
        stop: looked at while waiting.
        timeout: seconds that the whole measurement may take.
        others: told when the measurement begins and ends.
    """

    def __init__(self, stop: Stop, timeout: float, others: Others) -> None:
        self._stop = stop
        self._timeout = timeout
        self._others = others
        self._launchers: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Job:
        self._others.begin(self._stop)
        self._temporary = tempfile.TemporaryDirectory(prefix="launch-benchmark-")
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

    def script(self) -> list[str]:
        return [str(WORKLOAD), "--file", str(self.directory / "steps.jsonl"), "--sleep", str(STEP_SLEEP)]

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[int, float]:
        """Start a launcher; return its pid and the moment just before."""
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
                start_new_session=True,  # Ctrl-C reaches the benchmark alone
            )
        self._launchers.append((shlex.join(command), process))
        return process.pid, began

    def step(self, rank: int, world: int, at_least: int = 1, other_than: int = 0) -> Record:
        """Wait for a rank's first step with this world size, not by the process other_than; 0: its script's begin."""
        wanted = f"rank {rank} of {world} to do step {at_least}" + (" after its restart" if other_than else "")
        return self._wait(
            wanted,
            self.steps,
            lambda x: (x["rank"], x["world"]) == (rank, world) and x["step"] >= at_least and x["pid"] != other_than,
        )

    def event(self, source: str, name: str, after: float = 0.0, **fields: object) -> Record:
        """Wait for the first event of this name, with these fields, in a node's log, after a moment."""
        log = Tail(self.directory / "logs" / "benchmark" / f"events-{source}.jsonl")
        wanted = {"event": name, **fields}
        return self._wait(f"{name} of {source}", log, lambda x: x["clock"] > after and wanted.items() <= x.items())

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


def descendants() -> list[int]:
    """Every process below this one, orphans included, as this one is their subreaper."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """Kill and reap all of them, and what they start meanwhile.

    Raises:
        RuntimeError: if some are still there after KILL_TIMEOUT.
    """
    deadline = time.monotonic() + KILL_TIMEOUT
    while pids := descendants():
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
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def become_subreaper() -> None:
    """Have the orphans among our descendants handed to us, so that none is lost sight of."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


# What is compared.


def program(name: str) -> str:
    """A console script of the environment whose Python runs this."""
    return str(Path(sys.executable).with_name(name))


def start_ours(job: Job) -> float:
    options = ["--standalone", "--nproc", "2", "--log-dir", str(job.directory / "logs")]
    return job.start([program("elastic-launch"), *options, *job.script()])[1]


def start_torchrun(job: Job) -> float:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
    # Without it, torch 2.13 often hangs after a restart.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return job.start([program("torchrun"), *options, *job.script()], environ)[1]


def start_node(job: Job, node: str, nnodes: str, port: int, *, host: bool, nproc: int = 1) -> tuple[int, float]:
    """Start one node of ours; return the agent's pid and the moment just before."""
    options = ["--nnodes", nnodes, "--nproc", str(nproc), "--node-id", node, "--rdzv-id", "benchmark"]
    options += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", f"is_host={int(host)}"]
    options += ["--log-dir", str(job.directory / "logs")]
    return job.start([program("elastic-launch"), *options, *job.script()])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


LAUNCHERS: dict[str, Callable[[Job], float]] = {"ours": start_ours, "torchrun": start_torchrun}

NewJob = Callable[[], Job]


def measure_launch(new_job: NewJob, launcher: str) -> Figures:
    """From just before the launcher's start to the begin of rank 0's script, and to its first step."""
    with new_job() as job:
        began = LAUNCHERS[launcher](job)
        return job.step(0, 2, 0)["clock"] - began, job.step(0, 2)["clock"] - began


def measure_worker_killed(new_job: NewJob, launcher: str) -> Figures:
    """From the SIGKILL of rank 1 to the begin of the next rank 0's script, and to its first step."""
    with new_job() as job:
        LAUNCHERS[launcher](job)
        survivor = job.step(0, 2, STEPS_BEFORE_KILL)["pid"]
        victim = job.step(1, 2, STEPS_BEFORE_KILL)["pid"]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        began = job.step(0, 2, 0, other_than=survivor)["clock"]
        return began - killed, job.step(0, 2, other_than=survivor)["clock"] - killed


def measure_node_killed(new_job: NewJob, _: str) -> Figures:
    """From the SIGKILL of an agent and its worker to the survivor's new round, and to its next step."""
    with new_job() as job:
        port = free_port()
        start_node(job, "host", "1:2", port, host=True)
        agent, _began = start_node(job, "other", "1:2", port, host=False)
        for rank in (0, 1):
            job.step(rank, 2, STEPS_BEFORE_KILL)
        worker = job.event("other", "worker_started")["pid"]
        killed = time.monotonic()
        kill(agent)
        kill(worker)
        formed = job.event("host", "round_formed", after=killed)["clock"]
        return formed - killed, job.step(0, 1)["clock"] - killed


def launch_one_node(new_job: NewJob, nproc: int) -> float:
    """From just before the start of one node of 1:1 to the first step."""
    with new_job() as job:
        _pid, began = start_node(job, "host", "1:1", free_port(), host=True, nproc=nproc)
        return float(job.step(0, nproc)["clock"]) - began


def measure_two_nodes(new_job: NewJob, _: str) -> Figures:
    """What two nodes of 1:4 with a worker each need more than one of 1:1, with one worker and with as many workers."""
    one_worker, two_workers = launch_one_node(new_job, 1), launch_one_node(new_job, 2)
    with new_job() as job:
        port = free_port()
        _pid, began = start_node(job, "host", "1:4", port, host=True)
        start_node(job, "other", "1:4", port, host=False)
        two_nodes = job.step(0, 2)["clock"] - began
        joined = job.event("host", "node_joined", node="other")["clock"]
        formed = job.event("host", "round_formed", world_size=2)["clock"]
    return one_worker, two_workers, two_nodes, two_nodes - one_worker, two_nodes - two_workers, formed - joined


@dataclass(frozen=True)
class Scenario:
    """One thing to measure.

    Attributes:
        measure: does it once, for one of the launchers.
        rows: for each of its figures, a title and the goal, or an empty text.
    """

    measure: Callable[[NewJob, str], Figures]
    launchers: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]


SCENARIOS = {
    "launch": Scenario(
        measure_launch,
        ("ours", "torchrun"),
        (
            ("launch -> script begins (1 node, 2 workers)", ""),
            ("launch -> first step (1 node, 2 workers)", "no slower than torchrun"),
        ),
    ),
    "worker-killed": Scenario(
        measure_worker_killed,
        ("ours", "torchrun"),
        (
            ("worker killed -> script begins again (1 node, 2 workers)", ""),
            ("worker killed -> next step (1 node, 2 workers)", "no slower than torchrun"),
        ),
    ),
    "node-killed": Scenario(
        measure_node_killed,
        ("ours",),
        (
            ("node killed -> survivor's new round formed (2 nodes of 1:2)", "< 0.3 s"),
            ("node killed -> survivor's next step", ""),
        ),
    ),
    "two-nodes": Scenario(
        measure_two_nodes,
        ("ours",),
        (
            ("launch -> first step: one node of 1:1, 1 worker", ""),
            ("launch -> first step: one node of 1:1, 2 workers", ""),
            ("launch -> first step: two nodes of 1:4, 1 worker each", ""),
            ("two nodes need more than one with 1 worker", "<= 2.5 s"),
            ("two nodes need more than one with 2 workers", ""),
            ("second node joined -> first round formed", ""),
        ),
    ),
}


# From measurements to a report.


@dataclass
class Result:
    """What was measured of one scenario: by launcher, the figures of its runs and the number of runs without."""

    figures: dict[str, list[Figures]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attempt(name: str, launcher: str, new_job: NewJob, result: Result) -> None:
    """Measure once and note the figures, or that there are none."""
    try:
        figures = SCENARIOS[name].measure(new_job, launcher)
    except Missing as error:
        result.failed[launcher] = result.failed.get(launcher, 0) + 1
        say(f"{name}, {launcher}: no figure: {error}")
        return
    result.figures.setdefault(launcher, []).append(figures)
    say(f"{name}, {launcher}: " + ", ".join(f"{x:.3f} s" for x in figures))


def measure_all(results: Mapping[str, Result], runs: int, new_job: NewJob) -> None:
    """Measure each scenario so many times, the launchers in turn; all once before any twice, as machines have moods."""
    say("not counted, so that files are in memory:")
    for launcher in sorted({launcher for name in results for launcher in SCENARIOS[name].launchers}):
        attempt("launch", launcher, new_job, Result())
    for number in range(1, runs + 1):
        say(f"run {number} of {runs}:")
        for name, result in results.items():
            for launcher in SCENARIOS[name].launchers:
                attempt(name, launcher, new_job, result)


def column(result: Result, launcher: str, row: int) -> list[float]:
    return [figures[row] for figures in result.figures.get(launcher, [])]


def cell(result: Result, launcher: str, row: int) -> str:
    """Median (least..greatest), and how many runs gave nothing."""
    values = column(result, launcher, row)
    parts = [f"{statistics.median(values):.2f} s ({min(values):.2f}..{max(values):.2f})"] if values else []
    if failed := result.failed.get(launcher):
        parts.append(f"{failed} of {failed + len(values)} runs without a figure")
    return ", ".join(parts) or "-"


def table(results: Mapping[str, Result]) -> str:
    """A Markdown table of all figures."""
    lines = ["| scenario | ours | torchrun | ours / torchrun | goal |", "|---|---|---|---|---|"]
    for name, result in results.items():
        for row, (title, goal) in enumerate(SCENARIOS[name].rows):
            ours, theirs = column(result, "ours", row), column(result, "torchrun", row)
            ratio = f"{statistics.median(ours) / statistics.median(theirs):.2f}" if ours and theirs else "-"
            cells = [title, cell(result, "ours", row), cell(result, "torchrun", row), ratio, goal or "-"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def circumstances(results: Mapping[str, Result], load: float, others: float) -> Record:
    """Under which the figures hold."""
    runs = [len(figures) for result in results.values() for figures in result.figures.values()]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {name: version(name) for name in ("elastic-launch", "torch")}
        | {"python": platform.python_version()},
        "cores": len(os.sched_getaffinity(0)),
        "runs": min(runs, default=0),
        "load_before": round(load, 2),
        "others_cpu": round(others, 3),
    }


def report(about: Record, results: Mapping[str, Result]) -> Record:
    """What --json writes: all figures, not only their medians."""
    rows = [
        {
            "scenario": name,
            "title": title,
            "goal": goal,
            "seconds": {launcher: column(result, launcher, row) for launcher in SCENARIOS[name].launchers},
            "without_figure": result.failed,
        }
        for name, result in results.items()
        for row, (title, goal) in enumerate(SCENARIOS[name].rows)
    ]
    return {**about, "rows": rows}


def headline(about: Record) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    load = f"load before {about['load_before']:.2f}, {about['others_cpu']:.0%} of the CPU used by others meanwhile"
    return f"{about['date']}: {versions}, {about['cores']} cores, CPU, gloo; median of {about['runs']} runs; {load}"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time launches and restarts of elastic-launch and torchrun in turn. No figure is asserted: "
        "the exit code is 1 only if a measurement gave none."
    )
    parser.add_argument("--runs", type=positive, default=5, help="of each scenario and launcher [5]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="measure this one; may be repeated")
    parser.add_argument("--timeout", type=positive, default=60, help="seconds for one measurement [60]")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help=f"seconds to wait, before each measurement, until others use less than {IDLE_SHARE:.0%}% of the CPU [0]",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    load, others, stop = os.getloadavg()[0], Others(args.patience), Stop()
    results = {name: Result() for name in args.only or SCENARIOS}
    stop.catch()
    become_subreaper()
    try:
        measure_all(results, args.runs, lambda: Job(stop, args.timeout, others))
    except Stopped as stopped:
        say(f"{stopped}; what was measured until then:")
    about = circumstances(results, load, others.share)
    print(f"{headline(about)}\n\n{table(results)}")
    if args.json:
        args.json.write_text(json.dumps(report(about, results), indent=2) + "\n")
    if stop.number:
        return 128 + stop.number
    return 1 if any(result.failed for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
