"""What the HTTP server makes of bytes, without threads and a network."""

from __future__ import annotations

import socket
from typing import Any

from elastic_agents.probes.http_server import HttpRequest, HttpResponse, HttpServer, _Handler


class _Unstarted(HttpServer):
    """Answers to the handler that a test calls."""

    def __init__(self) -> None:
        self.found: list[HttpRequest] = []
        self._hosts = None
        self.sent = lambda request: None
        self.routes = {"/": self._respond, "/a": self._respond}

    def _respond(self, request: HttpRequest) -> HttpResponse:
        self.found.append(request)
        return HttpResponse.text(200, "page")

    def note(self, request: socket.socket, worth: int, seconds: float = 0.0) -> None:
        """Do nothing: no other thread closes the connection."""


def understood(data: bytes, end: bytes = b"\r\n\r\n") -> tuple[bytes, list[HttpRequest]]:
    """Return the response to bytes that a client sends and their end, and the request that a page got, if one did."""
    server: Any = _Unstarted()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(20)
        theirs.sendall(data + end)
        theirs.shutdown(socket.SHUT_WR)
        _Handler(ours, ("client", 0), server)
        return b"".join(iter(lambda: theirs.recv(65536), b"")), server.found
