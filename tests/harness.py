"""Real launches for tests: agents as processes, bounded waits, nothing left behind."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forked import Forks, Process, Server

SCRIPTS = Path(__file__).parent / "scripts"
LOOP = str(SCRIPTS / "loop.py")
STEPS = str(SCRIPTS / "steps.py")
MEETING = str(SCRIPTS / "meeting.py")

LEAN = ("--no-preload", "torch._dynamo,torch.distributed.algorithms.join,torch.distributed.tensor,torch.nn.parallel")
"""Flags for scripts that only need what ``import torch`` loads: they skip a third of the agent's imports."""

SHORT_STARTS = "start_wait=600"
"""Workers wait for others that start. Else the rounds of a test would depend on how loaded the machine is."""

BUSIEST = 5.0
"""What :func:`busy` returns at most: a test that fails must end, however slow the machine is."""


def busy() -> float:
    """Return how many times as long as on a quiet machine a computation takes now, from 1 to :data:`BUSIEST`."""
    began, before = time.monotonic(), time.thread_time()
    wall = used = 0.0
    while used < 0.1 and wall < 0.1 * BUSIEST:
        wall, used = time.monotonic() - began, time.thread_time() - before
    return min(max(1.0, wall / max(used, 1e-9)), BUSIEST)


BUSY = busy()
"""The same when the tests began."""

LOADED = 3.0
"""Factor for timeouts since tests run in parallel: none measures time, and a wait that succeeds early costs nothing."""

SLOWNESS = LOADED * BUSY
"""Factor for timeouts with what else the machine does."""

_INTERPRETERS = re.compile("PYTHON|LD_|TORCH_|OMP_|PATH$")
"""Variables that are read when an interpreter starts, or when torch is imported."""

T = TypeVar("T")


def make_unwritable(directory: Path) -> None:
    """Move a directory away, and leave a link in its place through which nothing can be made, also by the superuser."""
    directory.rename(directory.with_name(f"{directory.name}-moved"))
    directory.symlink_to("/sys/elastic-launch-test")


def wait_for(what: str, probe: Callable[[], T], timeout: float = 30.0) -> T:
    """Return the first true value of probe; on timeout, fail with a message that names what was waited for.

    Args:
        timeout: seconds that are ample on a quiet machine.
    """
    allowed, since = timeout * SLOWNESS, time.monotonic()
    while True:
        began = time.monotonic()
        value = probe()
        if value:
            return value
        if time.monotonic() > since + allowed:
            # The machine may be busier than when the tests began.
            allowed = max(allowed, timeout * LOADED * busy())
            if time.monotonic() > since + allowed:
                raise AssertionError(f"not seen within {allowed:g} s: {what}")
        # Some probes start a program: the wait is not to take a whole processor.
        time.sleep(min(max(0.02, 3 * (time.monotonic() - began)), 0.5))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete JSON lines of a file; another process may be in the middle of writing one.

    Tests poll files that grow, so only new lines are parsed.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    known, lines = _read.get(path, (b"", []))
    if not data.startswith(known):
        known, lines = b"", []
    whole = data[: data.rfind(b"\n") + 1]
    lines = [*lines, *map(json.loads, whole[len(known) :].splitlines())]
    _read[path] = whole, lines
    return [dict(line) for line in lines]


_read: dict[Path, tuple[bytes, list[dict[str, Any]]]] = {}
"""What has been read of each file, and its lines."""


def trains(notes: Path, world: int, after: int, outputs: Callable[[], str]) -> int:
    """Wait until the last two steps of ``changes.py`` were done in a world of that size, in a later round; return it.

    After one step, a new worker may not have completed its first, so that a fault of it would not be charged.

    Args:
        notes: the script's directory.
        outputs: what to show if that does not come.
    """

    def probe() -> int:
        done = {(step["round"], step["world"]) for step in read_lines(notes / "steps.jsonl")[-2:]}
        number, size = done.pop() if len(done) == 1 else (0, 0)
        return int(number) if size == world and number > after else 0

    try:
        return wait_for(f"two steps in a world of {world} after round {after}", probe, 60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{outputs()}") from None


def free_port() -> int:
    """Return a port with no listener, which stays free until it is used.

    It is below the kernel's ephemeral ports, in a range of this process' own.
    """
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the ports are a cycle")


_first_port = 10_000 + os.getpid() % 40 * 500
_ports = itertools.cycle(range(_first_port, _first_port + 500))


def asked(url: str) -> tuple[int, str]:
    """Return the status and text of an HTTP server's response."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def name_of(pid: int) -> str:
    """Return the name of the program that a process runs; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """Return the letter of a process' state, such as T if it is stopped; X if there is none (proc_pid_stat(5))."""
    return _state(Path(f"/proc/{pid}/stat"))


_forks: list[Forks] = []

_NAME_OF_FORKS = "TESTS_FORKS"


def share_forks() -> None:
    """Have the processes that this one starts share the process that forks agents."""
    _server().start_when_needed()


def _server() -> Server:
    name = os.environ[_NAME_OF_FORKS] = f"elastic-launch-tests-{os.getpid()}"
    server = Server(name)
    atexit.register(server.close)
    return server


def forks() -> Forks:
    """Return the connection to the process that forks agents; there is one."""
    if not _forks:
        if _NAME_OF_FORKS not in os.environ:
            _server().start()
        _forks.append(Forks(os.environ[_NAME_OF_FORKS]))
        atexit.register(_forks[0].close)
    return _forks[0]


def run_script(*command: str, timeout: float = 100.0, env: dict[str, str] | None = None, code: int = 0) -> str:
    """Run a script without a launcher; return what it printed.

    Its process is forked from one that has imported torch, see :mod:`forked`.

    Args:
        command: the script, or ``-m`` and a module, and its arguments.
        timeout: seconds that are ample on a quiet machine.
        code: the exit code that it must have.
    """
    with tempfile.TemporaryFile() as output:
        process = forks().start(command, output.fileno(), {**os.environ, **(env or {})}, None, script=True)
        try:
            ended = process.wait(timeout * SLOWNESS)
        finally:
            process.kill()
        output.seek(0)
        printed = output.read().decode()
    assert ended == code, printed
    return printed


class Agent:
    """One ``elastic-launch`` process: executed, or forked if the program is ``elastic-launch`` itself.

    See :mod:`forked` for the differences; the mark ``executed`` on a test has all of its agents executed.

    Args:
        script: whether a forked process runs a script, which comes first in ``arguments``, instead of an agent.
    """

    def __init__(
        self,
        arguments: list[str],
        directory: Path,
        name: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
        program: Sequence[str] = ("-m", "elastic_launch"),
        forked: bool = False,
        script: bool = False,
    ) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | Process
        self.output_path = directory / f"{name}.{time.monotonic_ns()}.out"
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        with self.output_path.open("wb") as output:
            if forked:
                where = network_of(prefix), group_of(prefix)
                self.process = forks().start(arguments, output.fileno(), environ, cwd, *where, script=script)
                return
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def says(self, text: str, timeout: float = 30.0, times: int = 1) -> None:
        """Wait until the text has been printed this many times."""

        def probe() -> bool:
            return self.output.count(text) >= times

        try:
            wait_for(f"{text!r} from {self.name}", probe, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n{self.output}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> list[int]:
        """Stop the whole node: agent, guard, workers; return their pids.

        A process is stopped before its children: one that waits in vfork(2) cannot be stopped while its child is
        stopped.
        """
        standing: list[int] = []
        while ahead := [pid for pid in tree(self.process.pid) if pid not in standing]:
            with contextlib.suppress(ProcessLookupError):
                freeze(ahead[0])
            standing.append(ahead[0])
        return standing

    def thaw(self, pids: list[int]) -> None:
        """Resume a frozen node, its workers first."""
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def wait(self, timeout: float = 30.0) -> int:
        """Return the exit code; see :func:`wait_for`."""
        timeout *= SLOWNESS
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not exit within {timeout:g} s; it printed:\n{self.output}") from None


def freeze(*pids: int) -> None:
    """Stop processes, and return once they have stopped: the kernel lets their threads run on for a moment."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for(f"{pids} to stand", lambda: all(map(_stands, pids)))


def _stands(pid: int) -> bool:
    states = [_state(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state in "TtZX" for state in states)


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def network_of(prefix: Sequence[str]) -> str:
    """Return the network namespace in which a prefix runs a command; "" if the prefix does anything else."""
    return prefix[3] if len(prefix) == 4 and (*prefix[:3],) == ("ip", "netns", "exec") else ""


ENTER_GROUP = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"')
"""The start of a prefix that runs a command in a control group, whose path follows."""


def group_of(prefix: Sequence[str]) -> str:
    """Return the control group in which a prefix runs a command; "" if the prefix does anything else."""
    return prefix[3] if len(prefix) == 4 and (*prefix[:3],) == ENTER_GROUP else ""


class Job:
    """A run of the worker script ``loop.py`` (or another command) on any number of agents on this host.

    Args:
        executed: whether agents are executed from the command line; False: forked where that makes no difference.
    """

    def __init__(self, directory: Path, *, executed: bool = False) -> None:
        self.directory = directory
        self.work = directory / "work"
        self.work.mkdir()
        self.logs = directory / "logs"
        self.agents: list[Agent] = []
        self.port = free_port()
        self.executed = executed

    def launch(
        self,
        *flags: str,
        name: str = "agent",
        command: list[str] | None = None,
        script_flags: list[str] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
        executed: bool | None = None,
    ) -> Agent:
        """Start an agent; by default its workers run ``loop.py``.

        Args:
            prefix: the command that runs it; an agent is still forked if it only enters a network namespace or a
                control group.
            executed: whether to execute it instead of forking it; None: as the job says, and also if the environment
                has variables that interpreters and imports read.
        """
        if command is None:
            command = [LOOP, str(self.work), *(script_flags or [])]
        if executed is None:
            beside = bool(prefix) and not network_of(prefix) and not group_of(prefix)
            executed = self.executed or beside or any(map(_INTERPRETERS.match, env or {}))
        env = {"PET_RDZV_CONF": SHORT_STARTS, **(env or {})}
        lean = LEAN if executed and {STEPS, MEETING} & {*command} else ()
        arguments = ["--log-dir", str(self.logs), *lean, *flags, *command]
        agent = Agent(arguments, self.directory, name, env, cwd, prefix, forked=not executed)
        self.agents.append(agent)
        return agent

    def program(self, command: list[str], name: str = "program") -> Agent:
        """Start a Python program that is itself an agent."""
        agent = Agent(command, self.directory, name, program=())
        self.agents.append(agent)
        return agent

    def node(
        self, name: str, *flags: str, nnodes: str = "1:4", nproc: int = 1, endpoint: str = "", **options: Any
    ) -> Agent:
        """Start an agent of a run of several nodes, by default at this job's endpoint on loopback."""
        endpoint = endpoint or f"127.0.0.1:{self.port}"
        several = ["--nnodes", nnodes, "--nproc", str(nproc), "--rdzv-endpoint", endpoint, "--node-id", name]
        return self.launch(*several, *flags, name=name, **options)

    def started(self) -> list[dict[str, Any]]:
        """The records that workers wrote at their start, in order."""
        return read_lines(self.work / "started.jsonl")

    def world(self, size: int, *, after: int = 0, timeout: float = 40.0) -> list[dict[str, Any]]:
        """Wait until a complete round of a world size runs, later than ``after``; return its workers in rank order."""

        def probe() -> list[dict[str, Any]]:
            rounds: dict[int, list[dict[str, Any]]] = {}
            for worker in self.started():
                if "ELASTIC_LAUNCH_AHEAD" in worker["env"]:
                    continue  # it had no place yet
                number = int(worker["env"]["ELASTIC_LAUNCH_ROUND"])
                if number > after and int(worker["env"]["WORLD_SIZE"]) == size:
                    rounds.setdefault(number, []).append(worker)
            latest = rounds[max(rounds)] if rounds else []
            return sorted(latest, key=lambda x: int(x["env"]["RANK"])) if len(latest) == size else []

        try:
            return wait_for(f"a round of world size {size} after round {after}", probe, timeout)
        except AssertionError as error:
            outputs = "\n".join(f"--- {agent.name}\n{agent.output}" for agent in self.agents)
            raise AssertionError(f"{error}\n{outputs}") from None

    def noted(self, file: str, node: str | None = None, number: int | None = None) -> list[dict[str, Any]]:
        """The records that workers of ``steps.py`` wrote to a file, in order; of one node, of one round."""
        found = read_lines(self.work / file)
        return [x for x in found if node in (None, x["node"]) and number in (None, x["round"])]

    def noted_steps(self) -> list[dict[str, Any]]:
        """The records that the worker of ``own_loop.py`` wrote about each step."""
        return read_lines(self.work / "steps.jsonl")

    def trained(self, size: int, *, after: int = 0, timeout: float = 60.0) -> int:
        """Wait until workers of ``steps.py`` have done a step in a world of that size; return its round."""

        def probe() -> int:
            steps = self.noted("steps.jsonl")
            return max((x["round"] for x in steps if x["world"] == size and x["round"] > after), default=0)

        try:
            return wait_for(f"a step in a world of {size} after round {after}", probe, timeout)
        except AssertionError as error:
            outputs = "\n".join(f"--- {agent.name}\n{agent.output}" for agent in self.agents)
            raise AssertionError(f"{error}\n{outputs}") from None

    def assert_nothing_done(self, node: str, number: int, since: float) -> None:
        """A node's workers of a round did nothing that counts after a time when the others had begun the next round."""
        steps = [x for x in self.noted("steps.jsonl", node, number) if x["clock"] > since]
        assert len(steps) <= 1, "more than the step in flight"
        assert not [x for x in self.noted("commits.jsonl", node, number) if x["clock"] > since]

    def first_step(self, number: int) -> float:
        """When the first step of a round was finished."""
        return float(self.noted("steps.jsonl", number=number)[0]["clock"])

    def tell(self, name: str, text: str = "") -> None:
        """Create a file that signals something to the workers."""
        path = self.work / name
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def finish(self) -> None:
        self.tell("finish")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """All events of all nodes, in the order of this host's clock."""
        found = []
        for path in self.logged("events-*.jsonl"):
            found += read_lines(path)
        found.sort(key=lambda event: event["clock"])
        return [event for event in found if name in (None, event["event"])]

    def until(self, moment: float, name: str) -> list[str]:
        """The nodes of the events of a name before a time, such as one before which silence loses no node again."""
        return [event["node"] for event in self.events(name) if event["clock"] < moment]

    def event(self, name: str) -> dict[str, Any]:
        """The first event of this name; it is written a moment after the line that tells of it."""
        return wait_for(f"an event {name}", lambda: self.events(name))[0]

    def logged(self, pattern: str) -> list[Path]:
        """Files of all runs that match a pattern under a run's directory, excluding the link to the newest run."""
        return [path for run in self.logs.glob("*") if not run.is_symlink() for path in run.glob(pattern)]

    def close(self) -> list[int]:
        """End everything; return the pids of workers and grandchildren that outlived their agents."""
        running = [agent for agent in self.agents if agent.process.poll() is None]
        for agent in running:
            agent.process.kill()
            agent.process.wait()
        pids = [pid for worker in self.started() for pid in (worker["pid"], *worker["children"])]
        deadline = time.monotonic() + 5.0 * SLOWNESS
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [pid for pid in pids if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left


def now() -> float:
    """The time of events and of the notes of ``steps.py``."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def round_of(worker: dict[str, Any]) -> int:
    return int(worker["env"]["ELASTIC_LAUNCH_ROUND"])


def job_in(directory: Path, *, executed: bool = False) -> Iterator[Job]:
    """A job whose workers must not outlive it."""
    job = Job(directory, executed=executed)
    try:
        yield job
    finally:
        left = job.close()
    assert not left, f"processes {left} outlived their agents"
