"""A process that is forked ahead of time: it has become a child of the agent, and waits to become a worker."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence

from elastic_agents.workers.processes import StartRequest

FORK_TIMEOUT = 10.0
"""Seconds for a fork, which takes 0.03 s on a machine that does not swap."""

ANSWER_TIMEOUT = 5.0
"""Seconds for operations that take a running process a millisecond: to answer, and to begin."""


class Prefork:
    """One process; it ends by itself when this process does.

    Attributes:
        pid: a child of this process that has not been reaped.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock

    @staticmethod
    def fork(server: socket.socket, count: int) -> Generator[Prefork]:
        """Have the warm server fork processes, and yield each as soon as it waits.

        Each is requested before the previous one waits: a process takes two forks, and the server does only the first.

        Raises:
            OSError: if that fails.
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
        """Wait for a requested process; take over its socket."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(mine)
            if not (pid := _line(mine)):
                raise OSError("the warm server could not fork")
            mine.sendall(b"g")
            if not _line(mine):
                raise OSError("the worker died as it was forked")
            undo.pop_all()
            return Prefork(int(pid), mine)

    @staticmethod
    def running(preforked: Collection[Prefork]) -> Iterator[Prefork]:
        """Ask processes whether they run, and yield each that answers as soon as it does: some may be stopped.

        Those that have not been yielded may be ended meanwhile, but must not begin.
        """
        with selectors.DefaultSelector() as selector:
            for one in preforked:
                with contextlib.suppress(OSError, ValueError):  # it has died, or was ended
                    one._sock.sendall(b"\n")
                    selector.register(one._sock, selectors.EVENT_READ, one)
            deadline = time.monotonic() + ANSWER_TIMEOUT
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(OSError):
                        if _line(key.data._sock):
                            yield key.data

    def begin(self, request: StartRequest, record: Sequence[int]) -> int:
        """Make it a worker, to be reaped by the caller; return its pid.

        Args:
            record: descriptor of the record of its imports, if it is to keep one.

        Raises:
            OSError: if it has died; it has then been reaped.
        """
        self._sock.settimeout(ANSWER_TIMEOUT)
        order = json.dumps({"argv": list(request.argv), "env": dict(request.env)}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._sock, [order], [request.stdout, request.stderr, *record])
            if rest := order[sent:]:  # sending nothing would fail if it has read everything and closed the socket
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
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.enter_context(mine)
        with theirs:
            socket.send_fds(server, [b"f"], [theirs.fileno()])
        mine.settimeout(FORK_TIMEOUT)
        undo.pop_all()
    return mine


def _line(sock: socket.socket) -> bytes:
    """Return the line that the other side sends; it then waits for an answer."""
    said = b""
    while not said.endswith(b"\n"):
        if not (data := sock.recv(64)):
            return b""
        said += data
    return said
