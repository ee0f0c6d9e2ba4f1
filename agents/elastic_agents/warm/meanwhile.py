"""Answers at the health port while the process imports torch; see :mod:`elastic_agents.health` for what comes later.

It must leave no thread to a fork and bring no modules into workers, so it is one thread that can be ended, and looks
at no more of a request than its path. While a library is loaded no thread runs: who asks then waits.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

__all__ = ["Meanwhile"]

READ_TIMEOUT = 0.5
"""Seconds that a part of a request may take to come: others wait meanwhile, and so does the end."""

MOST_PARTS = 4
"""So many parts a request may come in, of 4096 bytes at most."""


class Meanwhile:
    """Says, while entered, that the agent starts: that it is alive, and not ready.

    Without room for a thread or for descriptors it does nothing: who asks is answered later.

    Args:
        listener: which goes on to listen when this ends.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, RuntimeError):
            held.callback(self._listener.setblocking, True)
            self._listener.setblocking(False)
            told, tell = map(held.enter_context, socket.socketpair())
            selector = held.enter_context(selectors.DefaultSelector())
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(told, selectors.EVENT_READ)
            thread = threading.Thread(target=self._run, args=(selector, told), name="meanwhile", daemon=True)
            thread.start()
            held.callback(thread.join)
            held.callback(tell.close)
            self._held = held.pop_all()

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _run(self, selector: selectors.BaseSelector, told: socket.socket) -> None:
        while told not in [key.fileobj for key, _ in selector.select()]:
            with contextlib.suppress(OSError):  # who asks has hung up, or asks nothing
                self._answer(self._listener.accept()[0])

    def _answer(self, asker: socket.socket) -> None:
        with asker:
            asker.settimeout(READ_TIMEOUT)
            asked = b""
            for _ in range(MOST_PARTS):
                asked += asker.recv(4096)
                if b"\r\n\r\n" in asked:
                    break
            path = asked.split(maxsplit=2)[1:2]
            status = b"200 OK" if path and path[0].partition(b"?")[0] == b"/livez" else b"503 Service Unavailable"
            head = b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 9\r\nConnection: close"
            asker.sendall(b"HTTP/1.0 " + status + b"\r\n" + head + b"\r\n\r\nstarting\n")
