"""A fixed world: this node's part starts at once, without a rendezvous, and ends as a whole.

Nodes do not know each other: waiting is left to the workers' own store at the master's address.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_agents import reporting
from elastic_agents.console import Consoles, configure_logging
from elastic_agents.inbox import REPEAT, Inbox, SignalCaught, dropping, signals_to
from elastic_agents.workers.guard import Guard
from elastic_agents.workers.processes import ExecProcesses, StartRequest
from elastic_agents.workers.sessions import kill_sessions, session_members
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.torch_options import STOP_SIGNALS, untested_torch
from elastic_launch.error_file import read_error_file
from elastic_launch.errors import ExitCode, UsageError
from elastic_launch.events.sentences import ending
from elastic_launch.rendezvous.leader.verdict import own_code
from elastic_launch.system.descriptors import raise_limit
from elastic_launch.system.private_files import make_private

_log = logging.getLogger("elastic_launch.agent")

_OTHERS = re.compile(r"(TORCHELASTIC|ELASTIC_LAUNCH|ROLE|GROUP)_")
"""Variables that another launcher has set for its workers: they do not apply to these."""

SHOWN_LINES = 50
"""Maximum number of lines of a crashed rank's file that are shown at the end."""

SHOWN_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Rank:
    """Where one worker's files are.

    Attributes:
        stdout, stderr: files for its output; None: the console.
        error_file: file for its exception, if it uses torch's ``@record``.
    """

    stdout: Path | None
    stderr: Path | None
    error_file: Path


@dataclass(frozen=True, slots=True)
class StaticWorld:
    """This node's part of a world whose size and ranks are given.

    Attributes:
        argv: what every worker executes, without the script's arguments.
        arguments: the script's arguments, in which ``~`` and variables are expanded for each rank.
        ranks: files of this node's workers, in rank order.
        grace: seconds between SIGTERM and SIGKILL.
        verbose: whether to report successes, too.
        log_format: format of the launcher's own lines, one of :data:`elastic_launch.config.output.LOG_FORMATS`.
    """

    argv: tuple[str, ...]
    arguments: tuple[str, ...]
    ranks: tuple[Rank, ...]
    world_size: int
    base_rank: int
    node_rank: int
    master_addr: str
    master_port: int
    run_directory: Path
    grace: float
    verbose: bool = False
    log_format: str = "time"

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return a worker's environment: environ plus Composer's variables."""
        env = {name: value for name, value in environ.items() if not _OTHERS.match(name)}
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        return env | {
            "RANK": str(self.base_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "PYTHONUNBUFFERED": "1",
            "COMPOSER_RUN_DIRECTORY": str(self.run_directory),
            "TORCHELASTIC_ERROR_FILE": str(self.ranks[local_rank].error_file),
        }


def expanded(text: str, env: Mapping[str, str]) -> str:
    """Expand a leading ``~``, and ``$NAME`` and ``${NAME}`` from env; unknown variables stay as they are."""
    return re.sub(
        r"\$(?:(\w+)|\{([^{}]*)\})", lambda m: env.get(m[1] or m[2], m[0]), os.path.expanduser(text), flags=re.ASCII
    )


@dataclass(frozen=True, slots=True)
class _Exited:
    """A worker process was reaped."""

    pid: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class _GraceOver:
    pass


@dataclass(slots=True)
class _Worker:
    local_rank: int
    rank: int
    pid: int
    files: Rank
    asked: bool = False  # whether it was asked to end
    exit_code: int | None = None

    @property
    def crashed(self) -> bool:
        """Whether it failed by itself: not as it was asked to end, and not by the kill that followed."""
        if not self.exit_code:
            return False
        return not self.asked or (self.exit_code > 0 and self.exit_code != ExitCode.TERMINATED)


def run(world: StaticWorld) -> int:
    """Run this node's workers to their end and return the exit code.

    The code is 0 if all workers ended with 0; else that of the first that failed, see :mod:`elastic_launch.errors`;
    128 + N if signal N has stopped this process.

    Raises:
        UsageError: if an output file cannot be opened.
    """
    with closing(Consoles()) as consoles:
        configure_logging(world.log_format, node=str(world.node_rank), consoles=consoles)
        logging.getLogger("elastic_launch").setLevel(logging.INFO if world.verbose else logging.WARNING)
        if line := untested_torch():
            _log.warning("%s", line)
        return _run(world)


def _run(world: StaticWorld) -> int:
    raise_limit()
    inbox: Inbox[object] = Inbox(MonotonicClock())
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    with signals_to(inbox, [number for number in STOP_SIGNALS if number not in ignored]), dropping(ignored):
        return _Agent(world, inbox).run()


class _Agent:
    def __init__(self, world: StaticWorld, inbox: Inbox[object]) -> None:
        self._world = world
        self._inbox = inbox
        self._workers: dict[int, _Worker] = {}  # by pid
        self._sessions: set[int] = set()
        self._first: _Worker | None = None  # the first that failed
        self._signal = 0
        self._signalled: float | None = None  # when the first of several signals that count as one came
        self._stopping = False
        self._failed_start = ""
        # Sizes from an earlier run, if its files are appended to.
        self._before: dict[Path, int] = {}

    def run(self) -> int:
        with ExitStack() as stack:
            outputs = list(self._outputs(stack))
            self._guard = Guard()
            stack.callback(self._guard.close)
            self._processes = ExecProcesses(lambda pid, code: self._inbox.put(_Exited(pid, code)))
            stack.callback(self._processes.close)
            stack.callback(self._end_sessions)
            self._start(outputs)
            while any(worker.exit_code is None for worker in self._workers.values()):
                self._handle(self._inbox.take())
            if not self._failed_start and not any(worker.exit_code for worker in self._workers.values()):
                self._leave_children()
        return self._tell()

    def _outputs(self, stack: ExitStack) -> Iterator[tuple[int, int]]:
        """Open all workers' files before the first worker starts."""
        for rank in self._world.ranks:
            for path in (rank.error_file, rank.stdout, rank.stderr):
                with _writing(path):
                    if path is not None:
                        make_private(path.parent)
            with _writing(rank.error_file):
                rank.error_file.unlink(missing_ok=True)
            yield self._open(rank.stdout, 1, stack), self._open(rank.stderr, 2, stack)

    def _open(self, path: Path | None, console: int, stack: ExitStack) -> int:
        if path is None:
            return console
        with _writing(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        self._before[path] = os.fstat(descriptor).st_size
        return descriptor

    def _start(self, outputs: list[tuple[int, int]]) -> None:
        world = self._world
        last = world.base_rank + len(world.ranks) - 1
        _log.info("ranks %d to %d of %d start on node %d", world.base_rank, last, world.world_size, world.node_rank)
        _log.info("they meet at %s:%d; run directory %s", world.master_addr, world.master_port, world.run_directory)
        for local_rank, (out, err) in enumerate(outputs):
            rank, env = world.base_rank + local_rank, world.environment(local_rank, os.environ)
            argv = [*world.argv, *(expanded(text, env) for text in world.arguments)]
            try:
                pid = self._processes.start(StartRequest(argv, env, out, err))
            except OSError as error:
                self._failed_start = f"rank {rank} cannot be started: {error}"
                self._stop(self._failed_start)
                return
            self._guard.add(pid)
            self._sessions.add(pid)
            self._workers[pid] = _Worker(local_rank, rank, pid, world.ranks[local_rank])
            _log.info("rank %d (local rank %d, pid %d) runs %s", rank, local_rank, pid, shlex.join(argv))

    def _handle(self, item: object) -> None:
        match item:
            case _Exited(pid=pid, exit_code=code) if pid in self._workers:
                self._reap(self._workers[pid], code)
            case SignalCaught(at=float(at)) if self._signalled is not None and at - self._signalled < REPEAT:
                return
            case SignalCaught(number=number) if self._stopping:
                self._signal = self._signal or number
                self._kill("a second signal")
            case SignalCaught(number=number, at=at):
                self._signal, self._signalled = number, at
                self._stop(signal.Signals(number).name)
            case _GraceOver():
                self._kill(f"still there after {self._world.grace:g} s")

    def _reap(self, worker: _Worker, code: int) -> None:
        worker.exit_code = code
        if code == 0:
            _log.info("rank %d finished", worker.rank)
            return
        self._end_sessions({worker.pid})
        if not self._stopping:
            self._first = worker
            self._stop(f"rank {worker.rank} ended with {ending(code)}")

    def _stop(self, cause: str) -> None:
        """Ask the remaining workers to end; they are killed after the grace period."""
        self._stopping = True
        left = [worker for worker in self._workers.values() if worker.exit_code is None]
        if not left:
            return
        ranks = ", ".join(str(worker.rank) for worker in left)
        _log.warning("%s: stopping rank %s, for up to %g s", cause, ranks, self._world.grace)
        for worker in left:
            worker.asked = True
            self._processes.terminate(worker.pid, signal.SIGTERM)
        self._inbox.put_later(self._world.grace, _GraceOver())

    def _kill(self, cause: str) -> None:
        for worker in self._workers.values():
            if worker.exit_code is None:
                _log.warning("killing rank %d: %s", worker.rank, cause)
                self._processes.signal(worker.pid, signal.SIGKILL)

    def _leave_children(self) -> None:
        """Leave alone what the workers have left behind, such as an upload, as they have all ended with 0."""
        with suppress(OSError):  # no descriptor is left to read what there is
            reporting.children(session_members(self._sessions), "they go on")
        for sid in self._sessions:
            self._guard.remove(sid)
        self._sessions.clear()

    def _end_sessions(self, sids: set[int] | None = None) -> None:
        """Kill the processes that workers (None: all) have left behind, grandchildren included."""
        chosen = set(self._sessions) if sids is None else sids
        try:
            if stuck := kill_sessions(chosen):
                _log.warning("processes %s cannot be killed", ", ".join(map(str, stuck)))
        except OSError as error:
            _log.warning("processes that workers have started may still run: %s", error)
            return  # retried at the end, or done by the guard
        for sid in chosen:
            self._sessions.discard(sid)
            self._guard.remove(sid)

    def _tell(self) -> int:
        """Show the output of crashed ranks, the first one to crash last, and return the exit code."""
        first = self._first
        crashed = [worker for worker in self._workers.values() if worker.crashed and worker is not first]
        for worker in [*crashed, *([first] if first else [])]:
            _log.error("%s", "\n".join(self._words(worker)))
        if self._signal:
            return 128 + self._signal
        if self._failed_start:
            _log.error("%s", self._failed_start)
            return ExitCode.STARTUP_FAILURE
        return ExitCode.DONE if first is None or first.exit_code is None else own_code(first.exit_code)

    def _words(self, worker: _Worker) -> Iterator[str]:
        assert worker.exit_code is not None
        cause = "root cause: " if worker is self._first else ""
        yield f"{cause}rank {worker.rank} (pid {worker.pid}) ended with {ending(worker.exit_code)}"
        error = read_error_file(worker.files.error_file)
        if error is not None:
            yield from (f"    {line}" for line in error.traceback or error.message.splitlines())
        out, err = worker.files.stdout, worker.files.stderr
        for name, path in (("output", out),) if out == err else (("stdout", out), ("stderr", err)):
            if path is not None and (lines := _tail(path, self._before[path])):
                yield f"    its {name}, in {path}:"
                yield from (f"        {line}" for line in lines)


@contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error}.", "Name other files with --stdout, --stderr, --run_directory."
        ) from None


def _tail(path: Path, start: int) -> list[str]:
    """Return the last lines of a file, from a byte offset on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - SHOWN_BYTES))
            lines = file.read(SHOWN_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-SHOWN_LINES:]
