"""Answers at the health port while the process imports torch; see :mod:`elastic_agents.health` for what comes later.

It leaves no thread to a fork. While a library is loaded no thread runs: a probe waits until then.
"""

from __future__ import annotations

import contextlib
import socket

from elastic_agents.http_server import HttpServer, Response

__all__ = ["Meanwhile"]


class Meanwhile:
    """Says, while entered, that the agent starts: that it is alive, and not ready.

    Without room for a thread or for descriptors it does nothing: probes are answered later.

    Args:
        listener: which goes on to listen when this ends.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        routes = {
            "/livez": lambda _: Response.text(200, "starting"),
            "/readyz": lambda _: Response.text(503, "starting"),
        }
        with contextlib.suppress(OSError, RuntimeError):
            self._held.callback(HttpServer(self._listener, routes, name="meanwhile").close)

    def __exit__(self, *error: object) -> None:
        self._held.close()
