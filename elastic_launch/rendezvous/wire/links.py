"""Incoming links: what a leader or a voter accepts at its endpoint, and reads and writes in one thread."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.system.wake import Waker

MAX_UNSENT = 64 * 1024 * 1024
"""Bytes that may be queued for a node that does not read before its link is closed."""

STRANGERS_LINE = 64 * 1024
"""Most bytes buffered of an unfinished line of a link that is not greeted."""


@dataclass
class Link:
    """An incoming connection.

    Attributes:
        opened: when it was opened, by its owner's clock.
        greeted: whether what makes it part of the run has been received, such as a ``NodeHello``.
        closing: further input is ignored, and the link is closed once all output is sent.
    """

    sock: socket.socket
    peer: str
    opened: float
    channel: Channel
    greeted: bool = False
    closing: bool = False


class Links:
    """The links that are open, by number.

    Args:
        listener: accepts them; its owner closes it.
        key: authenticates them, see :class:`Channel`.
        most_strangers: most links that are not greeted. One more closes the oldest of them, so that a flood of
            connections does not keep out a node that says hello at once.
        now: the owner's clock.

    Attributes:
        strangers: the numbers of those that are not greeted, oldest first.
        listening: whether further ones are accepted.
        waker: ends :meth:`wait`.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes | None,
        most_strangers: int,
        once: LogOnce,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._key = key
        self.most_strangers = most_strangers
        self._once = once
        self._now = now
        self.open: dict[int, Link] = {}
        self.strangers: dict[int, None] = {}
        self._next = 1
        self.listening = False
        self._knocked = False
        self.waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.waker, selectors.EVENT_READ)

    def listen(self) -> None:
        """Accept links; call this again a while after no descriptor was left."""
        if not self.listening:
            self.listening = True
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def wait(self, timeout: float | None) -> list[int]:
        """Accept links meanwhile; return the numbers of those at which data has arrived or can be sent.

        What connects is accepted by the next call: the oldest stranger may have to give way to it, and must not if its
        hello is in what this call returns.
        """
        if self._knocked:
            self._knocked = False
            self._accept()
            if not self.listening:
                timeout = 0.0  # so that the owner learns of it
        found = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self.waker:
                self.waker.clear()
            elif key.fileobj is self._listener:
                self._knocked = True
            else:
                found.append(key.data)
        return found

    def add(self, sock: socket.socket, peer: str) -> None:
        """Take over a connection."""
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, self._next)
        self.open[self._next] = Link(sock, peer, self._now(), Channel.of_leader(self._key, STRANGERS_LINE))
        self.strangers[self._next] = None
        self._next += 1

    def greet(self, number: int, longest_line: int) -> None:
        """Treat a link as part of the run from now on."""
        link = self.open[number]
        link.greeted = True
        link.channel.allow(longest_line)
        self.strangers.pop(number, None)

    def flush(self, number: int) -> bool:
        """Send what can be sent; return whether the link still works.

        It may already be gone, for example as a consequence of another link's end.
        """
        link = self.open.get(number)
        if link is None:
            return False
        unsent = link.channel.unsent
        try:
            while unsent:
                del unsent[: link.sock.send(unsent)]
        except BlockingIOError:
            if len(unsent) > MAX_UNSENT:
                return False
        except OSError:
            return False
        if link.closing and not unsent:
            with contextlib.suppress(OSError):  # the other side closes its own once it has read everything
                link.sock.shutdown(socket.SHUT_WR)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        if self._selector.get_key(link.sock).events != wanted:
            self._selector.modify(link.sock, wanted, number)
        return True

    def drop(self, number: int) -> Link | None:
        """Close a link; return it, if it was still open."""
        self.strangers.pop(number, None)
        link = self.open.pop(number, None)
        if link is not None:
            self._selector.unregister(link.sock)
            link.sock.close()
        return link

    def close(self) -> None:
        """Close all links; this is the last thing that their thread does."""
        for link in self.open.values():
            link.sock.close()
        self._selector.close()
        self.waker.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
            with contextlib.ExitStack() as undo:
                undo.enter_context(sock)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.add(sock, str(address[0]))
                undo.pop_all()
        except OSError as error:
            self._once.warn("accept", "a link could not be accepted: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._drop_oldest() is None:
                self.listening = False
                self._selector.unregister(self._listener)
            return
        if len(self.strangers) > self.most_strangers and (oldest := self._drop_oldest()) is not None:
            said = "did not introduce themselves; each further one closes the oldest"
            text = f"more than %d links, one of them from %s, {said}"
            self._once.warn("strangers", text, self.most_strangers, oldest.peer)

    def _drop_oldest(self) -> Link | None:
        """Close the link that has been a stranger for longest; return it, if there is any."""
        return self.drop(next(iter(self.strangers))) if self.strangers else None
