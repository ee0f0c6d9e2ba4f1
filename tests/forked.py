"""Agents that are forked from a process that has imported all that an agent needs.

An agent's imports, torch above all, cost four fifths of a short run's processor time. What follows the imports is the
same code as in an agent that is executed: each is a process of its own, with its own session, environment, standard
streams and exit. The tests of how a launch begins execute theirs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

MODULES = (
    "elastic_launch.cli",
    "elastic_agents.main",
    "elastic_agents.agent",
    "elastic_agents.copying",
    "elastic_agents.health",
    "elastic_agents.torch_events",
    "elastic_launch.rendezvous.choice",
    "elastic_launch.rendezvous.elected",
    "elastic_launch.rendezvous.hosting",
    "elastic_launch.rendezvous.static",
)


class Process:
    """What :class:`subprocess.Popen` offers, for a process that another one has forked.

    Args:
        status: a pipe on which its parent writes its pid, and in the end its exit status.
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
        """Return the exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: if it still runs after so many seconds.
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
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks agents; it is started once, and imports while the first test prepares itself."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, arguments: Sequence[str], output: int, env: Mapping[str, str], cwd: Path | None) -> Process:
        """Fork an agent.

        Args:
            arguments: of ``python -m elastic_launch``.
            output: descriptor of the file for its output.
        """
        status, theirs = os.pipe()
        order = {"arguments": list(arguments), "env": dict(env), "cwd": os.fspath(cwd or Path.cwd())}
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [output, theirs])
        finally:
            os.close(theirs)
        return Process(status)

    def close(self) -> None:
        self._orders.close()
        self._process.wait(60)


def _serve(orders: socket.socket) -> Callable[[], None]:
    """Fork a process for each order and tell how it ended; return only in one of them, with what it has to run."""
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    told: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not orders:
                pid, status = told.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, ended = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, b"%d\n" % ended)
                os.close(status)
                continue
            data, received, _, _ = socket.recv_fds(orders, 1 << 20, 2)
            if not data:
                os._exit(0)
            output, status = received
            pid = os.fork()
            if not pid:
                for descriptor, (_, other) in told.items():
                    os.close(descriptor)
                    os.close(other)
                selector.close()
                orders.close()
                os.close(status)
                return partial(_become, json.loads(data), output)
            os.close(output)
            os.write(status, b"%d\n" % pid)
            descriptor = os.pidfd_open(pid)
            told[descriptor] = (pid, status)
            selector.register(descriptor, selectors.EVENT_READ)


def _become(order: dict[str, object], output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    arguments, env, cwd = order["arguments"], order["env"], order["cwd"]
    assert isinstance(arguments, list)
    assert isinstance(env, dict)
    assert isinstance(cwd, str)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, cwd)  # as -m does
    sys.argv[:] = ["", *arguments]
    sys.orig_argv[:] = [sys.executable, "-m", "elastic_launch", *arguments]
    runpy.run_module("elastic_launch", run_name="__main__", alter_sys=True)


def main() -> None:
    del sys.path[0]  # the directory of this file
    orders = socket.socket(fileno=int(sys.argv[1]))
    orders.set_inheritable(False)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _serve(orders)()


if __name__ == "__main__":
    main()
