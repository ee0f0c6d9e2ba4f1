"""The answers to health probes; the test plays the agent's loop."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness import asked, free_port

from elastic_agents.inbox import HowAreYou, Inbox
from elastic_agents.probes import health as module
from elastic_agents.probes.health import Health, health_listener, own_names
from elastic_agents.probes.http_server import HttpResponse
from elastic_agents.warm.fork_bootstrap import answering
from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.errors import EndpointError
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.wire.addresses import listen, routable_address


def config(port: int, host: str | None = None, **fields: Any) -> LaunchConfig:
    return LaunchConfig(Command((), ()), health_port=port, health_host=host, **fields)


def listener(port: int, host: str | None = None, **fields: Any) -> socket.socket:
    return health_listener(config(port, host, **fields))


@pytest.fixture
def health() -> Iterator[Health]:
    with contextlib.closing(Health(listen("127.0.0.1"))) as served:
        yield served


def test_healthz_is_livez(health: Health) -> None:
    assert asked(f"http://{health.endpoint}/healthz") == (200, "starting")
    with loop(health, "waiting"):
        assert asked(f"http://{health.endpoint}/healthz") == (200, "waiting")
        assert asked(f"http://{health.endpoint}/readyz") == (503, "waiting")


def test_pages_have_the_names_of_this_node() -> None:
    names = own_names(replace(config(1), http=Endpoint("Node.example.com", 9400), local_addr="10.0.0.5"))
    assert names >= {"node.example.com", "10.0.0.5", socket.gethostname().lower()}
    assert "train.default.svc" not in names
    assert "train.default.svc" in own_names(replace(config(1), http_hosts=("train.default.svc",)))


@contextlib.contextmanager
def loop(health: Health, phase: str) -> Iterator[Inbox[object]]:
    """An agent's loop that answers until it is stopped."""
    inbox: Inbox[object] = Inbox(MonotonicClock())

    def run() -> None:
        while isinstance(item := inbox.take(), HowAreYou):
            item.answer(Present(phase))
        inbox.close()

    thread = threading.Thread(target=run)
    thread.start()
    health.ask(inbox)
    try:
        yield inbox
    finally:
        inbox.put("end")
        thread.join()


def test_an_agent_that_still_imports_is_alive_and_not_ready(health: Health) -> None:
    assert asked(f"http://{health.endpoint}/livez") == (200, "starting")
    assert asked(f"http://{health.endpoint}/readyz") == (503, "starting")


def test_an_agent_that_still_imports_torch_is_alive_and_not_ready() -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        with answering(listener), socket.create_connection(("127.0.0.1", port), timeout=20):
            # A client that sends no request does not delay others.
            for path, expected in (("livez?verbose", (200, "starting")), ("readyz", (503, "starting"))):
                assert asked(f"http://127.0.0.1:{port}/{path}") == expected
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
        assert listener.gettimeout() is None
        with contextlib.closing(Health(listener)) as served:
            assert asked(f"http://{served.endpoint}/livez") == (200, "starting")


@pytest.mark.parametrize(("phase", "ready"), [("waiting", 503), ("running", 200), ("stopping", 503)])
def test_an_agent_is_always_alive_and_ready_while_its_workers_train(health: Health, phase: str, ready: int) -> None:
    with loop(health, phase):
        assert asked(f"http://{health.endpoint}/livez") == (200, phase)
        assert asked(f"http://{health.endpoint}/readyz") == (ready, phase)


def test_an_agent_that_answers_nothing_is_not_alive(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    health.ask(Inbox(MonotonicClock()))
    assert asked(f"http://{health.endpoint}/livez") == (503, "no answer within 0.05 s")
    assert asked(f"http://{health.endpoint}/readyz")[0] == 503


def test_an_agent_that_leaves_may_take_its_time(health: Health) -> None:
    with loop(health, "running"):
        pass
    assert asked(f"http://{health.endpoint}/livez") == (200, "leaving")
    assert asked(f"http://{health.endpoint}/readyz") == (503, "leaving")


def test_a_page_shows_what_the_agent_has_just_said_and_a_probe_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    pages: dict[str, module.Page] = {"/": lambda present, _: HttpResponse.text(200, present.phase)}
    with contextlib.closing(Health(listen("127.0.0.1"), pages)) as served:
        served.ask(Inbox(MonotonicClock()))  # which is not read
        served.heard(Present("running"))
        assert asked(f"http://{served.endpoint}/") == (200, "running")
        assert asked(f"http://{served.endpoint}/livez")[0] == 503


def test_the_end_is_served_until_all_who_follow_a_page_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that asks once, and another that asks again: the server ends once the second has the end."""
    monkeypatch.setattr(module, "LAST", 60.0)
    pages: dict[str, module.Page] = {"/live": lambda present, _: HttpResponse.text(200, present.phase)}
    served = Health(listen("127.0.0.1"), pages)
    served.ask(Inbox(MonotonicClock()))
    served.heard(Present("running"))
    one, other = (f"http://{served.endpoint}/live?page={page}" for page in "ab")
    assert [asked(one), asked(other)] == [(200, "running")] * 2
    served.ended(Present("ended"))
    closing = threading.Thread(target=served.close)
    closing.start()
    assert asked(one) == (200, "ended")
    assert closing.is_alive()
    assert asked(other) == (200, "ended")
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("read", [False, True])
def test_the_end_is_not_served_for_long(monkeypatch: pytest.MonkeyPatch, read: bool) -> None:
    """Not at all to nobody, and to a reader that asks no more only for so long."""
    monkeypatch.setattr(module, "LAST", 0.2 if read else 60.0)
    pages: dict[str, module.Page] = {"/live": lambda present, _: HttpResponse.text(200, present.phase)}
    served = Health(listen("127.0.0.1"), pages)
    if read:
        assert asked(f"http://{served.endpoint}/live") == (200, "starting")
    served.ended(Present("ended"))
    began = time.monotonic()
    served.close()
    assert time.monotonic() - began < 30


def test_clients_that_hang_up_or_send_other_requests_do_no_harm(health: Health) -> None:
    with socket.create_connection((health.endpoint.host, health.endpoint.port), timeout=20) as connection:
        connection.sendall(b"GET /livez")
    assert asked(f"http://{health.endpoint}/drain")[0] == 404
    assert asked(f"http://{health.endpoint}/livez?verbose")[0] == 200


def test_a_port_in_use_is_reported(health: Health) -> None:
    port = health.endpoint.port
    with pytest.raises(EndpointError) as refused:
        listener(port, local_addr="127.0.0.1")
    assert f"--health-port {port}: this node cannot listen there: Port {port} of 127.0.0.1" in refused.value.message
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(EndpointError, match=f"--health-port {host}:{port}: .* Address already in use"):
            listener(port, host)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(EndpointError, match=r"192\.0\.2\.1 is not an address of this host"):
        listener(free_port(), "192.0.2.1")


@pytest.mark.parametrize(
    ("host", "fields", "expected"),
    [
        (None, {}, routable_address()),
        (None, {"local_addr": "127.0.0.2"}, "127.0.0.2"),
        (None, {"endpoint": Endpoint("127.0.0.5", 29400), "limits": Limits(1, 2)}, "127.0.0.1"),
        # Not resolved: its DNS may take longer than a startup probe waits.
        (None, {"endpoint": Endpoint("no.such.host.invalid", 29400), "limits": Limits(1, 2)}, routable_address()),
        ("127.0.0.3", {"local_addr": "127.0.0.2"}, "127.0.0.3"),
    ],
)
def test_it_listens_at_one_address_that_given_or_that_advertised(
    host: str | None, fields: dict[str, Any], expected: str
) -> None:
    with listener(free_port(), host, **fields) as found:
        assert found.getsockname()[0] == expected


def test_it_listens_at_all_addresses_if_asked_to() -> None:
    with contextlib.closing(Health(listener(free_port(), "0.0.0.0"))) as served:
        for host in ("127.0.0.1", "127.0.0.2"):
            assert asked(f"http://{host}:{served.endpoint.port}/nothing")[0] == 404


def test_the_agent_is_asked_at_a_bounded_rate_however_many_probes_come(health: Health) -> None:
    questions = 0
    inbox: Inbox[object] = Inbox(MonotonicClock())

    def run() -> None:
        nonlocal questions
        while isinstance(item := inbox.take(), HowAreYou):
            questions += 1
            item.answer(Present("running"))

    thread = threading.Thread(target=run)
    thread.start()
    health.ask(inbox)
    began = time.monotonic()
    request = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    for _ in range(20):
        connections = [
            socket.create_connection((health.endpoint.host, health.endpoint.port), timeout=20) for _ in range(8)
        ]
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            with connection:
                assert connection.recv(17) == b"HTTP/1.1 200 OK\r\n"
    took = time.monotonic() - began
    inbox.put("end")
    thread.join()
    assert questions <= took / module.ASK_EVERY + 1
