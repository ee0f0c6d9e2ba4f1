"""The agent's side of the warm server: worker processes that are forked where possible, and executed where not."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from elastic_agents.placing import shared_environment
from elastic_agents.processes import ExecProcesses, OnExit, StartRequest, WorkerProcesses
from elastic_agents.sessions import kill_sessions, reap_orphans
from elastic_agents.warm.imports import differs_at_import
from elastic_agents.warm.spying import PER_WORKER
from elastic_launch.config import LaunchConfig

__all__ = ["WarmProcesses", "WarmServer", "start_processes"]

_log = logging.getLogger("elastic_launch.warm")

PATIENCE = 120.0
"""Seconds that the first workers wait for the imports at most; then they do their own."""

FORK_TIMEOUT = 20.0
"""Seconds for a fork, which takes 0.03 s on a machine that does not swap."""

MOST_REPLACED = 3
"""So often a server that died is replaced."""

PR_SET_CHILD_SUBREAPER = 36


def start_processes(config: LaunchConfig) -> Callable[[OnExit], WorkerProcesses]:
    """Start what a node's workers will be started by, as early as can be, and return how to take it into use."""
    python, *rest = config.command.argv
    if config.options.numa_binding is not None:
        return ExecProcesses  # by numactl
    if not config.warm or config.command.display[0] == "--no-python" or python != sys.executable or rest[0] != "-u":
        return ExecProcesses
    make = partial(WarmServer, config, shared_environment(config))
    try:
        _be_subreaper(True)
        server = make()
    except OSError as error:
        _log.warning("workers import for themselves: there can be no warm server (%s)", error)
        return ExecProcesses
    return lambda on_exit: WarmProcesses(on_exit, server, make)


class WarmServer:
    """The server's process, started at once and asked to fork once it is ready.

    Attributes:
        lost: whether it was ready and has died.
        read: variables that its imports asked for.

    Args:
        env: a worker's environment, without what differs between workers.
    """

    def __init__(self, config: LaunchConfig, env: Mapping[str, str]) -> None:
        argv = config.command.argv
        self.env = {name: value for name, value in env.items() if name not in PER_WORKER}
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._orders.settimeout(FORK_TIMEOUT)
        self._source, tell = os.pipe2(os.O_CLOEXEC)
        settings = {
            "orders": theirs.fileno(),
            "tell": tell,
            "argv": list(argv[2:]),
            "preload": list(config.preload),
            "without": list(config.no_preload),
            "restarts": 0,
            "mask": None,
        }
        root = str(Path(__file__).resolve().parents[2])
        code = (
            "import sys; sys.flags.safe_path or sys.path.pop(0); "  # the directory of nobody's script
            f"sys.path.append({root!r}); from elastic_agents.warm.server import serve; sys.path.pop(); "
            "serve(sys.argv[1])()"
        )
        with theirs, _log_of(config) as output:
            # The command at the end leaves room for a worker to show its own in its place.
            self._process = subprocess.Popen(
                [argv[0], "-u", "-c", code, json.dumps(settings), "warm server of", *argv],
                env=self.env,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), tell],
                start_new_session=True,
            )
        os.close(tell)
        self._lock = threading.Lock()
        self._known = False
        self._usable = False
        self._importing = ""
        self.read: frozenset[str] = frozenset()
        self.lost = False
        self._closing = False
        self._calls: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._listen, name="warm", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether workers can be forked now."""
        return self._usable

    def when_known(self, call: Callable[[], None]) -> None:
        """Call once it is known whether workers can be forked; at once or from another thread."""
        with self._lock:
            if not self._known:
                self._calls.append(call)
                return
        call()

    def fork(self, request: StartRequest) -> int:
        """Return the pid of a worker, which is a child of this process.

        Raises:
            OSError: if the server cannot fork.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with mine:
            with theirs:
                order = json.dumps({"argv": list(request.argv), "env": dict(request.env)}).encode() + b"\n"
                sent = socket.send_fds(self._orders, [order], [request.stdout, request.stderr, theirs.fileno()])
                self._orders.sendall(order[sent:])
            mine.settimeout(FORK_TIMEOUT)
            with mine.makefile("rb") as lines:
                if not (pid := lines.readline()):
                    raise OSError("the warm server could not fork")
                mine.sendall(b"g")
                if not lines.readline():
                    raise OSError("the worker died as it was forked")
            return int(pid)

    def give_up(self) -> None:
        """Have it count as lost: what was asked of it last must never come to life."""
        self._usable, self.lost = False, True
        self._process.kill()

    def close(self) -> None:
        """End the server; workers go on."""
        self._closing = True
        self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            _log.warning("the warm server, pid %d, cannot be killed", self._process.pid)
        kill_sessions({self._process.pid})  # what imports have started
        reap_orphans({self._process.pid})
        self._thread.join(10)
        self._orders.close()

    def _listen(self) -> None:
        """Hear the server until its end, or until no worker is left that was forked this moment."""
        deadline = time.monotonic() + PATIENCE  # begins anew with each module
        with os.fdopen(self._source, "rb", buffering=0) as source, selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            pending = b""
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic()) if not self._known else None):
                    _log.warning(
                        "workers import for themselves: the warm server's imports take more than %g s", PATIENCE
                    )
                    self._settle(usable=False)
                    continue
                if not (data := source.read(65536)):
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    deadline = time.monotonic() + PATIENCE
                    self._hear(json.loads(line))
        self.lost = self.lost or self._usable
        if not self._known and not self._closing:
            where = f" as it imported {self._importing}" if self._importing else ""
            _log.warning("workers import for themselves: the warm server has died%s", where)
        self._settle(usable=False)

    def _hear(self, message: dict[str, object]) -> None:
        if "warning" in message:
            _log.warning("%s", message["warning"])
        elif "cold" in message:
            _log.info("workers import for themselves: %s", message["cold"])
            self._settle(usable=False)
        elif "importing" in message:
            self._importing = str(message["importing"])
        else:
            read = message["ready"]
            assert isinstance(read, list)
            self.read = frozenset(read) - PER_WORKER
            self._settle(usable=True)

    def _settle(self, *, usable: bool) -> None:
        with self._lock:
            self._known, self._usable = True, usable
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class WarmProcesses:
    """Forks from a warm server what can be forked, and executes everything else.

    This process becomes a subreaper: workers' orphans, and the workers themselves, become its children.

    Attributes:
        forked: how many workers were.
    """

    def __init__(self, on_exit: OnExit, server: WarmServer, make: Callable[[], WarmServer]) -> None:
        _be_subreaper(True)
        self._server = server
        self._make = make
        self._replaced = 0
        self._exec = ExecProcesses(on_exit)
        self._complained = False
        self.forked = 0

    def when_ready(self, call: Callable[[], None]) -> None:
        if self._server.lost and self._replaced < MOST_REPLACED:
            self._replaced += 1
            _log.warning("the warm server is gone; another one is started")
            self._server.close()
            try:
                self._server = self._make()
            except OSError as error:
                _log.warning("workers import for themselves: there can be no warm server (%s)", error)
        self._server.when_known(call)

    def start(self, request: StartRequest) -> int:
        if not self._server.usable or self._differs(request):
            return self._exec.start(request)
        try:
            pid = self._server.fork(request)
        except OSError as error:
            _log.warning("a worker imports for itself: %s", error)
            self._server.give_up()
            return self._exec.start(request)
        self._exec.adopt(pid)
        self.forked += 1
        return pid

    def signal(self, pid: int, number: int) -> None:
        self._exec.signal(pid, number)

    def close(self) -> None:
        self._server.close()
        self._exec.close()
        _be_subreaper(False)

    def _differs(self, request: StartRequest) -> bool:
        differing = differs_at_import(self._server.env, request.env, self._server.read)
        if differing and not self._complained:
            self._complained = True
            names = ", ".join(differing)
            _log.info("workers import for themselves: %s differs between them and matters at import", names)
        return bool(differing)


def _log_of(config: LaunchConfig) -> BinaryIO:
    """Where the output of imports goes: a full disk must not stop training."""
    try:
        config.run_directory.mkdir(parents=True, exist_ok=True)
        return (config.run_directory / f"imports-{config.node_id}.log").open("ab")
    except OSError:
        return open(os.devnull, "ab")


def _be_subreaper(yes: bool) -> None:
    """prctl(2), PR_SET_CHILD_SUBREAPER."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot become a subreaper")
