"""Answers for a voter at its endpoint: one thread, over the authenticated links of the run."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.leader.link import Link
from elastic_launch.rendezvous.voters.messages import MESSAGES, Answer, Request
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.wake import Waker

_log = logging.getLogger(__name__)

MAX_STRANGERS = 128
"""Most connections without a valid request; one more closes the oldest of them."""

STRANGERS_LINE = 64 * 1024
"""Most bytes buffered of an unfinished line before the first valid request."""

PAUSE = 0.1
"""Seconds for which nothing is accepted after the process has run out of descriptors."""


POLL = 0.05
"""Seconds after which a server that is to stop looks whether its time is over."""


class VoterServer:
    """Serves until closed.

    Args:
        listener: listens at the voter's endpoint; this object takes ownership of it.
        vote: returns the answer to a request, or None to give none; called from the server's thread.
        remedy: what is to be done by a node that comes to this endpoint alone.
    """

    def __init__(
        self, listener: socket.socket, key: bytes | None, vote: Callable[[Request], Answer | None], remedy: str
    ) -> None:
        self._listener = listener
        self._key = key
        self._vote = vote
        self._remedy = remedy
        self._links: dict[int, Link] = {}  # by file descriptor, oldest first
        self._once = LogOnce(_log)
        self._stop = threading.Event()
        self._leave_by = 0.0
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._thread = VitalThread(self._run, "voter")

    def start(self) -> None:
        """Begin to answer."""
        self._listener.setblocking(False)
        for source in (self._listener, self._waker):
            self._selector.register(source, selectors.EVENT_READ)
        self._thread.start()

    def close(self, linger: float = 0.0) -> None:
        """Stop answering, and close all connections.

        Args:
            linger: most seconds for which it still answers, as long as others that have asked stay connected.
        """
        self._leave_by = time.monotonic() + linger
        self._stop.set()
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(linger + 5.0)
        for held in (self._listener, self._waker, self._selector):
            held.close()

    def _run(self) -> None:
        try:
            while not self._left():
                for key, _ in self._selector.select(POLL if self._stop.is_set() else None):
                    if key.fileobj is self._waker:
                        self._waker.clear()
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.fd in self._links:
                        self._serve(key.fd, self._links[key.fd])
        finally:
            for link in self._links.values():
                link.sock.close()

    def _left(self) -> bool:
        """Whether it is to stop, and waits for none that may still ask."""
        asked = any(link.greeted for link in self._links.values())
        return self._stop.is_set() and (not asked or time.monotonic() >= self._leave_by)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_stranger():
                time.sleep(PAUSE)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ)
        channel = Channel.of_leader(self._key, STRANGERS_LINE)
        self._links[sock.fileno()] = Link(sock, str(address[0]), time.monotonic(), channel)
        if sum(not link.greeted for link in self._links.values()) > MAX_STRANGERS:
            self._drop_stranger()

    def _drop_stranger(self) -> bool:
        oldest = next((number for number, link in self._links.items() if not link.greeted), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _serve(self, number: int, link: Link) -> None:
        try:
            data = b"" if link.closing else link.sock.recv(65536)
            if not data and not link.channel.unsent:
                self._drop(number)
                return
            for line in link.channel.feed(data):
                self._receive(link, line)
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._once.warn(type(error).__name__, "a connection from %s was closed: %s", link.peer, error)
            self._drop(number)
            return
        except OSError:
            self._drop(number)
            return
        if not link.flush():
            self._drop(number)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.channel.unsent else 0)
        self._selector.modify(link.sock, wanted)

    def _receive(self, link: Link, line: bytes) -> None:
        if codec.loads(line).get("type") in ("hello", "caller"):
            reason = "this endpoint is one of several that keep the record of a run, and was given alone."
            link.channel.send(m.pack(m.Refused(0, reason, self._remedy)))
            link.closing = True
            return
        request = MESSAGES.unpack(line)
        if isinstance(request, Answer):
            raise ProtocolError("An answer came instead of a request.")
        if not link.greeted:
            link.greeted = True
            link.channel.allow(codec.MAX_BYTES)
        answer = self._vote(request)
        if answer is not None:
            link.channel.send(MESSAGES.pack(answer))

    def _drop(self, number: int) -> None:
        link = self._links.pop(number)
        self._selector.unregister(link.sock)
        link.sock.close()
