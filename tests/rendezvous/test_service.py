"""A real leader whose writes fail."""

from __future__ import annotations

import contextlib
import socket

from elastic_launch.clock import MonotonicClock
from elastic_launch.config import Limits, Timing
from elastic_launch.errors import StoreError
from elastic_launch.events import Event
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.auth import Channel
from elastic_launch.rendezvous.net import listen
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.service import LeaderService
from elastic_launch.testing import MemoryStore

HELLO = m.Hello(m.PROTOCOL_VERSION, "run", "digest", "train.py", str(Limits(1, 1)), "a", "a1", 1, "127.0.0.1", 7000)


class Failing(MemoryStore):
    """A store that at some time answers no more."""

    fails = False

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        if self.fails:
            raise StoreError("the store does not answer.")
        return super().compare_and_set(expected, value, timeout)


class NoEvents:
    def emit(self, event: Event) -> None:
        return


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
    """What it has decided since stands nowhere, so it must not answer the next message by it either."""
    listener = listen("127.0.0.1")
    address = listener.getsockname()
    record = ControlRecord("run", "digest", 1, Leader("a", "a1", "127.0.0.1", address[1])).renewed()
    store = Failing()
    assert store.compare_and_set(None, record.encode(), 1)
    leader = LeaderService(listener, store, record, Limits(1, 1), Timing(), "train.py", MonotonicClock(), NoEvents())
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
