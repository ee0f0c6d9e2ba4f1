"""Where an agent and its warm server part: one process imports torch for both, and forks the server.

What is imported once takes a processor's time once, and both share its memory. The process is in all that a worker
could notice what an executed server is; so the server is the child, and the agent, which has the pid that the user
knows, puts back what it was started with.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_agents.dumpable import set_dumpable
from elastic_agents.warm.become import BLOCKED, show
from elastic_agents.warm.imports import Import
from elastic_agents.warm.loading import Loading
from elastic_agents.warm.meanwhile import Meanwhile
from elastic_agents.warm.planning import Plan, plan
from elastic_agents.warm.server import open_log, serve_as

if TYPE_CHECKING:
    from elastic_launch.config import LaunchConfig

__all__ = ["Begun", "Forked", "Kept", "Parted", "part"]


class Forked:
    """A child that this process has forked, with what :class:`subprocess.Popen` offers for one that it has executed.

    Raises:
        OSError: if there is no descriptor left; then the child is ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._ended = False
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:
            self.kill()
            self._reap()
            raise

    def kill(self) -> None:
        with self._lock:
            if not self._ended:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Reap it; for one thread at a time.

        Raises:
            subprocess.TimeoutExpired: if it has not ended after so many seconds.
        """
        if self._ended:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise subprocess.TimeoutExpired("warm server", timeout)
        self._reap()
        os.close(self._descriptor)

    def _reap(self) -> None:
        with self._lock:
            self._ended = True
            os.waitpid(self.pid, 0)


@dataclass(frozen=True, slots=True)
class Kept:
    """What an agent keeps over the exec that it begins anew with, in memory that is no file's.

    Attributes:
        config: the launch's configuration without its token, pickled: to read it takes ``path``.
        token: the token's text.
        environ, path, argv, command: this process' own, the last with the interpreter.
        name: what the kernel calls the process.
        mask: the signals that were blocked.
    """

    config: bytes
    token: str | None
    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    command: list[str]
    name: bytes
    mask: list[int]

    def put(self) -> int:
        """Return a descriptor that outlives an exec."""
        descriptor = os.memfd_create("elastic-launch", 0)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            with open(descriptor, "wb", closefd=False) as file:
                pickle.dump(self, file)
            undo.pop_all()
        return descriptor

    @staticmethod
    def take(descriptor: int) -> Kept:
        """Read it, and close the descriptor."""
        os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, "rb") as file:
            kept = pickle.load(file)
        assert isinstance(kept, Kept)
        return kept

    def restore(self) -> None:
        """Make this process look as it did, but for the signals, which may not come before somebody handles them."""
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        sys.orig_argv[:] = self.command
        show(self.command)
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{os.getpid()}/comm").write_bytes(self.name)  # which a process may always do


@dataclass(frozen=True, slots=True)
class Parted:
    """A server that this process has forked.

    Attributes:
        orders: the socket to it.
        source: the descriptor of the pipe from it.
    """

    server: Forked
    orders: socket.socket
    source: int

    def end(self) -> None:
        """Have nothing to do with it."""
        self.orders.close()
        os.close(self.source)
        self.server.kill()
        self.server.wait(10)


@dataclass(frozen=True, slots=True)
class Begun:
    """What an agent has begun with, its run being announced.

    Attributes:
        mask: the signals that this process is to block from now on; until now it has blocked all that it handles.
        health: listens at the health port, if there is one.
        parted: its server, if it has one.
    """

    mask: list[int]
    health: socket.socket | None = None
    parted: Parted | None = None


def part(argument: str) -> Callable[[], object]:
    """Fork the server, once this process has imported torch if it may; return what each of the two has to run.

    Args:
        argument: a server's settings as JSON, less its descriptors, with ``kept`` and ``health`` (descriptors of what
            the agent keeps and of the socket that listens at its health port, or null).
    """
    settings = json.loads(argument)
    set_dumpable(False)  # it keeps the token
    os.set_inheritable(settings["kept"], False)
    health = None if settings["health"] is None else socket.socket(fileno=settings["health"])
    if health is not None:
        health.set_inheritable(False)
    inherited = list(_inherited())  # a lock, say; libraries may open more
    sys.argv[:] = settings["argv"][2:]
    planned = plan(settings, sys.path)
    loading = None
    if isinstance(planned, Plan) and planned.torch_comes_first:
        loading = _torch(planned, health)
        gc.freeze()  # a collection would touch, and so copy, what the two share
    forked = _fork()
    if forked is not None and forked.pid == 0:
        if health is not None:
            health.close()
        os.close(settings["kept"])
        _be_server(settings["log"], settings["mask"], inherited)
        return serve_as({**settings, **forked.servers()}, planned, loading)
    parted = forked.agents() if forked is not None else None
    if loading is not None:
        loading.abandon()
    return partial(_go_on, settings["kept"], health, parted, loading.error if loading is not None else None)


@dataclass(frozen=True, slots=True)
class _Fork:
    """Either process after the fork, with all ends of what they talk over.

    Attributes:
        pid: of the server; 0 in it.
    """

    pid: int
    orders: socket.socket
    theirs: socket.socket
    source: int
    tell: int

    def servers(self) -> dict[str, int]:
        """Let go of the agent's ends, and return the descriptors of the server's."""
        self.orders.close()
        os.close(self.source)
        return {"orders": self.theirs.detach(), "tell": self.tell}

    def agents(self) -> Parted | None:
        """Let go of the server's ends, and return the agent's; None if it cannot watch the server, which is ended."""
        self.theirs.close()
        os.close(self.tell)
        try:
            return Parted(Forked(self.pid), self.orders, self.source)
        except OSError:
            self.orders.close()
            os.close(self.source)
            return None


def _fork() -> _Fork | None:
    """Fork, if there is room for one process more; the agent tries once more, and says so."""
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        orders, theirs = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        source, tell = os.pipe2(os.O_CLOEXEC)
        for descriptor in (source, tell):
            undo.callback(os.close, descriptor)
        pid = os.fork()
        undo.pop_all()
        return _Fork(pid, orders, theirs, source, tell)
    return None


def _torch(planned: Plan, health: socket.socket | None) -> Loading | None:
    """Import it, if there is room to watch that; else each of the two processes does so."""
    loading = Loading(planned.asked, planned.without)
    try:
        loading.add(Import("torch"), Meanwhile(health) if health is not None else None)
    except OSError:
        loading.abandon()
        return None
    return loading


def _inherited() -> Iterator[int]:
    """Yield the descriptors that somebody has opened for this process, besides the standard ones."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if descriptor > 2 and os.get_inheritable(descriptor):
                yield descriptor


def _be_server(log: str, mask: list[int], inherited: list[int]) -> None:
    """Be to the agent, and have of it, what a process would that it has executed."""
    os.setsid()
    set_dumpable(True)  # workers are the user's programs, and keep nothing from the user
    signal.pthread_sigmask(signal.SIG_SETMASK, {*BLOCKED, *mask})
    with open_log(log) as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    for descriptor in inherited:
        with contextlib.suppress(OSError):  # a library has done so
            os.close(descriptor)


def _go_on(descriptor: int, health: socket.socket | None, parted: Parted | None, error: BaseException | None) -> None:
    """Be the agent, to the end of this process."""
    kept = Kept.take(descriptor)
    kept.restore()
    from elastic_agents.main import run
    from elastic_launch.process import exiting, reported
    from elastic_launch.secret import Token

    config: LaunchConfig = pickle.loads(kept.config)
    if kept.token is not None:
        config = replace(config, token=Token(kept.token, "what this process has kept"))

    def act() -> int:
        if error is not None:
            raise error  # a second import of torch would fail of what the first one has left
        return run(config, Begun(kept.mask, health, parted))

    exiting(lambda: reported(act))
