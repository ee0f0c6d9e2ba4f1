"""Which sockets of a process count as gloo's, with sockets that are watched as gloo watches its own."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from harness import SLOWNESS, wait_for

from elastic_launch.training.live.sockets import GroupSockets

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


class Loop:
    """A listening socket with connections, all watched by one epoll descriptor.

    Args:
        inheritable: whether executed programs inherit the descriptor, as they do gloo's.
    """

    def __init__(
        self, stack: ExitStack, family: socket.AddressFamily = socket.AF_INET, inheritable: bool = True
    ) -> None:
        self._stack = stack
        self._epoll = stack.enter_context(select.epoll())
        os.set_inheritable(self._epoll.fileno(), inheritable)
        self.server = self.watched(socket.create_server((LOOPBACK[family], 0), family=family))

    def watched(self, found: socket.socket) -> socket.socket:
        """Have a socket watched, and return it."""
        self._stack.enter_context(found)
        self._epoll.register(found, select.EPOLLIN)
        return found

    def connect(self) -> socket.socket:
        """Return this side of a connection to a peer."""
        peer = self._stack.enter_context(socket.create_connection(self.server.getsockname()[:2]))
        peer.settimeout(10 * SLOWNESS)
        self.peer = peer
        return self.watched(self.server.accept()[0])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def sockets(stack: ExitStack) -> GroupSockets:
    """The sockets of a round's groups."""
    found = GroupSockets()
    stack.callback(found.release)
    return found


def cut(connection: socket.socket) -> bool:
    """Whether a connection was shut down for reading."""
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while connection.recv(100):
            pass
        return True
    return False


@pytest.mark.parametrize("family", list(LOOPBACK))
def test_connections_that_are_opened_later_are_found_and_listeners_stay(
    stack: ExitStack, sockets: GroupSockets, family: socket.AddressFamily
) -> None:
    with sockets.opening(store_port=0, size=2):
        loop = Loop(stack, family)
        early = loop.connect()
    late = loop.connect()
    assert sockets.loops == 1
    assert sockets.shut_down() == 2
    assert cut(early)
    assert cut(late)
    assert not cut(loop.connect())  # the listener
    assert sockets.shut_down() == 1
    assert sockets.shut_down() == 0


def test_no_sending_fails_until_the_connections_are_released(stack: ExitStack, sockets: GroupSockets) -> None:
    """gloo wakes no thread that waits for the end of a sending that has failed."""
    with sockets.opening(store_port=0, size=2):
        loop = Loop(stack)
        connection, peer = loop.connect(), loop.peer
    sockets.shut_down()
    connection.sendall(b"1")
    assert peer.recv(1) == b"1"
    connection.close()  # as gloo does when it has read the end
    assert sockets.still_open() == 1, "the listener"
    for _ in range(2):
        peer.sendall(b"2")
    assert not cut(peer)
    sockets.end()
    assert cut(peer)
    peer.sendall(b"2")
    sockets.release()
    assert sockets.still_open() == 1
    with suppress(ConnectionError):
        peer.sendall(b"3")
    with pytest.raises(ConnectionError):
        peer.sendall(b"3")


@pytest.mark.parametrize("how", ["lazily initialized", "few descriptors"])
def test_where_a_duplicate_would_do_harm_there_is_none(
    stack: ExitStack, sockets: GroupSockets, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with sockets.opening(store_port=0, size=2):
        connection = Loop(stack).connect()
    if how == "few descriptors":
        monkeypatch.setattr(resource, "getrlimit", lambda _which: (connection.fileno() + 100, 4096))
    else:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    before = os.listdir("/proc/self/fd")
    assert sockets.shut_down() == 1
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(BrokenPipeError):
        connection.send(b"1")


def test_sockets_from_before_and_a_servers_of_the_scripts_own_are_left_alone(
    stack: ExitStack, sockets: GroupSockets
) -> None:
    before = Loop(stack)
    early = before.connect()
    with sockets.opening(store_port=0, size=2):
        own = Loop(stack, inheritable=False)
        meanwhile, late = own.connect(), before.connect()
    assert sockets.shut_down() == 0
    assert not any(map(cut, (early, late, meanwhile)))
    assert sockets.loops == sockets.still_open() == 0


def test_the_connection_to_the_store_is_found_by_its_port(stack: ExitStack, sockets: GroupSockets) -> None:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    before = stack.enter_context(socket.create_connection(server.getsockname()))
    with sockets.opening(store_port=server.getsockname()[1], size=2):
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        assert sockets.still_open() == 0  # torch connects another one if this one fails now
        Loop(stack)
    assert sockets.still_open() == 2
    assert sockets.shut_down() == 1
    assert cut(client)
    assert not cut(before)
    client.close()
    assert sockets.still_open() == 1


def test_a_descriptor_that_now_belongs_to_another_socket_is_left_alone(stack: ExitStack, sockets: GroupSockets) -> None:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    with sockets.opening(store_port=server.getsockname()[1], size=2):
        Loop(stack)
        client = socket.create_connection(server.getsockname())
        assert sockets.still_open() == 2
        descriptor = client.fileno()
        client.close()
    other = stack.enter_context(socket.create_connection(server.getsockname()))
    assert other.fileno() == descriptor
    assert sockets.shut_down() == 0
    assert not cut(other)


def test_connections_that_appear_after_the_order_are_shut_down_until_the_group_is_formed(
    stack: ExitStack, sockets: GroupSockets
) -> None:
    connections = []

    def form() -> None:
        with sockets.opening(store_port=0, size=2):
            assert sockets.shut_down() == 0
            loop = Loop(stack)
            connections.append(loop.connect())
            wait_for("the connection to be shut down", lambda: cut(connections[0]))
            connections.append(loop.connect())

    with pytest.raises(RuntimeError, match="disconnected"):
        form()
    assert cut(connections[1])
    assert not [thread for thread in threading.enumerate() if thread.name == "elastic-launch disconnect"]
    with pytest.raises(RuntimeError, match="disconnected"):
        form()
    assert len(connections) == 2


def test_an_attempt_to_connect_to_a_host_that_does_not_answer_is_ended(stack: ExitStack, sockets: GroupSockets) -> None:
    """A full queue of connections does not answer."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    stack.enter_context(socket.create_connection(server.getsockname()))
    with sockets.opening(store_port=0, size=2):
        loop = Loop(stack)
        connecting = loop.watched(socket.socket())
        connecting.setblocking(False)
        assert connecting.connect_ex(server.getsockname()) == errno.EINPROGRESS
        assert connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert sockets.shut_down() == 1
    assert connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def test_who_waits_for_a_peer_to_connect_is_released(stack: ExitStack, sockets: GroupSockets) -> None:
    """As each peer would, this process connects, and says which of them it is."""
    numbers = []

    def form() -> None:
        with sockets.opening(store_port=0, size=2):
            server = Loop(stack).server
            server.settimeout(10 * SLOWNESS)
            sockets.shut_down()
            for _ in range(2):
                with server.accept()[0] as peer:
                    numbers.append(struct.unpack("@n", peer.recv(100))[0])

    with pytest.raises(RuntimeError, match="disconnected"):
        form()
    assert numbers == [0, 1]


def test_a_search_is_quick_with_many_descriptors(stack: ExitStack, sockets: GroupSockets) -> None:
    """On an idle machine it takes 3 ms with 1000 descriptors."""
    with sockets.opening(store_port=0, size=2):
        Loop(stack).connect()
    for _ in range(300):
        stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    began = time.thread_time()
    assert sockets.shut_down() == 1
    assert time.thread_time() - began < 0.05 * SLOWNESS
