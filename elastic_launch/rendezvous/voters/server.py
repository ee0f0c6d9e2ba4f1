"""Answers for a voter at its endpoint: one thread, over the authenticated links of the run."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.events.facts import Misfit
from elastic_launch.events.sentences import refused
from elastic_launch.rendezvous.voters.messages import MESSAGES, VoterAnswer, VoterRequest
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.links import Link, Links
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.system.threads import VitalThread

_log = logging.getLogger(__name__)

MAX_STRANGERS = 128
"""Most connections without a valid request."""

PAUSE = 0.1
"""Seconds for which nothing is accepted after the process has run out of descriptors."""

POLL = 0.05
"""Seconds after which a server that is to stop looks whether its time is over."""


class VoterServer:
    """Serves until closed.

    Args:
        listener: listens at the voter's endpoint; this object takes ownership of it.
        vote: returns the answer to a request, or None to give none; called from the server's thread.
        misfit: of a node that comes to this endpoint alone.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes | None,
        vote: Callable[[VoterRequest], VoterAnswer | None],
        misfit: Misfit,
    ) -> None:
        self._listener = listener
        self._vote = vote
        self._misfit = misfit
        self._once = LogOnce(_log)
        self._links = Links(listener, key, MAX_STRANGERS, self._once)
        self._stop = threading.Event()
        self._leave_by = 0.0
        self._thread = VitalThread(self._run, "voter")

    def start(self) -> None:
        """Begin to answer."""
        self._links.listen()
        self._thread.start()

    def close(self, linger: float = 0.0) -> None:
        """Stop answering, and close all connections.

        Args:
            linger: most seconds for which it still answers, as long as others that have asked stay connected.
        """
        self._leave_by = time.monotonic() + linger
        self._stop.set()
        self._links.waker.wake()
        if self._thread.ident is not None:
            self._thread.join(linger + 5.0)
        else:
            self._links.close()
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._left():
                for number in self._links.wait(POLL if self._stop.is_set() else None):
                    if number in self._links.open and not self._serve(number, self._links.open[number]):
                        self._links.drop(number)
                if not self._links.listening:
                    time.sleep(PAUSE)
                    self._links.listen()
        finally:
            self._links.close()

    def _left(self) -> bool:
        """Whether it is to stop, and waits for none that may still ask."""
        asked = any(link.greeted for link in self._links.open.values())
        return self._stop.is_set() and (not asked or time.monotonic() >= self._leave_by)

    def _serve(self, number: int, link: Link) -> bool:
        """Return whether the link still works."""
        try:
            data = b"" if link.closing else link.sock.recv(65536)
            if not data and not link.channel.unsent:
                return False
            for line in link.channel.feed(data):
                if not link.closing:
                    self._receive(number, link, line)
        except BlockingIOError:
            pass
        except ProtocolError as error:
            self._once.warn(type(error).__name__, "a connection from %s was closed: %s", link.peer, error)
            return False
        except OSError:
            return False
        return self._links.flush(number)

    def _receive(self, number: int, link: Link, line: bytes) -> None:
        if codec.loads(line).get("type") in ("nodehello", "caller"):
            link.channel.send(m.pack(m.Refused(0, *refused(self._misfit))))
            link.closing = True
            return
        request = MESSAGES.unpack(line)
        if isinstance(request, VoterAnswer):
            raise ProtocolError("An answer came instead of a request.")
        answer = self._vote(request)
        if answer is not None:
            link.channel.send(MESSAGES.pack(answer))
        if answer is not None and answer.refused:
            link.closing = True
        else:
            self._links.greet(number, codec.MAX_BYTES)
