"""Starts an agent and its warm server as one process, which imports torch for both and forks the server.

So torch costs CPU time only once, and both share its memory. To a worker, this process is indistinguishable from an
executed server. So the server is the child; the agent, which has the pid that the user knows, restores the state it
was started with.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic_agents.child import Child
from elastic_agents.prctl import set_dumpable
from elastic_agents.warm._import_watch import watched
from elastic_agents.warm._preload import Preload
from elastic_agents.warm._record import new_record
from elastic_agents.warm.run_script import BLOCKED, show
from elastic_agents.warm.server import OPEN_TIMEOUT, open_log, serve_as

SERVER = "the warm server"

LOOK = 0.1
"""Seconds between two looks for a signal while torch is imported."""

PATIENCE = 5.0
"""Seconds for which the thread that looks may take to end; it prints to a console that is not read, for example."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """What an agent keeps when it re-executes itself, in anonymous memory.

    Attributes:
        config: the launch's configuration without its token, pickled: unpickling it needs ``path``.
        token: the token's text.
        environ, path, argv, command: this process' own; ``command`` includes the interpreter.
        name: the kernel's name for the process.
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
        """Return a descriptor that stays open across an exec."""
        descriptor = os.memfd_create("elastic-launch", 0)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            with open(descriptor, "wb", closefd=False) as file:
                pickle.dump(self, file)
            undo.pop_all()
        return descriptor

    @staticmethod
    def take(descriptor: int) -> AgentState:
        """Read the state, and close the descriptor."""
        os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, "rb") as file:
            state = pickle.load(file)
        assert isinstance(state, AgentState)
        return state

    def restore(self) -> None:
        """Make this process look as it did before; signals stay blocked until the agent handles them."""
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        sys.orig_argv[:] = self.command
        show(self.command)
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{os.getpid()}/comm").write_bytes(self.name)  # a process may always write its own


@dataclass(frozen=True, slots=True)
class ServerLink:
    """The agent's connection to a server.

    Attributes:
        orders: the socket to it.
        source: descriptor of the pipe from it.
    """

    process: Child
    orders: socket.socket
    source: int

    def end(self) -> None:
        """End the server."""
        self.orders.close()
        os.close(self.source)
        self.process.signal(signal.SIGKILL)
        self.process.reap()


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What an agent already has at its start, after its run was announced.

    Attributes:
        mask: the signals that this process blocks from now on; until now it has blocked all that it handles.
        health: a socket that listens at the health port, if there is one.
        server: its server, if it has one.
    """

    mask: list[int]
    health: socket.socket | None = None
    server: ServerLink | None = None


def bootstrap(argument: str) -> Callable[[], object]:
    """Import torch if that is allowed, and fork the server; return what each of the two processes runs next.

    Args:
        argument: a server's settings as JSON, without its descriptors, with ``agent`` (the function that continues as
            the agent, as ``module:name``), ``state`` and ``health`` (descriptors of the agent's state and of the socket
            that listens at its health port, or null), ``leave`` (signals by which the node leaves), and ``told`` (how a
            line that tells of one is formatted, or null if none is wanted).
    """
    settings = json.loads(argument)
    set_dumpable(False)  # the agent holds the token
    os.set_inheritable(settings["state"], False)
    health = None if settings["health"] is None else socket.socket(fileno=settings["health"])
    if health is not None:
        health.set_inheritable(False)
    inherited = list(_inherited())  # a lock, for example; libraries may open more
    sys.argv[:] = settings["argv"][2:]
    torch = None if watched() else _torch(settings, health)
    forked = _fork()
    if isinstance(forked, dict):
        if health is not None:
            health.close()
        os.close(settings["state"])
        _be_server(settings["log"], settings["mask"], inherited)
        return serve_as({**settings, **forked, "record": new_record()}, torch)
    error = torch.error if torch is not None else None
    return partial(_be_agent, settings["agent"], settings["state"], health, forked, error)


def _fork() -> ServerLink | dict[str, int] | None:
    """Fork the server.

    Returns:
        the link to it; in the server, its descriptors; None if there is no room for one more process, or the server
        could not be watched and was ended: the agent tries once more, and reports it.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as agents, contextlib.ExitStack() as servers:
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        agents.callback(orders.close)
        servers.callback(theirs.close)
        source, tell = os.pipe2(os.O_CLOEXEC)
        agents.callback(os.close, source)
        servers.callback(os.close, tell)
        if pid := os.fork():
            link = ServerLink(Child(pid, SERVER), orders, source)
            agents.pop_all()
            return link
        servers.pop_all()
        return {"orders": theirs.detach(), "tell": tell}
    return None


def _torch(settings: Mapping[str, Any], health: socket.socket | None) -> Preload | None:
    """Import torch, if there is room to watch that; otherwise each of the two processes imports it."""
    preload = Preload(settings["preload"], settings["without"])
    try:
        preload.add(["torch"], meanwhile=_meanwhile(settings, health))
    except OSError:
        return None
    return preload


def _inherited() -> Iterator[int]:
    """Yield the descriptors, besides the standard streams, that this process has inherited."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if descriptor > 2 and os.get_inheritable(descriptor):
                yield descriptor


def _be_server(log: str, mask: list[int], inherited: list[int]) -> None:
    """Become the server: to the agent, this process must look like one that it has executed."""
    os.setsid()
    set_dumpable(True)  # workers are the user's programs, and hide nothing from the user
    signal.pthread_sigmask(signal.SIG_SETMASK, {*BLOCKED, *mask})
    from elastic_launch.system.threads import within

    try:
        # The thread has ended before this process forks; one that hangs holds no lock that a worker might need.
        output = within(OPEN_TIMEOUT, "opening the file for the imports' output", partial(open_log, log))
    except TimeoutError:
        output = open_log(os.devnull)
    with output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    for descriptor in inherited:
        with contextlib.suppress(OSError):  # a library has already done it
            os.close(descriptor)


def _be_agent(
    agent: str, descriptor: int, health: socket.socket | None, server: ServerLink | None, error: BaseException | None
) -> None:
    """Run the agent, to the end of this process.

    Args:
        agent: the agent's function, by name, as this process has not imported its modules yet.
    """
    state = AgentState.take(descriptor)
    state.restore()
    module, _, name = agent.partition(":")
    getattr(importlib.import_module(module), name)(state, Bootstrap(state.mask, health, server), error)


@contextlib.contextmanager
def _meanwhile(settings: Mapping[str, Any], health: socket.socket | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if health is not None:
            stack.enter_context(answering(health))
        if settings["told"] is not None:
            stack.enter_context(telling(settings["leave"], settings["told"]))
        yield


@contextlib.contextmanager
def telling(numbers: Iterable[int], told: Mapping[str, str]) -> Iterator[None]:
    """Print a line once one of these signals, which are blocked, is pending; the agent handles it later.

    As for :func:`answering`, no thread may exist at a fork, and without room for one the line is missing.

    Args:
        told: arguments of :func:`elastic_agents.console.formatter`.
    """
    import threading

    from elastic_launch.system.threads import VitalThread

    over = threading.Event()

    def watch() -> None:
        while not (found := signal.sigpending().intersection(numbers)):
            if over.wait(LOOK):
                return
        # Only now: what this process has imported, the workers have, too, and now there will be none.
        import logging

        from elastic_agents.console import formatter

        text = f"{signal.Signals(min(found)).name} received: this node leaves once torch is imported"
        line = formatter(**told).format(logging.LogRecord("elastic_launch", logging.INFO, "", 0, text, None, None))
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))

    thread = VitalThread(watch, "early signals", owner=lambda died: None)
    try:
        with contextlib.suppress(RuntimeError):
            thread.start()
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join(PATIENCE)


@contextlib.contextmanager
def answering(listener: socket.socket) -> Iterator[None]:
    """Answer at the health port that the agent is starting: alive, but not ready.

    No thread may exist at a fork. While a library is being loaded no thread runs, so a probe waits. Without room
    for a thread or for descriptors, probes are answered later, by :mod:`elastic_agents.probes.health`.

    Args:
        listener: keeps listening after this ends.
    """
    from elastic_agents.probes.http_server import HttpResponse, HttpServer

    routes = {
        "/livez": lambda _: HttpResponse.text(200, "starting"),
        "/healthz": lambda _: HttpResponse.text(200, "starting"),
        "/readyz": lambda _: HttpResponse.text(503, "starting"),
    }
    with contextlib.ExitStack() as served:
        with contextlib.suppress(OSError, RuntimeError):
            served.callback(HttpServer(listener, routes, name="meanwhile").close)
        yield
