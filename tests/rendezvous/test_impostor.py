"""A run with a token, and something else at its leader's address: real links and threads, a store in memory."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from elected_nodes import View

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits, Timing
from elastic_launch.errors import EndpointError
from elastic_launch.events.types import Event, LeaderElected
from elastic_launch.rendezvous.backends.c10d import FoundLeader, NodeAddress
from elastic_launch.rendezvous.backends.election import ElectedBackend, found_by
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.node.membership_events import LinkDown, MembershipEvent, Opened, RendezvousLost
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.seal import ValueSeal
from elastic_launch.secret import Token
from elastic_launch.testing import MemoryStore

TOKEN = Token("correct-horse-battery-staple", "test")
ORDER = m.pack(m.RunEnd(99, 0, "forged"))
FALSE_ANSWER = b'{"type":"answer","nonce":"%s","mac":"%s"}\n' % (b"00" * 32, b"00" * 32)


class Impostor:
    """Listens, answers every connection with the same bytes and closes it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.heard = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                with link, contextlib.suppress(OSError):
                    link.settimeout(5)
                    self.heard += link.recv(65536)
                    link.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()


class Sink:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)


class Pointing:
    """A backend that always names the same leader.

    Args:
        strange: whether its port may be another service's, as on the endpoint's own host.
    """

    def __init__(self, record: ControlRecord, *, strange: bool = False) -> None:
        self._record = record
        self._strange = strange

    def open(self) -> NodeAddress:
        return NodeAddress("127.0.0.1", "me1", None, hosting=False)

    def find_leader(self, timeout: float) -> FoundLeader:
        return replace(found_by(self._record), strange=self._strange)

    def unreachable(self, found: FoundLeader, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0) -> None:
        return

    def reached(self, order: m.Order) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture(params=[ORDER, FALSE_ANSWER, b"SSH-2.0-OpenSSH_9.2\r\n", b""], ids=["order", "answer", "ssh", "none"])
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    with contextlib.closing(Impostor(request.param)) as one:
        yield one


def _config(**timing: float) -> LaunchConfig:
    command = Command(("python", "train.py"), ("train.py",))
    where = {"backend": "etcd", "endpoint": Endpoint("127.0.0.1", 2379), "run_id": "run", "node_id": "me"}
    return LaunchConfig(command, limits=Limits(1, 1), timing=Timing(**timing), token=TOKEN, **where)  # type: ignore[arg-type]


def _record(config: LaunchConfig, port: int) -> ControlRecord:
    return ControlRecord("run", config.digest(), 1, Leader("other", "other1", "127.0.0.1", port)).renewed()


def test_it_learns_nothing_is_not_obeyed_and_is_succeeded(impostor: Impostor, caplog: pytest.LogCaptureFixture) -> None:
    config = _config(beat=0.1, dead_after=1.0)
    store, events = MemoryStore(), Sink()

    sealed = ValueSeal(TOKEN, "run").close(_record(config, impostor.port).encode())
    assert store.compare_and_set(None, sealed, 1)
    backend = ElectedBackend(config, MonotonicClock(), events, lambda: View(store))
    heard: queue.SimpleQueue[MembershipEvent] = queue.SimpleQueue()
    membership = Membership(config, backend, MonotonicClock(), heard.put, lambda address: 29500)
    membership.start()
    with contextlib.closing(membership):
        event = heard.get(timeout=20)
        while not isinstance(event, m.Form):
            assert not isinstance(event, m.RunEnd | RendezvousLost)
            event = heard.get(timeout=20)
    assert [event.term for event in events.seen if isinstance(event, LeaderElected)] == [2]
    assert b"train.py" not in impostor.heard
    assert len([record for record in caplog.records if "link to the leader was closed" in record.getMessage()]) <= 1


def test_it_is_not_retried_forever(impostor: Impostor) -> None:
    config = _config(beat=0.1, dead_after=1.0, join_timeout=0.5)
    heard: queue.SimpleQueue[MembershipEvent] = queue.SimpleQueue()
    backend = Pointing(_record(config, impostor.port))
    membership = Membership(config, backend, MonotonicClock(), heard.put, lambda address: 29500)
    membership.start()
    with contextlib.closing(membership):
        event = heard.get(timeout=20)
        while not isinstance(event, RendezvousLost):
            event = heard.get(timeout=20)
    assert isinstance(event.error, EndpointError)
    assert f"127.0.0.1:{impostor.port} does not answer as the run's leader" in event.error.message


def _search(port: int, **timing: float) -> list[MembershipEvent]:
    """What a node reports that has found a port in use on its own host, until it gives up."""
    config = _config(beat=0.05, dead_after=0.2, **timing)
    heard: queue.SimpleQueue[MembershipEvent] = queue.SimpleQueue()
    backend = Pointing(_record(config, port), strange=True)
    events: list[MembershipEvent] = []
    with contextlib.closing(Membership(config, backend, MonotonicClock(), heard.put, lambda address: 29500)) as one:
        one.start()
        while not events or not isinstance(events[-1], RendezvousLost):
            events.append(heard.get(timeout=60))
    return events


@pytest.mark.parametrize("beginning", [b"", b"{"])
def test_a_port_that_is_silent_on_this_host_may_be_a_frozen_leaders(beginning: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    links.append(listener.accept()[0])
                    links[-1].sendall(beginning)

        thread = threading.Thread(target=serve)
        thread.start()
        events = _search(int(listener.getsockname()[1]), join_timeout=2.0)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for link in links:
            link.close()
    assert len(links) > 2, "it tries again and again"
    (down,) = [event for event in events if isinstance(event, LinkDown)]
    assert "the port may be in use by another service, and this node tries for up to 2 s" in down.reason
    assert isinstance(events[-1], RendezvousLost)
    assert "choose another --rdzv-endpoint" in events[-1].error.hint


@pytest.mark.parametrize("impostor", [ORDER, b"SSH-2.0-OpenSSH_9.2\r\n", b"J\0\0\0"], ids=repr, indirect=True)
def test_another_service_on_this_host_that_answers_is_an_error_at_once(impostor: Impostor) -> None:
    events = _search(impostor.port, join_timeout=600.0)
    assert not [event for event in events if isinstance(event, LinkDown)]
    assert isinstance(events[-1], RendezvousLost)
    assert "does not answer as the run's leader" in events[-1].error.message


def test_reports_made_without_a_leader_do_not_block() -> None:
    """Workers may train and save for hours without a leader."""
    config = _config()
    membership = Membership(config, Pointing(_record(config, 1)), MonotonicClock(), print, lambda address: 29500)
    for step in range(2000):
        membership.report(m.NodeSaved(1, step))
    assert len(membership._side.take()) == 2000, "and nothing of it is lost"
    membership.start()
    membership.close()
    assert not membership._thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_leaves_no_caller_waiting() -> None:
    class Broken(Pointing):
        def find_leader(self, timeout: float) -> FoundLeader:
            raise ZeroDivisionError

    config = _config()
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    membership = Membership(config, Broken(_record(config, 1)), MonotonicClock(), heard.put, lambda address: 29500)
    membership.start()
    try:
        assert isinstance(heard.get(timeout=10), Opened)
        lost = heard.get(timeout=10)
        assert isinstance(lost, RendezvousLost)
        assert "because of an internal error" in lost.error.message
    finally:
        membership.close()
