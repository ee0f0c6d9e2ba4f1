"""The links of a leader or a voter, with real sockets, in the test's thread."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
from collections.abc import Iterator

import pytest

from elastic_launch.rendezvous.wire.links import Links
from elastic_launch.rendezvous.wire.log_once import LogOnce


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def links(listener: socket.socket) -> Iterator[Links]:
    with contextlib.closing(Links(listener, None, 1, LogOnce(logging.getLogger(__name__)))) as links:
        links.listen()
        yield links


def test_a_stranger_whose_hello_has_arrived_does_not_give_way_to_another(links: Links, listener: socket.socket) -> None:
    mine, theirs = socket.socketpair()
    links.add(mine, "a")
    with theirs, socket.create_connection(listener.getsockname(), timeout=20) as another:
        assert select.select([listener], [], [], 20)[0]
        theirs.sendall(b"hello")
        another.sendall(b"hello")
        assert links.wait(20) == [1]
        assert links.open[1].sock.recv(10) == b"hello"
        links.greet(1, 100)
        assert links.wait(20) == [2]
        assert list(links.open) == [1, 2]


def test_that_nothing_more_is_accepted_is_known_at_once(links: Links, listener: socket.socket) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(listener.getsockname(), timeout=20):
        assert links.wait(20) == []
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            assert links.wait(None) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert not links.listening
        links.listen()
        assert links.wait(20) == []
        links.wait(0)
        assert list(links.open) == [1]
