"""Starts processes in both ways, for tests that compare them."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from harness import wait_for

from elastic_agents.warm._record import Learned
from elastic_agents.warm.client import WarmServer
from elastic_agents.warm.processes import WarmProcesses
from elastic_agents.workers.placement import shared_environment
from elastic_agents.workers.processes import ExecProcesses, StartRequest
from elastic_agents.workers.sessions import kill_sessions, reap_last
from elastic_launch.config.launch_config import Command, LaunchConfig

WAYS = ("warm", "exec")


@dataclass(frozen=True)
class Ended:
    """The result of a process: its exit code (-N for signal N) and output."""

    pid: int
    code: int
    stdout: str
    stderr: str


class Starter:
    """Starts Python commands in one way and waits for them to end."""

    def __init__(
        self, processes: ExecProcesses, exits: queue.SimpleQueue[tuple[int, int]], env: dict[str, str]
    ) -> None:
        self.processes = processes
        self.env = env
        self.started = 0
        self.patience = 20.0  # seconds for one process
        self._exits = exits

    def start(self, *argv: str, env: dict[str, str] | None = None, out: int = 1, err: int = 2) -> int:
        command = [sys.executable, "-u", *argv]
        self.prepare()
        pid = self.processes.start(StartRequest(command, {**self.env, **(env or {})}, out, err))
        if isinstance(self.processes, WarmProcesses):
            self.started += 1
            assert self.processes.forked == self.started, "it was executed"
        return pid

    def learn(self, *argv: str, env: dict[str, str] | None = None) -> tuple[int, int]:
        """Run a command, and have the server import what that has imported; return its pid and exit code."""
        assert isinstance(self.processes, WarmProcesses)
        self.prepare()
        command = [sys.executable, "-u", *argv]
        pid = self.processes.start(StartRequest(command, {**self.env, **(env or {})}, 1, 2))
        self.started = self.processes.forked
        ended = self.wait()
        assert ended[0] == pid
        kill_sessions({pid})
        reap_last({pid})
        server, learned = self.processes._server, self.processes._learned
        server.training()
        wait_for("the server's imports", lambda: not learned.length() and server._known)
        return ended

    def prepare(self) -> None:
        """Wait until a process can be started."""
        prepared = Event()
        self.processes.prepare(1, prepared.set)
        assert prepared.wait(60)

    def wait(self) -> tuple[int, int]:
        return self._exits.get(timeout=self.patience)

    def run(self, *argv: str, env: dict[str, str] | None = None) -> Ended:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = self.start(*argv, env=env, out=out.fileno(), err=err.fileno())
            ended, code = self.wait()
            assert ended == pid
            kill_sessions({pid})
            reap_last({pid})
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="surrogateescape"))
            return Ended(pid, code, *texts)


def config_for(
    directory: Path, *argv: str, preload: tuple[str, ...] = ("yaml",), no_preload: tuple[str, ...] = ()
) -> LaunchConfig:
    return LaunchConfig(
        command=Command((sys.executable, "-u", *argv), argv),
        log_dir=directory,
        preload=preload,
        no_preload=no_preload,
    )


@contextmanager
def warm_starter(config: LaunchConfig, env: dict[str, str] | None = None, ahead: int = 0) -> Iterator[Starter]:
    """A starter whose server is known to be ready, or to be unusable."""
    exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    variables = {**shared_environment(config), **(env or {})}
    learned = Learned()

    def make() -> WarmServer:
        return WarmServer.execute(config, variables, ahead, learned)

    processes = WarmProcesses(lambda pid, code: exits.put((pid, code)), make(), make, learned)
    try:
        known = Event()
        processes.when_ready(known.set)
        assert known.wait(60)
        yield Starter(processes, exits, variables)
    finally:
        processes.close()


@contextmanager
def exec_starter(env: dict[str, str]) -> Iterator[Starter]:
    exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    processes = ExecProcesses(lambda pid, code: exits.put((pid, code)))
    try:
        yield Starter(processes, exits, env)
    finally:
        processes.close()


@contextmanager
def both_ways(config: LaunchConfig, env: dict[str, str] | None = None) -> Iterator[dict[str, Starter]]:
    with warm_starter(config, env) as warm, exec_starter(warm.env) as cold:
        yield {"warm": warm, "exec": cold}


def write(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return os.fspath(path)
