"""A real leader whose writes, links or own code fail."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.errors import StoreError
from elastic_launch.events.types import Event, RunEnded
from elastic_launch.rendezvous.leader.service import LeaderService
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.testing import MemoryStore

CONFIG = LaunchConfig(Command((), ("train.py",)), run_id="run")
LIMITS = Limits(2, 2)

HELLO = m.NodeHello(m.PROTOCOL_VERSION, "run", "digest", "train.py", str(Limits(1, 1)), "a", "a1", 1, "127.0.0.1", 7000)


class Failing(MemoryStore):
    """A store that stops answering at some time."""

    fails = False

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        if self.fails:
            raise StoreError("the store does not answer.")
        return super().compare_and_set(expected, value, timeout)


class NoEvents:
    def emit(self, event: Event) -> None:
        return


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def _say(sock: socket.socket, channel: Channel, *reports: m.Report) -> None:
    for report in reports:
        channel.send(m.pack(report))
    sock.sendall(channel.unsent)
    channel.unsent.clear()


def _orders(sock: socket.socket, channel: Channel, until: type[m.Order] | None) -> list[m.Order]:
    """Read up to an order of a kind, or to the end."""
    orders: list[m.Order] = []
    while not (until and any(isinstance(order, until) for order in orders)):
        data = sock.recv(65536)
        if not data:
            break
        for line in channel.feed(data):
            order = m.unpack(line)
            assert not isinstance(order, m.Report)
            orders.append(order)
    return orders


def test_a_leader_that_could_not_write_the_end_orders_nothing_more() -> None:
    """Its later decisions are recorded nowhere, so it must not answer the next message by them either."""
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    record = ControlRecord("run", "digest", 1, Leader("a", "a1", "127.0.0.1", address[1])).renewed()
    store = Failing()
    assert store.compare_and_set(None, record.encode(), 1)
    leader = LeaderService(CONFIG, listener, store.compare_and_set, record, MonotonicClock(), NoEvents())
    leader.start()
    with contextlib.ExitStack() as stack:
        stack.callback(leader.close, 0.0)
        sock = stack.enter_context(socket.create_connection(address, timeout=20))
        channel = Channel.of_node(None)
        _say(sock, channel, HELLO)
        assert isinstance(_orders(sock, channel, m.Form)[-1], m.Form)
        store.fails = True
        _say(sock, channel, m.Joined(1), m.Done(1), HELLO)
        left = _orders(sock, channel, None)
        assert not [order for order in left if not isinstance(order, m.Pulse)]
        assert not leader.alive


def test_a_leader_that_thaws_says_and_writes_nothing_before_it_steps_down() -> None:
    """Another node may lead by now. The node's last reports arrived while it was frozen."""
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    record = ControlRecord("run", "digest", 1, Leader("a", "a1", "127.0.0.1", address[1])).renewed()
    store, sure, said = MemoryStore(), [True], Seen()
    assert store.compare_and_set(None, record.encode(), 1)
    leader = LeaderService(
        CONFIG, listener, store.compare_and_set, record, MonotonicClock(), said, sure=lambda: sure[0]
    )
    leader.start()
    with contextlib.ExitStack() as stack:
        stack.callback(leader.close, 0.0)
        sock = stack.enter_context(socket.create_connection(address, timeout=20))
        channel = Channel.of_node(None)
        _say(sock, channel, HELLO)
        assert isinstance(_orders(sock, channel, m.Form)[-1], m.Form)
        before = store.load(1)
        sure[0] = False
        _say(sock, channel, m.Joined(1), m.Done(1))
        assert not [order for order in _orders(sock, channel, m.RunEnd) if not isinstance(order, m.Pulse)]
        assert not leader.alive
        assert store.load(1) == before
        assert not [event for event in said.events if isinstance(event, RunEnded)]


class Breaking(Failing):
    """A store that can be made to fail, once a function was called."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        if self.fails:
            self.before()
            raise ZeroDivisionError
        return super().compare_and_set(expected, value, timeout)


def _leader(store: Failing, limits: Limits) -> LeaderService:
    listener = listen("127.0.0.1")
    leader = Leader("a", "a1", "127.0.0.1", listener.getsockname()[1])
    record = ControlRecord("run", "digest", 1, leader, limits=limits).renewed()
    assert store.compare_and_set(None, record.encode(), 1)
    return LeaderService(CONFIG, listener, store.compare_and_set, record, MonotonicClock(), NoEvents())


@pytest.mark.parametrize("what", ["a pulse", "the last words"])
def test_a_link_may_end_by_what_follows_from_anothers_end(what: str) -> None:
    """Both nodes of a round are gone; reporting the first one's loss to the second reveals that it is gone, too."""
    leader = _leader(Failing(), LIMITS)
    with contextlib.ExitStack() as stack:
        for held in (leader._listener, leader._links):
            stack.callback(held.close)
        for number, name in enumerate("ab", 1):
            mine, theirs = socket.socketpair()
            leader._links.add(mine, "")
            hello = replace(HELLO, limits=str(LIMITS), node_id=name, incarnation=f"{name}1")
            leader._handle(number, leader._links.open[number], hello)
            stack.enter_context(contextlib.closing(theirs))
        assert leader._machine.running
        for link in leader._links.open.values():
            link.sock.shutdown(socket.SHUT_RDWR)  # from now on each write fails
        if what == "a pulse":
            leader._pulse(leader._clock.now())
        else:
            for link in leader._links.open.values():
                link.channel.send(b"over\n")
            leader._flush_all()
        assert not leader._links.open
        assert not leader._machine.nodes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_that_ends_by_an_internal_error_is_noticed() -> None:
    store = Breaking()
    leader = _leader(store, Limits(1, 1))
    address = leader._listener.getsockname()
    leader.start()
    with contextlib.ExitStack() as stack:
        stack.callback(leader.close, 0.0)
        sock = stack.enter_context(socket.create_connection(address, timeout=20))
        store.fails = True
        _say(sock, Channel.of_node(None), HELLO)
        _orders(sock, Channel.of_node(None), None)  # up to the end of the link, by which the node learns of it
        leader._thread.join(20)
    assert not leader.alive
    assert leader.died is not None
    assert leader.died.error == "ZeroDivisionError: "


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_leader_that_ends_by_an_internal_error_closes_what_has_connected_meanwhile() -> None:
    """Its own node may wait for an answer there: an elected leader's port stays open, for its next term."""
    store = Breaking()
    leader = _leader(store, Limits(1, 1))
    address = leader._listener.getsockname()
    with contextlib.ExitStack() as stack:
        stack.enter_context(leader._listener.dup())
        stack.callback(leader.close, 0.0)
        store.before = lambda: meanwhile.append(socket.create_connection(address, timeout=20))
        meanwhile: list[socket.socket] = []
        leader.start()
        sock = stack.enter_context(socket.create_connection(address, timeout=20))
        store.fails = True
        _say(sock, Channel.of_node(None), HELLO)
        leader._thread.join(20)
        assert leader.died is not None
        stack.enter_context(meanwhile[0])
        assert meanwhile[0].recv(1) == b""
