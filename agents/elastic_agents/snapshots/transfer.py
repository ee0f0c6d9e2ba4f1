"""Transfers a snapshot to another node: from the memory of a leaving node to the first member of the next round.

A connection carries two messages each way, with the snapshot's bytes in between (for what a token adds see
``elastic_launch.rendezvous.wire.authentication``):

    fetcher  {round, step}
    server   the header of its slot
    fetcher  {}
    server   the content of the tensor file, the state, the meta
    server   {sha256} of that content

So accidental changes in transit are detected; with a token, deliberate ones too. Nothing is encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import TypeVar

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.rendezvous.wire.messages import SnapshotSource
from elastic_launch.snapshot.format.manifest import MAX_STATE_BYTES
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.snapshot.room import lacking
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.whole_writes import write_whole

_log = logging.getLogger("elastic_launch.agent")

ENDING = 20.0
"""Seconds in which a fetch that was cancelled must end; the kernel may take so long to reserve memory."""

IDLE = 10.0
"""Seconds without a byte, or without a complete message, after which either side gives up."""

SLOWEST = 512 * 1024
"""Minimum rate in bytes per second at which a snapshot arrives."""

FETCHERS = 4
"""Nodes served at once; a further connection is closed."""

STRANGERS = 32
"""Connections at once that have not yet asked for the snapshot, and proven with a token that they may: each has IDLE
seconds for that. A further connection closes the oldest one of the address that has the most."""

_LINE = 64 * 1024
_CHUNK = 1024 * 1024
_MOST = 2**53  # Larger numbers are not counts.
_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Wanted:
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class _Go:
    pass


@dataclass(frozen=True, slots=True)
class _Sum:
    sha256: str


class _Wire:
    """One side of a connection: messages, and bytes between them."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self._sock = sock
        self._channel = channel
        self._lines: list[bytes] = []

    def say(self, message: object) -> None:
        self._channel.send(codec.dumps(message) + b"\n")
        self._flush()

    def hear(self, kind: type[T], seconds: float | None = None) -> T:
        """Return the next message; all of it, with what a token adds, must arrive within the seconds, or IDLE."""
        deadline = time.monotonic() + (IDLE if seconds is None else seconds)
        self._flush()
        while not self._lines:
            self._wait(deadline)
            data = self._sock.recv(_LINE)
            if not data:
                raise ProtocolError("The other side hung up.")
            self._lines += self._channel.feed(data)
            self._flush()
        return codec.decode(kind, codec.loads(self._lines.pop(0)))

    def send(self, part: bytes | memoryview) -> None:
        """Send a part as long as it makes progress, at the minimum rate."""
        left, deadline = memoryview(part), time.monotonic() + IDLE + len(part) / SLOWEST
        while left:
            self._wait(deadline)
            left = left[self._sock.send(left[:_CHUNK]) :]

    def receive(self, size: int) -> Iterator[memoryview]:
        """Yield this many bytes in parts, each of which is valid until the next."""
        deadline = time.monotonic() + IDLE + size / SLOWEST
        buffer = memoryview(bytearray(min(size, _CHUNK)))
        while size:
            self._wait(deadline)
            count = self._sock.recv_into(buffer[: min(size, _CHUNK)])
            if not count:
                raise ProtocolError("The other side hung up before all was there.")
            yield buffer[:count]
            size -= count

    def await_end(self) -> None:
        """Wait until the other side closes the connection: it has read everything."""
        with suppress(OSError):
            self._sock.settimeout(IDLE)
            self._sock.recv(1)

    def _wait(self, deadline: float) -> None:
        """Limit the next call to IDLE, and to a deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(min(left, IDLE))

    def _flush(self) -> None:
        self._sock.settimeout(IDLE)
        self._sock.sendall(self._channel.unsent)
        self._channel.unsent.clear()


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to the server; a stranger until it has asked for the snapshot, with proof if there is a token."""

    sock: socket.socket
    address: str
    thread: threading.Thread | None = None
    stranger: bool = True
    evicted: bool = False


class TransferServer:
    """Serves one snapshot, which must not change, until it is closed.

    The listener is taken over; the key of the connections is derived from the run's token, None without one. ``rests``
    is called from one of this object's threads when no node is fetching any more.
    """

    def __init__(self, listener: socket.socket, slot: Slot, key: bytes | None, rests: Callable[[], object]) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._slot = slot
        self._key = key
        self._rests = rests
        self._lock = threading.Lock()
        self._peers: list[_Peer] = []  # the oldest first
        self._complained = False
        self._closing = threading.Event()
        self._thread = VitalThread(self._accept, "serve")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a node is being served."""
        with self._lock:
            return any(not peer.stranger for peer in self._peers)

    def close(self) -> None:
        """Close all connections."""
        self._closing.set()
        with self._lock:
            peers = list(self._peers)
            for peer in peers:
                _shut(peer.sock)
        _shut(self._listener)
        for thread in (self._thread, *(peer.thread for peer in peers)):
            if thread is not None:
                thread.join(IDLE)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in _TEMPORARY:
                    self._closing.wait(0.2)
                    continue
                if not self._closing.is_set():
                    _log.warning("the snapshot is not served any more: %s", error)
                return
            self._admit(_Peer(sock, str(address[0])))

    def _admit(self, peer: _Peer) -> None:
        while len(self._peers) >= 2 * (STRANGERS + FETCHERS) and not self._closing.wait(0.01):
            pass  # until the threads of the evicted connections have run
        with self._lock:
            if self._closing.is_set():
                peer.sock.close()
                return
            strangers = [other for other in self._peers if other.stranger and not other.evicted]
            if len(strangers) >= STRANGERS:
                most = Counter(other.address for other in strangers).most_common(1)[0][0]
                oldest = next(other for other in strangers if other.address == most)
                oldest.evicted = True
                _shut(oldest.sock)
            peer.thread = VitalThread(self._attend, "serve-one", (peer,))
            self._peers.append(peer)
            try:
                peer.thread.start()
            except RuntimeError:  # no more threads
                self._peers.remove(peer)
                peer.sock.close()

    def _attend(self, peer: _Peer) -> None:
        try:
            self._give(_Wire(peer.sock, Channel.of_leader(self._key, _LINE)), peer)
        except (OSError, ProtocolError) as error:
            with self._lock:
                tell = not self._closing.is_set() and not (peer.stranger and self._complained)
                self._complained = self._complained or peer.stranger
            if tell:
                once = " (said once for all that are not nodes of this run)" if peer.stranger else ""
                _log.warning("a snapshot was not given to %s: %s%s", peer.address, error, once)
        finally:
            with self._lock:
                self._peers.remove(peer)
                peer.sock.close()
                busy = any(not other.stranger for other in self._peers)
            if not peer.stranger and not busy and not self._closing.is_set():
                self._rests()

    def _give(self, wire: _Wire, peer: _Peer) -> None:
        wanted = wire.hear(_Wanted)
        header = self._slot.header()
        if header is None or (header.round, header.step) != (wanted.round, wanted.step):
            raise ProtocolError(f"The snapshot of step {wanted.step} of round {wanted.round} is not here.")
        with self._lock:
            if sum(not other.stranger for other in self._peers) >= FETCHERS:
                raise ProtocolError(f"{FETCHERS} others fetch it already.")
            peer.stranger = False
        wire.say(header)
        wire.hear(_Go, IDLE + header.tensors / SLOWEST)  # the fetcher allocates the memory first
        digest = hashlib.sha256()
        for part in chain(self._slot.tensor_parts(header), [self._slot.state(header), self._slot.meta(header)]):
            digest.update(part)
            wire.send(part)
        wire.say(_Sum(digest.hexdigest()))
        _log.info("the snapshot of step %d went to %s", header.step, peer.address)
        wire.await_end()


class TransferClient:
    """Fetches one snapshot into a slot, in its own thread; the slot is empty until the snapshot is complete.

    Args:
        sources: nodes that have the snapshot; tried one after the other.
        slot: no other writer uses it meanwhile.
        sequence: number of the snapshot on this node.
        key: as for TransferServer.
        done: called from the thread with the slot's content; None if all sources have failed.
        after: an earlier fetch, perhaps into the same slot, which may have been abandoned.
    """

    def __init__(
        self,
        sources: Sequence[SnapshotSource],
        slot: Slot,
        sequence: int,
        key: bytes | None,
        done: Callable[[Header | None], None],
        after: TransferClient | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self._slot = slot
        self._sequence = sequence
        self._key = key
        self._done = done
        self._after = after
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.cancelled = False
        self._thread = VitalThread(self._run, "fetch")

    def start(self) -> None:
        """Begin; done may be called immediately."""
        self._thread.start()

    def cancel(self) -> None:
        """Cancel; takes effect soon."""
        with self._lock:
            self.cancelled = True
            if self._sock is not None:
                _shut(self._sock)

    def join(self, timeout: float) -> bool:
        """Wait until neither this nor an earlier fetch writes; return whether that happened in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        after = self._after
        return not self._thread.is_alive() and (after is None or after.join(timeout))

    def _run(self) -> None:
        header = None
        try:
            if self._after is not None and not self._after.join(ENDING):
                _log.warning("the newest snapshot is not fetched: an earlier fetch does not end")
                return
            self._after = None
            for source in self.sources:
                if header is None and not self.cancelled:
                    header = self._try(source)
        finally:
            self._done(header)

    def _try(self, source: SnapshotSource) -> Header | None:
        began = time.monotonic()
        try:
            with socket.create_connection((source.address, source.port), timeout=IDLE) as sock:
                with self._lock:
                    if self.cancelled:
                        return None
                    self._sock = sock
                try:
                    header = self._take(source, _Wire(sock, Channel.of_node(self._key)))
                finally:
                    with self._lock:
                        self._sock = None
        except (OSError, ProtocolError) as error:
            if not self.cancelled:
                text = "the snapshot of step %d could not be fetched from %s: %s"
                _log.warning(text, source.step, source.address, error)
            return None
        size, took = header.tensors / 2**20, time.monotonic() - began
        text = "the snapshot of step %d was fetched from %s: %.1f MiB in %.2f s"
        _log.info(text, header.step, source.address, size, took)
        return header

    def _take(self, source: SnapshotSource, wire: _Wire) -> Header:
        wire.say(_Wanted(source.round, source.step))
        header = replace(wire.hear(Header), sequence=self._sequence, round=source.round, step=source.step)
        numbers = astuple(header)
        if min(numbers) < 0 or max(numbers) >= _MOST or max(header.state, header.meta) > MAX_STATE_BYTES:
            raise ProtocolError("No snapshot has such numbers and sizes.")
        slot = self._slot
        if lack := lacking(max(0, header.tensors - slot.allocated), "the snapshot needs"):
            raise ProtocolError(f"{lack}.")
        slot.begin()
        slot.allocate(header.tensors)
        wire.say(_Go())
        digest, at = hashlib.sha256(), 0
        for part in wire.receive(header.tensors):
            digest.update(part)
            write_whole(slot.tensors, part, at)
            at += len(part)
        rest = []
        for size in (header.state, header.meta):
            rest.append(b"".join(bytes(part) for part in wire.receive(size)))
            digest.update(rest[-1])
        if wire.hear(_Sum).sha256 != digest.hexdigest():
            raise ProtocolError("What came is not what was sent.")
        slot.commit(header, *rest)
        return header


def _shut(sock: socket.socket) -> None:
    """Wake up any thread that waits on a socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
