"""The server behind the health port, against malicious clients; sockets and threads are real."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from harness import SLOWNESS, asked, wait_for
from http_heads import understood
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_agents.probes import http_server as module
from elastic_agents.probes.http_server import (
    MAX_CONNECTIONS,
    MAX_HEAD,
    HttpRequest,
    HttpResponse,
    HttpServer,
    Responder,
)
from elastic_launch.rendezvous.wire.addresses import listen

LARGE = random.Random(1).randbytes(4_000_000)


class Server:
    """A server with a page, a large page, and a page that has no response until it may go on."""

    def __init__(self) -> None:
        self.listener = listen("127.0.0.1")
        self.address = ("127.0.0.1", int(self.listener.getsockname()[1]))
        self.late: list[HttpRequest] = []
        self.go_on = threading.Event()
        routes = {
            "/": lambda request: HttpResponse.text(200, f"page {request.query}".strip()),
            "/large": lambda _: HttpResponse(200, LARGE, "application/octet-stream"),
            "/late": self._late,
        }
        self.http = HttpServer(self.listener, routes)

    def _late(self, request: HttpRequest) -> HttpResponse:
        self.late.append(request)
        assert self.go_on.wait(60)
        return HttpResponse.text(200, "now")

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def says(self, request: bytes) -> bytes:
        """Send bytes over one connection; return the entire response."""
        with self.connect() as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    @property
    def connections(self) -> int:
        return len(self.http._connections)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    try:
        yield made
    finally:
        made.go_on.set()
        made.http.close()
        made.listener.close()


def get(path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", 200),
        ("[::1]:9400", 200),
        ("10.1.2.3", 200),
        ("localhost:9400", 200),
        ("a.localhost", 200),
        ("NODE-0.:9400", 200),
        ("evil.example.com:9400", 421),
        ("127.0.0.1.evil.example.com", 421),
        ("node-0.evil.example.com", 421),
        ("localhost.evil.example.com", 421),
        ("[::1].evil.example.com", 421),
        ("127.0.0.1@evil.example.com", 421),
    ],
)
def test_a_website_cannot_ask_by_a_name_of_its_own(host: str, status: int) -> None:
    listener = listen("127.0.0.1")
    served = HttpServer(listener, {"/": lambda _: HttpResponse.text(200, "page")}, hosts={"node-0"})
    with contextlib.closing(listener), contextlib.closing(served):
        with socket.create_connection(listener.getsockname()[:2], timeout=20) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost:  {host} \r\n\r\n".encode())
            said = b"".join(iter(lambda: connection.recv(65536), b""))
        assert int(said.split()[1]) == status
        assert (b"Ask by its address or its host's name, or start the agent with --http-host" in said) == (
            status == 421
        )


def test_metrics_and_probes_are_answered_under_any_name() -> None:
    listener = listen("127.0.0.1")
    served = HttpServer(listener, {"/metrics": lambda _: HttpResponse.text(200, "steps 1")}, hosts={"node-0"})
    with contextlib.closing(listener), contextlib.closing(served):
        with socket.create_connection(listener.getsockname()[:2], timeout=20) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: train.default.svc:9400\r\n\r\n")
            said = b"".join(iter(lambda: connection.recv(65536), b""))
        assert int(said.split()[1]) == 200


def test_a_response_conforms_to_http_1_1(server: Server) -> None:
    client = http.client.HTTPConnection(*server.address, timeout=20)
    with contextlib.closing(client):
        client.request("GET", "/?a=1")
        answer = client.getresponse()
        assert (answer.version, answer.status, answer.read()) == (11, 200, b"page a=1\n")
        assert answer.headers["Connection"] == "close"
        assert abs(email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()) < 60
        client.request("HEAD", "/large")
        answer = client.getresponse()
        assert (int(answer.headers["Content-Length"]), answer.read()) == (len(LARGE), b"")
        client.request("GET", "/large")
        assert client.getresponse().read() == LARGE


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"\r\nGET / HTTP/1.1\r\nhOST:\r\nX: \xff\r\n\r\n", 200),
        (b"GET http://here/?x HTTP/1.1\r\nHost: here\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n", 404),
        (b"GET //etc/passwd HTTP/1.1\r\nHost: here\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nabcde", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET /" + b"x" * MAX_HEAD, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * MAX_HEAD + b"\r\n\r\n", 431),
    ],
)
def test_each_request_has_one_response_and_the_connection_ends(server: Server, request_: bytes, status: int) -> None:
    head, _, body = server.says(request_).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode())
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert (b"\r\nAllow: GET, HEAD" in head) is (status == 405)


def test_a_responder_may_have_its_response_later(server: Server) -> None:
    with server.connect() as first, server.connect() as second:
        first.sendall(get("/late"))
        first.shutdown(socket.SHUT_WR)  # as netcat does
        assert asked(f"http://127.0.0.1:{server.address[1]}/") == (200, "page")
        second.sendall(get("/late"))
        server.go_on.set()
        for connection in (first, second):
            assert connection.makefile("rb").read().endswith(b"\r\n\r\nnow\n")
    assert all(request.path == "/late" for request in server.late)


def test_thousands_of_idle_connections_cost_few_threads_and_keep_no_probe_out(server: Server) -> None:
    """With idle clients everywhere, a client with a request is served, and the server never exceeds its bounds."""
    threads, idle = threading.active_count(), []
    with contextlib.ExitStack() as stack:
        for number in range(600):
            idle.append(stack.enter_context(server.connect()))
            if number % 100 == 99:
                began = time.monotonic()
                assert asked(f"http://127.0.0.1:{server.address[1]}/") == (200, "page")
                assert time.monotonic() - began < 5 * SLOWNESS
                assert server.connections <= MAX_CONNECTIONS + 1  # one more while a connection is being chosen
        wait_for("ended threads", lambda: threading.active_count() <= threads + MAX_CONNECTIONS)
        # The oldest ones are closed.
        idle[0].settimeout(20)
        assert idle[0].recv(1) == b""
        idle[-1].sendall(get())
        assert idle[-1].recv(15) == b"HTTP/1.1 200 OK"


def test_a_client_that_waits_for_its_response_is_not_ended_for_idle_ones(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        patient = stack.enter_context(server.connect())
        patient.sendall(get("/late"))
        for _ in range(5 * MAX_CONNECTIONS):
            stack.enter_context(server.connect())
        server.go_on.set()
        assert patient.makefile("rb").read().endswith(b"now\n")


def test_a_connection_has_a_deadline_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the client sends one byte at a time, nothing, or does not read."""
    monkeypatch.setattr(module, "DEADLINE", 0.6)
    server = Server()
    try:
        with server.connect() as drips, server.connect() as silent, server.connect() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(get("/large"))
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - began < 20 * SLOWNESS:
                    drips.sendall(b"G")
                    time.sleep(0.05)
            assert time.monotonic() - began < 20 * SLOWNESS
            assert silent.recv(1) == b""
            deadline = time.monotonic() + 20 * SLOWNESS
            while server.connections and time.monotonic() < deadline:
                time.sleep(0.02)
            assert server.connections == 0
    finally:
        server.http.close()
        server.listener.close()


def test_it_is_closed_with_all_that_it_holds_and_leaves_its_listener() -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    made = Server()
    with made.connect() as idle, made.connect() as waits, made.connect() as deaf:
        waits.sendall(get("/late"))
        deaf.sendall(get("/large"))
        wait_for("connections", lambda: made.connections == 3)  # those that it has not accepted are not its own
        timer = threading.Timer(0.3, made.go_on.set)
        timer.start()
        made.http.close()
        timer.join()
        assert idle.recv(1) == b""
        assert made.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        assert made.listener.gettimeout() is None
    made.listener.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@given(
    st.binary(max_size=200)
    | st.lists(st.sampled_from([b"GET", b" ", b"/", b"HTTP/1.1", b"\r\n", b"Host:", b"x"]), max_size=20).map(b"".join)
)
@example(b"GET /a HTTP/1.1\r\nHost: x")
@example(b"HEAD http://x/a?b HTTP/1.0")
@settings(max_examples=300, deadline=None)
def test_any_input_is_a_request_or_gets_an_error_status(head: bytes) -> None:
    said, requests = understood(head)
    for request in requests:
        assert head.lstrip(b"\r\n").startswith((b"GET ", b"HEAD "))
        assert request.path.isascii()
    assert not said or int(said.split()[1]) in ((200,) if requests else (400, 404, 405, 505))


def _respond(server: Server, path: str, respond: Responder) -> None:
    server.http.routes = {**server.http.routes, path: respond}


def test_a_responder_that_fails_is_logged_and_the_server_answers_others(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:

    def fail(request: HttpRequest) -> HttpResponse:
        raise KeyError("loss")

    _respond(server, "/fails", fail)
    for _ in range(2):
        with server.connect() as other:
            assert server.says(get("/fails")) == b""
            other.sendall(get())
            assert other.makefile("rb").read().endswith(b"page\n")
        assert server.says(get()).endswith(b"page\n")
    # A client may see the connection's end first.
    wait_for("both lines", lambda: caplog.text.count("an HTTP request has failed: KeyError: 'loss'") == 2)


def test_closing_waits_for_a_blocked_response_only_so_long(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSING", 0.2)
    blocked, go_on = threading.Event(), threading.Event()

    def block(request: HttpRequest) -> HttpResponse:
        blocked.set()
        go_on.wait(60)
        return HttpResponse.text(200, "late")

    _respond(server, "/blocks", block)
    with server.connect() as client:
        client.sendall(get("/blocks"))
        assert blocked.wait(30)
        server.http.close()
        assert "the HTTP server does not end: a response takes more than 0.2 s" in caplog.text
        go_on.set()
        monkeypatch.setattr(module, "CLOSING", 30.0)
        server.http.close()
    assert not server.http._thread.is_alive()
