"""A real leader and arbitrary connections to its port: its memory, its log and its nodes are unaffected."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from harness import wait_for

from elastic_launch.config.launch_config import Command, LaunchConfig, Limits, Timing
from elastic_launch.events.types import Event, NodeLost
from elastic_launch.rendezvous.leader.service import HELLO_TIMEOUT, LeaderService
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.rendezvous.wire.authentication import AuthenticationError, Channel, link_key
from elastic_launch.rendezvous.wire.links import STRANGERS_LINE
from elastic_launch.secret import Token
from elastic_launch.testing import FakeClock, MemoryStore

TOKEN = Token("correct-horse-battery-staple", "test")
KEY = link_key(TOKEN, "run")
OTHER = link_key(Token("another-token-of-some-length", "test"), "run")
HELLO = m.NodeHello(m.PROTOCOL_VERSION, "run", "digest", "train.py", str(Limits(1, 4)), "a", "a1", 1, "127.0.0.1", 7000)

pytestmark = pytest.mark.parametrize("key", [KEY, None], ids=["token", "no token"])


class Link:
    """A node's side of a link, in the test's thread."""

    def __init__(self, sock: socket.socket, key: bytes | None) -> None:
        self.sock = sock
        self.channel = Channel.of_node(key)
        self.orders: list[m.Order] = []

    def say(self, report: m.Report) -> None:
        self.channel.send(m.pack(report))
        self.flush()

    def flush(self) -> None:
        self.sock.sendall(self.channel.unsent)
        self.channel.unsent.clear()

    def hear(self, kind: type[m.Order]) -> m.Order:
        """Wait for an order of a kind."""
        while True:
            for order in self.orders:
                if isinstance(order, kind):
                    self.orders.remove(order)
                    return order
            data = self.sock.recv(65536)
            assert data, f"closed before a {kind.__name__}"
            for line in self.channel.feed(data):
                order = m.unpack(line)
                assert not isinstance(order, m.Report)
                self.orders.append(order)
            self.flush()


class Run:
    def __init__(self, key: bytes | None, stack: contextlib.ExitStack) -> None:
        listener = listen("127.0.0.1")
        self.port = int(listener.getsockname()[1])
        self.clock = FakeClock()
        self.events: list[Event] = []
        self.key = key
        self._stack = stack
        leader = Leader("a", "a1", "127.0.0.1", self.port)
        record = ControlRecord("run", "digest", 1, leader, limits=Limits(1, 4)).renewed()
        store = MemoryStore()
        assert store.compare_and_set(None, record.encode(), 1)
        # The clock stands still: only the test makes nodes silent. The short beat makes the leader look at it often.
        timing = Timing(beat=0.05, dead_after=1000.0)
        token = TOKEN if key is not None else None
        config = LaunchConfig(Command((), ("train.py",)), run_id="run", timing=timing, token=token)
        self.service = LeaderService(config, listener, store.compare_and_set, record, self.clock, self)
        self.service.start()
        stack.callback(self.service.close, 0.0)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def link(self, key: bytes | None) -> Link:
        return Link(self.stranger(), key)

    def node(self) -> Link:
        """A node that has been admitted."""
        link = self.link(self.key)
        link.say(HELLO)
        link.hear(m.Welcome)
        return link

    def stranger(self) -> socket.socket:
        return self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=20))

    def is_well(self, node: Link) -> None:
        """The node still has its link, and the leader still answers a new connection."""
        newcomer = self.link(self.key)
        newcomer.say(replace(HELLO, node_id="z", incarnation="z1"))
        newcomer.hear(m.Welcome)
        newcomer.say(m.Leaving("over"))
        node.orders.clear()
        self.clock.advance(0.1)
        node.hear(m.Pulse)
        assert not [event for event in self.events if isinstance(event, NodeLost) and event.node == "a"]


@pytest.fixture
def run(key: bytes | None) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        yield Run(key, stack)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _is_closed(sock: socket.socket) -> bool:
    """Wait for the end of a connection, reading whatever still comes."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00" * 20 + b"\n",
    b"\x80\x04\x95" * 100 + b"\n",
    b'{"type":"beat"}\n',
    b'{"type":"pulse","term":9}\n',
    b"[" * 10000 + b"\n",
    b'{"type":"challenge","nonce":"%s"}\n{"type":"proof","mac":"%s"}\n' % (b"00" * 32, b"00" * 32),
]


def test_garbage_closes_its_own_link_and_is_logged_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    node = run.node()
    for _ in range(5):
        for garbage in GARBAGE:
            stranger = run.stranger()
            stranger.sendall(garbage)
            assert _is_closed(stranger)
    run.is_well(node)
    told = _warnings(caplog)
    assert 1 <= len(told) <= 3, told
    assert len(set(told)) == len(told)
    assert all("127.0.0.1" in text and "(said once)" in text for text in told)


def test_an_endless_line_is_cut_off(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    node = run.node()
    for _ in range(3):
        stranger = run.stranger()
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 64 * 1024 * 1024:
                sent += stranger.send(b"x" * 65536)
        assert sent < 64 * 1024 * 1024
        assert _is_closed(stranger)
    run.is_well(node)
    assert len(_warnings(caplog)) == 1
    assert f"more than {STRANGERS_LINE} bytes" in _warnings(caplog)[0]


def test_a_silent_stranger_is_closed_after_a_while_and_a_node_is_not(run: Run) -> None:
    node, silent, slow = run.node(), run.stranger(), run.stranger()
    slow.sendall(b'{"type":')
    wait_for("both to be accepted", lambda: len(run.service._links.strangers) == 2)
    run.clock.advance(HELLO_TIMEOUT + 1)
    assert _is_closed(silent)
    assert _is_closed(slow)
    run.is_well(node)


def test_a_flood_of_silent_links_keeps_no_node_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run.service._links, "most_strangers", 8)
    node = run.node()
    flood = [run.stranger() for _ in range(60)]
    for stranger in flood[:-8]:
        assert _is_closed(stranger)
    run.is_well(node)
    assert len(_warnings(caplog)) == 1
    told = _warnings(caplog)[0]
    assert told.startswith("more than 8 links, one of them from 127.0.0.1, did not introduce themselves; ")


@contextlib.contextmanager
def _no_descriptors_left() -> Iterator[list[int]]:
    """Use up this process' descriptors; those in the list may be closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_without_descriptors_strangers_are_dropped_first_and_nodes_are_admitted_later(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    node, stranger = run.node(), run.stranger()
    wait_for("the stranger to be accepted", lambda: run.service._links.strangers)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(socket.socket()) for _ in range(2))
        taken = stack.enter_context(_no_descriptors_left())
        for number, sock in enumerate((first, second)):
            sock.settimeout(20)
            sock.connect(("127.0.0.1", run.port))
            if number == 0:
                assert _is_closed(stranger)
            else:
                wait_for("the listener to rest", lambda: not run.service._links.listening)
                os.close(taken.pop())
                run.clock.advance(1)
            link = Link(sock, run.key)
            link.say(replace(HELLO, node_id=f"b{number}", incarnation=f"b{number}"))
            link.hear(m.Welcome)
    run.is_well(node)
    assert len(_warnings(caplog)) == 1
    assert "Too many open files" in _warnings(caplog)[0]


def test_another_version_of_the_protocol_is_refused_with_a_message(run: Run) -> None:
    node, other = run.node(), run.link(run.key)
    other.say(replace(HELLO, version=99, node_id="b", incarnation="b1"))
    refused = other.hear(m.Refused)
    assert isinstance(refused, m.Refused)
    assert "version 99" in refused.reason
    run.is_well(node)


def test_a_link_that_breaks_off_in_the_middle_is_forgotten(run: Run) -> None:
    node = run.node()
    for _ in range(5):
        stranger = run.stranger()
        stranger.sendall(b'{"type"')
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
    run.is_well(node)
    wait_for("the strangers to be forgotten", lambda: len(run.service._links.open) <= 2)


def test_a_stranger_with_another_token_or_none_is_not_heard(
    run: Run, key: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    node = run.node()
    wrong = [OTHER, None] if key else [KEY]
    for other in wrong * 3:
        stranger = run.link(other)
        stranger.say(replace(HELLO, incarnation="a2"))  # heard, it would take the node's place
        data = b""
        # A node with another token finds that out by the leader's answer, and hangs up.
        with contextlib.suppress(ConnectionResetError, AuthenticationError):
            while chunk := stranger.sock.recv(65536):
                data += chunk
                stranger.channel.feed(chunk)
                stranger.flush()
        stranger.sock.close()
        if key and other is None:
            refusal = json.loads(data)
            assert refusal["type"] == "refused"
            assert "the token is missing" in refusal["reason"]
            assert refusal["code"] == 95
    run.is_well(node)
    assert len(_warnings(caplog)) == 1


def test_the_leader_of_an_ended_run_waits_for_its_nodes_and_for_no_stranger(run: Run) -> None:
    node, idle = run.node(), run.stranger()
    run.clock.advance(10.0)
    form = node.hear(m.Form)
    assert isinstance(form, m.Form)
    node.say(m.Joined(form.round.number))
    node.say(m.Done(form.round.number))
    node.hear(m.RunEnd)
    closing = threading.Thread(target=run.service.close, args=(60.0,))  # of a clock that stands still
    closing.start()
    node.sock.close()
    assert _is_closed(idle)
    closing.join(30)
    assert not closing.is_alive()
