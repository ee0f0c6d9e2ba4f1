"""Agents and scripts that are forked from a process that has already imported everything that they need.

The imports of an agent and its warm server, mainly of torch, take four fifths of a short run's CPU time. The code after
the imports is the same as in an executed agent: each is a separate process with its own session, environment, command,
standard streams and exit.

An agent re-executes itself to import torch for both itself and the warm server (``elastic_agents.warm.reexec``). A
forked agent is put into the state that it would have after that, with torch imported: signals, environment, path,
arguments and logging are those of a new interpreter. From there it forks its server, and the server its workers, as
always. The differences:

- The first workers are forked, too, if the script imports torch.
- Modules that the script may or may not have imported already exist: ``MODULES``. Environment variables that their
  imports set are missing.
- Imports have read the environment of the tests. ``OMP_NUM_THREADS`` is applied later; if another such variable is
  given, the agent is executed, see ``harness.Job.launch``.
- The process' environment in ``/proc`` is that of the process that forks.
- Workers have 6 s, not 2 s, to leave a round: on a busy machine, the agent would kill those that need longer.

A script without a launcher is forked likewise (``harness.run_script``), and then run as in a worker of a warm server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import re
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from explore.recorder import TRACES, record

MODULES = (
    "elastic_launch.cli.main",
    "elastic_agents.main",
    "elastic_agents.agent",
    "elastic_agents.snapshots.copying",
    "elastic_agents.probes.health",
    "elastic_agents.torch_events",
    "elastic_launch.rendezvous.backends.registry",
    "elastic_launch.rendezvous.backends.election",
    "elastic_launch.rendezvous.backends.hosting",
    "elastic_launch.rendezvous.backends.static",
    "elastic_agents.warm.reexec",
    "elastic_agents.warm.fork_bootstrap",
    "torch._dynamo",
    "torch.distributed.algorithms.join",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
    "sklearn.datasets",
    "elastic_launch.training.trainer",
    "elastic_launch.training.session",
    "elastic_launch.training.checkpoints.manager",
    "elastic_launch.training.data.loader",
    "elastic_launch.training.dist",
)
"""Modules that agents import, and that warm servers import for the scripts of tests and examples."""

ROOM = 8192
"""Maximum bytes of a command that a forked process can show."""


class Process:
    """The interface of :class:`subprocess.Popen`, for a process that another process has forked.

    Args:
        status: a pipe to which its parent writes its pid, and at the end its exit status.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self._lock = threading.Lock()
        self.returncode: int | None = None
        self.pid = int(self._line())

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            data = os.read(self._status, 1)
            assert data, "the process that forks agents has died"
            line += data
        return line

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: if it is still running after the timeout.
        """
        with self._lock:
            if self.returncode is None:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._status, selectors.EVENT_READ)
                    if not selector.select(timeout):
                        raise subprocess.TimeoutExpired("agent", timeout or 0.0)
                self.returncode = os.waitstatus_to_exitcode(int(self._line()))
                os.close(self._status)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its parent has seen its end, and is about to say so
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks agents.

    Args:
        name: of the abstract socket at which it takes orders.
    """

    def __init__(self, name: str) -> None:
        self._ends, self._theirs = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._start_when_needed, daemon=True)

    def start(self) -> None:
        """Start it; it imports while the first test sets up."""
        inherited = [self._theirs.fileno(), self._listener.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, inherited), " " * ROOM],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._theirs.close()
        self._listener.close()

    def start_when_needed(self) -> None:
        """Start it when the first process connects."""
        self._thread.start()

    def _start_when_needed(self) -> None:
        readable, _, _ = select.select([self._listener, self._theirs], [], [])
        if self._theirs not in readable:
            self.start()

    def close(self) -> None:
        self._ends.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._theirs.close()
        self._listener.close()
        if self._process is not None:
            self._process.wait(60)


class Forks:
    """A connection to the process that forks agents, by the name of its socket."""

    def __init__(self, name: str) -> None:
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.connect(f"\0{name}")

    def start(
        self,
        arguments: Sequence[str],
        output: int,
        env: Mapping[str, str],
        cwd: Path | None,
        network: str = "",
        group: str = "",
        *,
        script: bool = False,
    ) -> Process:
        """Fork an agent, or a process that runs a script.

        Args:
            arguments: of ``python -m elastic_launch``, or a script and its own.
            output: descriptor of the file for its output.
            network: name of its network namespace, as with ``ip netns exec``; "" for that of the tests.
            group: path of its control group; likewise.
        """
        status, theirs = os.pipe()
        where = {"cwd": os.fspath(cwd or Path.cwd()), "network": network, "group": group}
        order = {"arguments": list(arguments), "env": dict(env), "script": script, **where}
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [output, theirs])
        finally:
            os.close(theirs)
        return Process(status)

    def close(self) -> None:
        self._orders.close()


def _serve(ends: socket.socket, listener: socket.socket) -> Callable[[], None]:
    """Fork a process for each order and report how it ended; return only in a forked process, with what to run."""
    selector = selectors.DefaultSelector()
    selector.register(ends, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    sockets = {ends, listener}
    told: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is ends:
                os._exit(0)
            if key.fileobj is listener:
                orders, _ = listener.accept()
                sockets.add(orders)
                selector.register(orders, selectors.EVENT_READ)
                continue
            if key.fd in told:
                pid, status = told.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, ended = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, b"%d\n" % ended)
                os.close(status)
                continue
            orders = key.fileobj
            assert isinstance(orders, socket.socket)
            data, received, _, _ = socket.recv_fds(orders, 1 << 20, 2)
            if not data:
                selector.unregister(orders)
                sockets.discard(orders)
                orders.close()
                continue
            output, status = received
            pid = os.fork()
            if not pid:
                for descriptor, (_, other) in told.items():
                    os.close(descriptor)
                    os.close(other)
                selector.close()
                for each in sockets:
                    each.close()
                os.close(status)
                return partial(_become, json.loads(data), output)
            os.close(output)
            os.write(status, b"%d\n" % pid)
            descriptor = os.pidfd_open(pid)
            told[descriptor] = (pid, status)
            selector.register(descriptor, selectors.EVENT_READ)


class _Anew(BaseException):
    """Unwinds the stack of a process that would have re-executed itself.

    Args:
        argument: the argument of the exec.
        env: its environment.
    """

    def __init__(self, argument: str, env: Mapping[str, str]) -> None:
        super().__init__()
        self.argument, self.env = argument, dict(env)

    def begin(self, path: Sequence[str]) -> None:
        """Run as the process would after the exec, with torch imported; return at its end."""
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self.env)
        sys.path[:] = path
        log = logging.getLogger("elastic_launch")
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.NOTSET)
        if threads := self.env.get("OMP_NUM_THREADS"):
            importlib.import_module("torch").set_num_threads(int(threads))
        importlib.import_module("elastic_agents.warm.fork_bootstrap").bootstrap(self.argument)()


def _alone() -> bool:
    """Whether this process has no other threads; the kernel may take a moment to end joined threads."""
    deadline = time.monotonic() + 5.0
    while len(os.listdir("/proc/self/task")) > 1:
        if threading.active_count() > 1 or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _begins_anew() -> Callable[..., NoReturn]:
    """Return a replacement for ``os.execve`` that unwinds if an agent re-executes itself, and otherwise executes."""
    execve = os.execve
    entered = importlib.import_module("elastic_agents.warm.server").entered
    code = entered("from elastic_agents.warm.fork_bootstrap import bootstrap", "bootstrap(sys.argv[1])()")

    def stand_in(path: str, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
        if [*argv[1:4]] != ["-u", "-c", code] or not _alone():
            execve(path, argv, env)
        os.execve = execve
        settings = json.loads(argv[4])
        if "torch" not in settings["without"] and _imports_torch(settings["argv"][2]):
            settings["preload"] = ["torch", *settings["preload"]]  # so that the first workers are forked, too
        for name in ("state", "health"):  # they are closed while this unwinds
            if settings[name] is not None:
                settings[name] = os.dup(settings[name])
        raise _Anew(json.dumps(settings), env)

    return stand_in


def _imports_torch(script: str) -> bool:
    """Whether a script imports torch, or this project's library, which does; workers of others start as quickly."""
    try:
        text = Path(script).read_text()
    except (OSError, ValueError):
        return True
    return re.search(r"^\s*(import|from) .*(torch|elastic_launch|numpy|paced)", text, re.MULTILINE) is not None


def _enter(network: str) -> None:
    """Enter a network namespace, with a ``/sys`` that shows it (ip-netns(8))."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name} for network namespace {network}")

    new_mounts, new_network = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET
    recursive, slave, detach = 0x4000, 0x80000, 2  # MS_REC, MS_SLAVE, MNT_DETACH
    with open(f"/run/netns/{network}", "rb") as namespace:
        call("setns", namespace.fileno(), new_network)
    call("unshare", new_mounts)
    call("mount", b"", b"/", b"none", ctypes.c_ulong(slave | recursive), None)
    call("umount2", b"/sys", detach)
    call("mount", network.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)


def _become(order: dict[str, object], output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    arguments, env, cwd, network = order["arguments"], order["env"], order["cwd"], order["network"]
    assert isinstance(arguments, list)
    assert isinstance(env, dict)
    assert isinstance(cwd, str)
    assert isinstance(network, str)
    if network:
        _enter(network)
    if group := order["group"]:
        Path(str(group), "cgroup.procs").write_text(str(os.getpid()))
    os.chdir(cwd)
    tempfile.tempdir = None  # TMPDIR has been read for the process that forks
    if order["script"]:
        if threads := env.get("OMP_NUM_THREADS"):
            importlib.import_module("torch").set_num_threads(int(threads))
        command = [sys.executable, "-u", *arguments]
        orders = importlib.import_module("elastic_agents.warm.run_script").Orders
        orders(command, env, os.dup(1), os.dup(2)).carry_out(mask=(), changed={})
    os.environ.clear()
    os.environ.update(env)
    path = [*sys.path]
    sys.path.insert(0, cwd)  # as python -m does
    sys.argv[:] = ["", *arguments]
    sys.orig_argv[:] = [sys.executable, "-m", "elastic_launch", *arguments]
    importlib.import_module("elastic_agents.warm.run_script").show(sys.orig_argv)
    # torch is already imported, but that must not matter here.
    importlib.import_module("elastic_agents.warm.reexec")._is_plain = lambda: True
    if traces := env.get(TRACES):
        record(Path(traces))
    os.execve = _begins_anew()
    try:
        runpy.run_module("elastic_launch", run_name="__main__", alter_sys=True)
    except _Anew as error:
        anew = error
    anew.begin(path)


def main() -> None:
    del sys.path[0]  # this file's directory
    ends, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for each in (ends, listener):
        each.set_inheritable(False)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("elastic_agents.timers").SHORTEST_SUSPENSION = 6.0
    gc.freeze()
    gc.enable()
    _serve(ends, listener)()


if __name__ == "__main__":
    main()
