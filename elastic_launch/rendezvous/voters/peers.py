"""Connections to the other voters, with a thread for each: resolving a name or connecting may take seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.voters.messages import MESSAGES, Greeting, VoterAnswer, VoterRequest
from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.system.threads import VitalThread

PATIENCE = 2.0
"""Seconds for a connection to be made, and without an answer or after a refusal until another one is made."""

PAUSE = 0.1
"""Seconds between two attempts to connect."""

POLL = 0.05
"""Seconds after which a thread that waits for an answer looks whether another request has taken its place."""

GRACE = 1.0
"""Seconds that closing waits for threads; one that hangs in a resolver is left behind."""


class _StrangerError(ConnectionError):
    def __init__(self) -> None:
        super().__init__("it was started for another run, or with other names of the hosts that keep the record")


class Peers:
    """Sends requests to voters.

    Args:
        voters: where each of them listens.
        heard: called from the voters' threads with each answer.
    """

    def __init__(
        self, voters: Mapping[str, Endpoint], key: bytes | None, group: str, heard: Callable[[VoterAnswer], None]
    ) -> None:
        self._peers = {name: _Peer(name, where, key, group, heard) for name, where in voters.items()}
        for peer in self._peers.values():
            peer.thread.start()

    def send(self, voter: str, request: VoterRequest) -> None:
        """Send a request, again if need be, until it is answered or there is another one."""
        self._peers[voter].send(request)

    def rest(self) -> None:
        """Send no request more than once from now on: the operation has ended."""
        for peer in self._peers.values():
            peer.again = False

    def problem(self, voter: str) -> str:
        """Return why the last attempt to reach a voter failed; empty if it did not."""
        return self._peers[voter].problem if voter in self._peers else ""

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()
        deadline = time.monotonic() + GRACE
        for peer in self._peers.values():
            peer.thread.join(max(0.0, deadline - time.monotonic()))


class _Peer:
    def __init__(
        self, name: str, where: Endpoint, key: bytes | None, group: str, heard: Callable[[VoterAnswer], None]
    ) -> None:
        self.problem = ""
        self.again = False
        self._name = name
        self._where = where
        self._key = key
        self._group = group
        self._heard = heard
        self._changed = threading.Condition()
        self._next: VoterRequest | None = None
        self._closed = False
        self._sock: socket.socket | None = None
        self._channel = Channel.of_node(key)
        self._silent_since = 0.0
        self.thread = VitalThread(self._run, f"voter-{name}")

    def send(self, request: VoterRequest) -> None:
        with self._changed:
            self._next, self.again = request, True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (request := self._take()) is not None:
                try:
                    self._exchange(request)
                except (OSError, UnicodeError, ProtocolError) as error:
                    self.problem = _words(error)
                    self._hang_up()
                    pause = PATIENCE if isinstance(error, _StrangerError) else PAUSE
                    with self._changed:
                        self._next = self._next or (request if self.again else None)
                        self._changed.wait_for(lambda: self._closed, pause)
        finally:
            self._hang_up()

    def _take(self) -> VoterRequest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next is not None)
            request, self._next = self._next, None
            return None if self._closed else request

    def _exchange(self, request: VoterRequest) -> None:
        """Send a request, and pass on answers until it is answered or there is another one."""
        sock = self._sock or self._connect()
        self._say(sock, request)
        while True:
            try:
                data = sock.recv(262144)
            except TimeoutError:
                if time.monotonic() - self._silent_since > PATIENCE:
                    raise
                with self._changed:
                    if self._closed or self._next is not None:
                        return
                continue
            if not data:
                raise ConnectionError("it closed the connection")
            self._silent_since = time.monotonic()
            lines = self._channel.feed(data)
            self._flush(sock)  # the handshake's answer, and what waited for it
            for answer in map(MESSAGES.unpack, lines):
                if not isinstance(answer, VoterAnswer) or answer.voter != self._name:
                    raise ProtocolError("It does not answer as this voter.")
                if answer.refused:
                    raise _StrangerError
                self.problem = ""
                self._heard(answer)
                if answer.id == request.id:
                    self._silent_since = 0.0
                    return

    def _connect(self) -> socket.socket:
        self._sock = sock = socket.create_connection((self._where.host, self._where.port), PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = Channel.of_node(self._key)
        self._silent_since = 0.0
        self._say(sock, Greeting(0, self._group))
        return sock

    def _say(self, sock: socket.socket, request: VoterRequest) -> None:
        # A voter that does not answer is not sent more and more: what it has not read is in the kernel's buffer.
        self._silent_since = self._silent_since or time.monotonic()
        self._channel.send(MESSAGES.pack(request))
        self._flush(sock)

    def _flush(self, sock: socket.socket) -> None:
        unsent = self._channel.unsent
        if unsent:
            sock.settimeout(PATIENCE)
            sock.sendall(unsent)
            unsent.clear()
        sock.settimeout(POLL)

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _words(error: OSError | UnicodeError | ProtocolError) -> str:
    match error:
        case TimeoutError():
            return "it does not answer"
        case ConnectionRefusedError():
            return "nothing listens there"
        case socket.gaierror() | UnicodeError():
            return "its name does not resolve"
        case ProtocolError():
            return f"what listens there does not answer as a voter of this run: {error.message.rstrip('.')}"
        case _:
            return error.strerror or str(error)
