"""A small HTTP/1.1 server for probes, metrics and pages: one thread, a bounded number of connections.

A connection carries one request and is closed after the response. The whole connection has one deadline, so a client
that sends or reads one byte at a time holds it no longer than a silent client. If all connections are in use, a new one
replaces the oldest one that has not sent its request yet, so a flood of idle connections blocks no probe.

It imports little, as it also runs during the import of torch, in a process that forks workers.
"""

from __future__ import annotations

import contextlib
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from elastic_launch.system.threads import ThreadDied, VitalThread
from elastic_launch.system.wake import Waker

_log = logging.getLogger("elastic_launch.http")

MAX_CONNECTIONS = 32

DEADLINE = 10.0
"""Seconds from accepting a connection to its end, whatever the client does."""

LINGER = 1.0
"""Seconds in which the client may still send after the response: on an earlier close the kernel might discard it."""

OPEN = ("/metrics", "/livez", "/healthz", "/readyz")
"""Paths that are answered for any Host header: monitoring systems ask by a service's name. They show no output."""

MAX_HEAD = 8192
"""Bytes of a request's line and headers."""

ACCEPTS, ACCEPT_EVERY = 32, 0.005
"""At most so many connections are accepted at once, then none for so many seconds: a flood cannot starve the agent."""

RESTART = 1.0
"""Seconds after which the server listens again if its thread has failed."""

CLOSING = 5.0
"""Seconds in which its thread must end."""

ASK_AGAIN = 0.05
"""Seconds after which a responder that had no response is called again, unless it wakes the server before."""

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A GET or HEAD request.

    Attributes:
        query: the part after the question mark.
        host: the name by which the client asks for this server, without a port; empty if it gives none.
        at: when it was complete, by ``time.monotonic``.
        bare: whether it is a HEAD request: the response is sent without its body.
    """

    path: str
    query: str
    at: float
    bare: bool = False
    host: str = ""


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


Responder = Callable[[HttpRequest], HttpResponse | None]
"""Called in the server's thread, so it must not block. It returns None while it has no response; it is called again."""


class HttpServer:
    """Serves until it is closed.

    An error in a responder ends all connections, is logged, and the server starts again: a probe that is never answered
    again would end a healthy pod.

    Args:
        listener: keeps listening after the server is closed: its owner closes it.
        routes: responders by path.
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
    ) -> None:
        self._listener, self._routes, self._hosts = listener, routes, hosts
        self._connections: dict[int, _Connection] = {}  # by number, oldest first
        self._next_number = 0
        self._accept_at = 0.0
        self._listening = False
        self._closing = False
        self._lock = threading.Lock()  # while a thread that failed is replaced
        with contextlib.ExitStack() as undo:
            undo.callback(listener.setblocking, True)
            listener.setblocking(False)
            self._waker = Waker()
            undo.callback(self._waker.close)
            self._selector = selectors.DefaultSelector()
            undo.callback(lambda: self._selector.close())
            self._thread = self._started(name)
            self._held = undo.pop_all()

    def wake(self) -> None:
        """Call responders that had no response again now; may be called from any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Close all connections and end the thread; one that a responder blocks is left behind with what it uses."""
        with self._lock:
            self._closing = True
        self.wake()
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            _log.error("the HTTP server does not end: a response takes more than %g s", CLOSING)
        else:
            self._held.close()

    def _started(self, name: str) -> VitalThread:
        self._selector.register(self._waker, selectors.EVENT_READ)
        thread = VitalThread(self._run, name, owner=self._failed)
        thread.start()
        return thread

    def _failed(self, died: ThreadDied) -> None:
        """Called from the thread that ends."""
        with self._lock:
            if self._closing:
                return
            _log.error("the HTTP server has failed, and starts again: %s", died.error)
            self._selector.close()
            try:
                self._selector = selectors.DefaultSelector()
                self._thread = self._started(died.name)
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left
                _log.error("its port is not answered any more: %s", error)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for connection in self._connections.values():
                connection.sock.close()
            self._connections.clear()
            self._listening, self._accept_at = False, time.monotonic() + RESTART

    def _turn(self) -> None:
        now = time.monotonic()
        if not self._listening and now >= self._accept_at:
            self._listen(True)
        ready = self._selector.select(max(0.0, self._due() - now))
        for key, _ in ready:
            if key.fileobj is self._waker:
                self._waker.clear()
            elif key.fileobj is not self._listener:
                self._go_on(key.data)
        # After existing connections are served: those may have sent their requests, and then do not count as idle.
        if any(key.fileobj is self._listener for key, _ in ready):
            self._accept()
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if now >= connection.deadline:
                self._end(connection)
            elif connection.request is not None and not connection.answered:
                self._ask(connection)

    def _due(self) -> float:
        """When there is something to do even if no data arrives."""
        due = [connection.deadline for connection in self._connections.values()]
        if any(connection.waiting for connection in self._connections.values()):
            due.append(time.monotonic() + ASK_AGAIN)
        if not self._listening:
            due.append(self._accept_at)
        return min(due, default=time.monotonic() + 60.0)

    def _listen(self, wanted: bool) -> None:
        if wanted:
            self._selector.register(self._listener, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._listener)
        self._listening = wanted

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor is left: closing another connection may help
                if self._connections:
                    self._end(min(self._connections.values(), key=_Connection.worth))
                break
            sock.setblocking(False)
            connection = _Connection(sock, self._next_number, time.monotonic() + DEADLINE)
            self._next_number += 1
            self._connections[connection.number] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._go_on(connection)
            if len(self._connections) > MAX_CONNECTIONS:
                self._end(min(self._connections.values(), key=_Connection.worth))
        self._accept_at = time.monotonic() + ACCEPT_EVERY
        self._listen(False)

    def _go_on(self, connection: _Connection) -> None:
        """Read or write what is possible without blocking."""
        try:
            if connection.answered and connection.unsent:
                self._send(connection)
                return
            data = connection.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
        elif not connection.answered:
            connection.head += data
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        head, end, _ = connection.head.lstrip(b"\r\n").partition(b"\r\n\r\n")
        if not end and len(connection.head) <= MAX_HEAD:
            return
        fits = end and len(head) <= MAX_HEAD
        found = _parse(bytes(head)) if fits else HttpResponse.text(431, "The request is too long.")
        if isinstance(found, HttpRequest) and not self._is_asked(found):
            hint = "Ask by its address or its host's name, or start the agent with --http-host and this name."
            found = HttpResponse.text(421, f"This server is not {found.host}. {hint}")
        if isinstance(found, HttpResponse):
            self._answer(connection, found)
            return
        connection.request = found
        # Until there is a response, incoming data is ignored, and the client may already have closed its side.
        self._selector.unregister(connection.sock)
        self._ask(connection)

    def _is_asked(self, request: HttpRequest) -> bool:
        return self._hosts is None or request.path in OPEN or _meant(request.host, self._hosts)

    def _ask(self, connection: _Connection) -> None:
        assert connection.request is not None
        responder = self._routes.get(connection.request.path)
        if responder is not None:
            response = responder(connection.request)
        else:
            response = HttpResponse.text(404, f"There is {', '.join(self._routes)}.")
        if response is not None:
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)
            self._answer(connection, response)

    def _answer(self, connection: _Connection, response: HttpResponse) -> None:
        connection.answered = True
        bare = connection.request is not None and connection.request.bare
        connection.unsent += _head(response) + (b"" if bare else response.body)
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.sock.send(connection.unsent)]
            connection.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:
            self._end(connection)
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        connection.deadline = min(connection.deadline, time.monotonic() + LINGER)

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection.number]
        if not connection.waiting:
            self._selector.unregister(connection.sock)
        connection.sock.close()


class _Connection:
    """A client's connection: receives the request, waits for the response, sends it, and is closed.

    Attributes:
        request: once it is complete.
        answered: whether there is a response; ``unsent`` is the rest of it.
    """

    __slots__ = ("answered", "deadline", "head", "number", "request", "sock", "unsent")

    def __init__(self, sock: socket.socket, number: int, deadline: float) -> None:
        self.sock, self.number, self.deadline = sock, number, deadline
        self.head, self.unsent = bytearray(), bytearray()
        self.request: HttpRequest | None = None
        self.answered = False

    @property
    def waiting(self) -> bool:
        return self.request is not None and not self.answered

    def worth(self) -> tuple[bool, bool, int]:
        """The least is closed first: an answered connection, then one without a request; among these the oldest."""
        return not self.answered or bool(self.unsent), self.answered or self.waiting, self.number


def _parse(head: bytes) -> HttpRequest | HttpResponse:
    """Return the request, or the response that says what is wrong with it (RFC 9112)."""
    line, *fields = head.split(b"\r\n")
    asked = re.fullmatch(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9])\.([0-9])", line)
    if asked is None:
        return HttpResponse.text(400, "The request line is malformed.")
    method, target, major, minor = asked.groups()
    if major != b"1":
        return HttpResponse.text(505, "This is a server for HTTP/1.1.")
    hosts = []
    for field in fields:
        found = re.fullmatch(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00\r\n]*)", field)
        if found is None:
            return HttpResponse.text(400, "A header is malformed.")
        if found[1].lower() == b"host":
            hosts.append(found[2].strip(b" \t"))
    if len(hosts) > 1 or (minor != b"0" and not hosts):
        return HttpResponse.text(400, "There must be one Host header.")
    if method not in (b"GET", b"HEAD"):
        return HttpResponse.text(405, "Use GET or HEAD.")
    path, _, query = re.sub(rb"^https?://[^/?]*", b"", target, flags=re.IGNORECASE).decode("ascii").partition("?")
    host = re.sub(rb":[0-9]*$", b"", hosts[0]).decode("ascii", "replace") if hosts else ""
    return HttpRequest(path or "/", query, time.monotonic(), method == b"HEAD", host)


def _meant(host: str, names: Collection[str]) -> bool:
    """Whether a client that asks for this host means this server: a website's page can only ask for a name."""
    import ipaddress

    host = host.lower().rstrip(".")
    if host in ("", "localhost") or host.endswith(".localhost") or host in names:
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _head(response: HttpResponse) -> bytes:
    at = time.gmtime()
    lines = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"Date: {_DAYS[at.tm_wday]}, {at.tm_mday:02} {_MONTHS[at.tm_mon - 1]} {at.tm_year} "
        f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02} GMT",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET, HEAD"] if response.status == 405 else []),
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii")
