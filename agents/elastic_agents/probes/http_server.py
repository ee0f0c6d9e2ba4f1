"""The HTTP server of probes, metrics and pages: the standard library's, with bounds that no client can exceed.

A connection has a thread, carries one request and is closed after the response. As a whole it has one deadline, so a
client that sends or reads one byte at a time holds it no longer than a silent client. If all connections are in use, a
new one replaces the oldest one that has not sent its request yet, so a flood of idle connections blocks no probe.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger("elastic_launch.http")

MAX_CONNECTIONS = 32

DEADLINE = 10.0
"""Seconds from accepting a connection to its end, whatever the client does."""

LINGER = 1.0
"""Seconds in which the client may still send after the response: on an earlier close the kernel might discard it."""

LOOK_EVERY = 0.1
"""Seconds after which the server looks for connections that are past their deadline, and whether it is to end."""

OPEN = ("/metrics", "/livez", "/healthz", "/readyz")
"""Paths that are answered for any Host header: monitoring systems ask by a service's name. They show no output."""

MAX_HEAD = 8192
"""Bytes of a request's line and headers."""

ACCEPTS, ACCEPT_PAUSE = 32, 0.02
"""After so many connections none is accepted for so many seconds: a flood cannot starve the agent."""

CLOSING = 5.0
"""Seconds in which all threads must end."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A GET or HEAD request."""

    path: str
    query: str  # the part after the question mark
    at: float  # when it was complete, by ``time.monotonic``
    client: str = ""  # its host, and the program that it says it is


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response to send."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def text(cls, status: int, text: str) -> HttpResponse:
        """Return one line of plain text."""
        return cls(status, f"{text}\n".encode())


Responder = Callable[[HttpRequest], HttpResponse]
"""Called in the connection's thread, which it may hold for a few seconds; several may be called at the same time."""


@dataclass(slots=True)
class _Connection:
    thread: threading.Thread
    deadline: float
    worth: int = 1  # 0: answered, 1: without a request, 2: being answered; the least and oldest is closed first


class HttpServer(ThreadingHTTPServer):
    """Serves until it is closed.

    An error of a responder ends its connection, and is logged.

    Args:
        listener: keeps listening after the server is closed: its owner closes it.
        routes: responders by path.
        sent: called with each request that a responder has answered, once the response is sent.
        hosts: names by which it may be asked for, besides addresses and ``localhost``; None: any. A website that has
            its own name resolve to this host (DNS rebinding) could otherwise read what a browser can reach here.

    Raises:
        OSError: if no descriptor is left.
        RuntimeError: if no thread is left.
    """

    def __init__(
        self,
        listener: socket.socket,
        routes: Mapping[str, Responder],
        *,
        name: str = "http",
        hosts: Collection[str] | None = None,
        sent: Callable[[HttpRequest], object] = lambda request: None,
    ) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.routes, self._hosts, self.sent = routes, hosts, sent
        self._connections: dict[socket.socket, _Connection] = {}  # the oldest first
        self._lock = threading.Lock()  # a socket is used by other threads than its own only with it
        self._accepted = 0
        self._closing = False
        self._name = name
        listener.setblocking(False)
        self._thread = VitalThread(self.serve_forever, name, (LOOK_EVERY,), owner=self._failed)
        try:
            self._thread.start()
        except RuntimeError:
            listener.setblocking(True)
            raise

    def close(self) -> None:
        """End all connections and threads; one that a responder blocks is left behind."""
        until = time.monotonic() + CLOSING
        self._closing = True
        self.shutdown()
        with self._lock:
            threads = [self._thread, *(connection.thread for connection in self._connections.values())]
            for request in list(self._connections):
                self._end(request)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            _log.error("the HTTP server does not end: a response takes more than %g s", CLOSING)
        self.socket.setblocking(True)

    def asked_for(self, host: str) -> bool:
        """Whether a client that asks for this host means this server: a website's page can only ask for a name."""
        host = host.lower().rstrip(".")
        if self._hosts is None or host in ("", "localhost", *self._hosts) or host.endswith(".localhost"):
            return True
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
        return False

    def note(self, request: socket.socket, worth: int, seconds: float = DEADLINE) -> None:
        """Set what a connection is worth, and the seconds in which it has to end, if those are fewer than before."""
        with self._lock:
            if (connection := self._connections.get(request)) is not None:
                connection.worth = worth
                connection.deadline = min(connection.deadline, time.monotonic() + seconds)

    def get_request(self) -> tuple[socket.socket, Any]:
        self._accepted += 1
        if self._accepted % ACCEPTS == 0:
            time.sleep(ACCEPT_PAUSE)
        try:
            return super().get_request()
        except (BlockingIOError, ConnectionError):
            raise
        except OSError:  # no descriptor is left: closing another connection may help
            self._make_room(0)
            time.sleep(ACCEPT_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = VitalThread(self.process_request_thread, self._name, (request, client_address), owner=self._failed)
        with self._lock:
            self._connections[request] = _Connection(thread, time.monotonic() + DEADLINE)
        thread.start()
        self._make_room(MAX_CONNECTIONS)

    def service_actions(self) -> None:
        now = time.monotonic()
        with self._lock:
            for request in [request for request, known in self._connections.items() if known.deadline <= now]:
                self._end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # the client has hung up, or was too slow
            _log.error("an HTTP request has failed: %s: %s", type(error).__name__, error)

    def _make_room(self, most: int) -> None:
        with self._lock:
            if len(self._connections) > most:
                self._end(min(self._connections, key=lambda request: self._connections[request].worth))

    def _end(self, request: socket.socket) -> None:
        """Have the connection's thread end, which closes the socket."""
        del self._connections[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _failed(self, died: ThreadDied) -> None:
        """Called from the thread that ends."""
        if not self._closing:
            _log.error("a thread of the HTTP server has failed: %s", died.error)


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, and sends the response."""

    server: HttpServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of the response to a request line that cannot be read

    def handle(self) -> None:
        head = b""
        while not (whole := head.lstrip(b"\r\n")).endswith(b"\r\n\r\n"):
            line = self.rfile.readline(MAX_HEAD + 1 - len(head))
            head += line
            if len(head) > MAX_HEAD:
                self.command, self.request_version = "", self.default_request_version
                self.send_error(431, "The request is too long.")
                return
            if not line:  # the client has hung up, or was too slow
                return
        connection, self.rfile = self.rfile, BytesIO(whole)
        try:
            self.handle_one_request()
        finally:
            self.rfile = connection

    def parse_request(self) -> bool:
        """Read the request's head; refuse what the standard library lets pass (RFC 9112)."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        if not re.fullmatch(r"\S+ [!-~]+ HTTP/1\.[0-9]", self.requestline):
            self.send_error(400, "The request line is malformed.")
        elif self.headers.defects or any("\n" in value for value in self.headers.values()):
            self.send_error(400, "A header is malformed.")
        elif len(hosts) > 1 or (self.request_version != "HTTP/1.0" and not hosts):
            self.send_error(400, "There must be one Host header.")
        else:
            return True
        return False

    def do_GET(self) -> None:
        path, _, query = re.sub(r"^https?://[^/?]*", "", self.path, flags=re.IGNORECASE).partition("?")
        host = re.sub(r":[0-9]*$", "", self.headers.get("Host", "").strip())
        responder = self.server.routes.get(path or "/")
        request = None
        if path not in OPEN and not self.server.asked_for(host):
            hint = "Ask by its address or its host's name, or start the agent with --http-host and this name."
            response = HttpResponse.text(421, f"This server is not {host}. {hint}")
        elif responder is None:
            response = HttpResponse.text(404, f"There is {', '.join(self.server.routes)}.")
        else:
            self.server.note(self.request, worth=2)
            client = f"{self.client_address[0]} {self.headers.get('User-Agent', '')}"
            request = HttpRequest(path or "/", query, time.monotonic(), client)
            response = responder(request)
        self._send(response)
        if request is not None:
            self.server.sent(request)

    do_HEAD = do_GET

    def finish(self) -> None:
        super().finish()
        self.server.note(self.request, worth=0, seconds=LINGER)
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)
            for _ in iter(partial(self.request.recv, 4096), b""):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == 501:  # no method of this class has its name
            code, message = 405, "Use GET or HEAD."
        self._send(HttpResponse.text(code, message or "Bad request."))

    def _send(self, response: HttpResponse) -> None:
        self.send_response_only(response.status)
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        if response.status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests are not logged."""
