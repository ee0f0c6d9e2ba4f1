"""What is answered to who asks whether an agent is well; the agent's loop is the test's own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from harness import asked

from elastic_agents import health as module
from elastic_agents.health import Health, health_listener
from elastic_agents.inbox import HowAreYou, Inbox
from elastic_agents.warm.meanwhile import Meanwhile
from elastic_launch.clock import MonotonicClock
from elastic_launch.errors import EndpointError


@pytest.fixture
def health() -> Iterator[Health]:
    with contextlib.closing(Health(health_listener(0, "127.0.0.1"))) as served:
        yield served


@contextlib.contextmanager
def loop(health: Health, phase: str) -> Iterator[Inbox[object]]:
    """An agent's loop that answers until it is told to end."""
    inbox: Inbox[object] = Inbox(MonotonicClock())

    def run() -> None:
        while isinstance(item := inbox.take(), HowAreYou):
            item.answer.put(phase)
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
    with health_listener(0, "127.0.0.1") as listener:
        port = listener.getsockname()[1]
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        with Meanwhile(listener), socket.create_connection(("127.0.0.1", port), timeout=20):
            # Who asks nothing holds up others for a moment only.
            for path, expected in (("livez?verbose", (200, "starting")), ("readyz", (503, "starting"))):
                assert asked(f"http://127.0.0.1:{port}/{path}") == expected
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
        assert listener.gettimeout() is None
        with contextlib.closing(Health(listener)) as served:
            assert asked(f"http://{served.endpoint}/livez") == (200, "starting")


@pytest.mark.parametrize(("phase", "ready"), [("waiting", 503), ("running", 200), ("stopping", 503)])
def test_an_agent_is_alive_whatever_it_does_and_ready_while_its_workers_train(
    health: Health, phase: str, ready: int
) -> None:
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


def test_a_client_that_hangs_up_or_asks_something_else_disturbs_nobody(health: Health) -> None:
    with socket.create_connection((health.endpoint.host, health.endpoint.port), timeout=20) as connection:
        connection.sendall(b"GET /livez")
    assert asked(f"http://{health.endpoint}/drain")[0] == 404
    assert asked(f"http://{health.endpoint}/livez?verbose")[0] == 200


def test_a_port_that_is_taken_is_told(health: Health) -> None:
    with pytest.raises(EndpointError) as refused:
        health_listener(health.endpoint.port, "127.0.0.1")
    assert f"--health-port, {health.endpoint.port}, cannot be had" in refused.value.message
    with pytest.raises(EndpointError):
        health_listener(health.endpoint.port, None)


def test_without_an_address_it_listens_at_all_of_them() -> None:
    with contextlib.closing(Health(health_listener(0, None))) as served:
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.create_connection((host, served.endpoint.port), timeout=20) as connection:
                connection.sendall(b"GET /nothing HTTP/1.0\r\n\r\n")
                assert b" 404 " in connection.makefile("rb").readline()
