"""A process that is forked ahead: it has become a child of the agent, and waits to be made a worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Generator

from elastic_agents.workers.processes import StartRequest

__all__ = ["Prefork"]

FORK_TIMEOUT = 10.0
"""Seconds for a fork, which takes 0.03 s on a machine that does not swap."""

ANSWER_TIMEOUT = 5.0
"""Seconds for what takes a process that runs a millisecond: to answer, and to begin."""


class Prefork:
    """One process; it ends by itself when this process does.

    Attributes:
        pid: of a child of this process that nobody reaps yet.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock

    @staticmethod
    def fork(server: socket.socket, count: int) -> Generator[Prefork]:
        """Have the warm server fork processes, and yield each as soon as it waits.

        Each is asked for before the one before it waits: two forks make a process, and the server does only the first.

        Args:
            server: the socket to it.

        Raises:
            OSError: if it cannot.
        """
        asked: deque[socket.socket] = deque()
        try:
            for number in range(count):
                while len(asked) < min(2, count - number):
                    asked.append(_ask(server))
                yield Prefork._forked(asked.popleft())
        finally:
            for sock in asked:
                sock.close()

    @staticmethod
    def _forked(mine: socket.socket) -> Prefork:
        """Wait for a process that was asked for; take its socket over."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(mine)
            if not (pid := _line(mine)):
                raise OSError("the warm server could not fork")
            mine.sendall(b"g")
            if not _line(mine):
                raise OSError("the worker died as it was forked")
            undo.pop_all()
            return Prefork(int(pid), mine)

    def ask(self) -> None:
        """Ask it whether it runs; see :meth:`answers`.

        Raises:
            OSError: if it has died.
        """
        self._sock.sendall(b"\n")

    def answers(self, deadline: float) -> bool:
        """Whether it answers before a moment of the monotonic clock: a process may be stopped."""
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return bool(_line(self._sock))
        except OSError:
            return False

    def begin(self, request: StartRequest) -> int:
        """Make it a worker, which the caller reaps; return its pid.

        Raises:
            OSError: if it has died; then it is reaped.
        """
        self._sock.settimeout(ANSWER_TIMEOUT)
        order = json.dumps({"argv": list(request.argv), "env": dict(request.env)}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._sock, [order], [request.stdout, request.stderr])
            if rest := order[sent:]:  # sending nothing fails if it has read all, and hung up
                self._sock.sendall(rest)
            if not _line(self._sock):
                raise OSError("the worker died before it began")
        except OSError:
            self.end()
            raise
        self._sock.close()
        return self.pid

    def end(self) -> None:
        """End and reap it."""
        self._sock.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _ask(server: socket.socket) -> socket.socket:
    """Ask for a process; return the socket to it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.enter_context(mine)
        with theirs:
            socket.send_fds(server, [b"f"], [theirs.fileno()])
        mine.settimeout(FORK_TIMEOUT)
        undo.pop_all()
    return mine


def _line(sock: socket.socket) -> bytes:
    """Return what the other side says; it says a line, and then listens."""
    said = b""
    while not said.endswith(b"\n"):
        if not (data := sock.recv(64)):
            return b""
        said += data
    return said
