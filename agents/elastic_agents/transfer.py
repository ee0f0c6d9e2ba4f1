"""Giving a snapshot to another node: from the memory of one that leaves to the first member of the next round.

A connection is a link of two messages each way (see ``elastic_launch.rendezvous.auth`` for what a token adds), with the
snapshot's bytes in between:

    fetcher  {round, step}
    server   {training, tensors, state, meta}: which training it is of, and sizes in bytes
    fetcher  {}
    server   the content of the tensor file, the state, the meta
    server   {sha256} of that content

So what was altered on the way is noticed; with a token also what was altered on purpose. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous import codec
from elastic_launch.rendezvous.auth import Channel
from elastic_launch.rendezvous.keeping import Source
from elastic_launch.snapshot.manifest import MAX_STATE_BYTES
from elastic_launch.snapshot.room import free_memory
from elastic_launch.snapshot.slot import Header, Slot

__all__ = ["Fetch", "Server"]

_log = logging.getLogger("elastic_launch.agent")

IDLE = 10.0
"""Seconds without a byte after which either side gives up."""

FETCHERS = 4
"""Connections at once; a further one is closed."""

_LINE = 64 * 1024
_CHUNK = 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Wanted:
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class _Offered:
    training: int
    tensors: int
    state: int
    meta: int


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
        sock.settimeout(IDLE)

    def say(self, message: object) -> None:
        self._channel.send(codec.dumps(message) + b"\n")
        self._flush()

    def hear(self, kind: type[T]) -> T:
        self._flush()
        while not self._lines:
            data = self._sock.recv(_LINE)
            if not data:
                raise ProtocolError("The other side hung up.")
            self._lines += self._channel.feed(data)
            self._flush()
        return codec.decode(kind, codec.loads(self._lines.pop(0)))

    def send(self, part: bytes) -> None:
        self._sock.sendall(part)

    def receive(self, size: int) -> Iterator[memoryview]:
        """Yield so many bytes in parts, each of which is good until the next."""
        buffer = memoryview(bytearray(min(size, _CHUNK)))
        while size:
            count = self._sock.recv_into(buffer[: min(size, _CHUNK)])
            if not count:
                raise ProtocolError("The other side hung up before all was there.")
            yield buffer[:count]
            size -= count

    def await_end(self) -> None:
        """Wait until the other side hangs up: it has read all."""
        with suppress(OSError):
            self._sock.recv(1)

    def _flush(self) -> None:
        self._sock.sendall(self._channel.unsent)
        self._channel.unsent.clear()


class Server:
    """Serves one snapshot, which must not change, until it is closed.

    Args:
        listener: taken over.
        key: of the connections, derived from the run's token; None without one.
        rests: called from a thread of this object's when nobody fetches any more.
    """

    def __init__(self, listener: socket.socket, slot: Slot, key: bytes | None, rests: Callable[[], None]) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._slot = slot
        self._key = key
        self._rests = rests
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="serve", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether somebody fetches."""
        with self._lock:
            return bool(self._peers)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._closing = True
            peers = dict(self._peers)
            for sock in peers:
                _shut(sock)
        _shut(self._listener)
        for thread in (self._thread, *peers.values()):
            thread.join(IDLE)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    _log.warning("the snapshot is not served any more: %s", error)
                return
            with self._lock:
                if self._closing or len(self._peers) >= FETCHERS:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._attend, args=(sock,), name="serve-one", daemon=True)
                self._peers[sock] = thread
                thread.start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            self._give(_Wire(sock, Channel.of_leader(self._key, _LINE)), sock)
        except (OSError, ProtocolError) as error:
            if not self._closing:
                _log.warning("a snapshot was not given to who asked for it: %s", error)
        finally:
            with self._lock:
                del self._peers[sock]
                sock.close()
                rests = not self._peers and not self._closing
            if rests:
                self._rests()

    def _give(self, wire: _Wire, sock: socket.socket) -> None:
        wanted = wire.hear(_Wanted)
        header = self._slot.header()
        if header is None or (header.round, header.step) != (wanted.round, wanted.step):
            raise ProtocolError(f"The snapshot of step {wanted.step} of round {wanted.round} is not here.")
        wire.say(_Offered(header.training, header.tensors, header.state, header.meta))
        wire.hear(_Go)
        digest = hashlib.sha256()
        for part in chain(self._slot.tensor_parts(header), [self._slot.state(header), self._slot.meta(header)]):
            digest.update(part)
            wire.send(part)
        wire.say(_Sum(digest.hexdigest()))
        _log.info("the snapshot of step %d went to %s", header.step, sock.getpeername()[0])
        wire.await_end()


class Fetch:
    """Fetches one snapshot into a slot, in a thread of its own; the slot is empty until it is there.

    Args:
        sources: that have it; one after the other is tried.
        slot: into which nobody else writes meanwhile.
        sequence: number that the snapshot gets on this node.
        key: as for Server.
        done: called from the thread with what is in the slot; None if all have failed.
        after: a fetch into the same slot that was given up.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        slot: Slot,
        sequence: int,
        key: bytes | None,
        done: Callable[[Header | None], None],
        after: Fetch | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self._slot = slot
        self._sequence = sequence
        self._key = key
        self._done = done
        self._after = after
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)

    def start(self) -> None:
        """Begin; done may be called at once."""
        self._thread.start()

    @property
    def cancelled(self) -> bool:
        """Whether it was given up."""
        return self._closing

    def cancel(self) -> None:
        """Give up, soon."""
        with self._lock:
            self._closing = True
            if self._sock is not None:
                _shut(self._sock)

    def join(self) -> None:
        """Wait until the slot is left alone; bounded."""
        if self._thread.ident is not None:
            self._thread.join(2 * IDLE)

    def _run(self) -> None:
        header = None
        try:
            if self._after is not None:
                self._after.join()
            for source in self.sources:
                if header is None and not self._closing:
                    header = self._try(source)
        finally:
            self._done(header)

    def _try(self, source: Source) -> Header | None:
        began = time.monotonic()
        try:
            with socket.create_connection((source.address, source.port), timeout=IDLE) as sock:
                with self._lock:
                    if self._closing:
                        return None
                    self._sock = sock
                try:
                    header = self._take(source, _Wire(sock, Channel.of_node(self._key)))
                finally:
                    with self._lock:
                        self._sock = None
        except (OSError, ProtocolError) as error:
            if not self._closing:
                text = "the snapshot of step %d could not be fetched from %s: %s"
                _log.warning(text, source.step, source.address, error)
            return None
        size, took = header.tensors / 2**20, time.monotonic() - began
        text = "the snapshot of step %d was fetched from %s: %.1f MiB in %.2f s"
        _log.info(text, header.step, source.address, size, took)
        return header

    def _take(self, source: Source, wire: _Wire) -> Header:
        wire.say(_Wanted(source.round, source.step))
        offered = wire.hear(_Offered)
        sizes = (offered.tensors, offered.state, offered.meta)
        if min(*sizes, offered.training) < 0 or max(offered.state, offered.meta) > MAX_STATE_BYTES:
            raise ProtocolError(f"No snapshot has sizes of {sizes}.")
        slot = self._slot
        if offered.tensors - slot.allocated > 0.9 * free_memory():
            raise ProtocolError(f"there is no memory for its {offered.tensors / 2**30:.2f} GiB.")
        slot.begin()
        os.ftruncate(slot.tensors, offered.tensors)
        if offered.tensors:
            os.posix_fallocate(slot.tensors, 0, offered.tensors)
        wire.say(_Go())
        digest, at = hashlib.sha256(), 0
        for part in wire.receive(offered.tensors):
            digest.update(part)
            at += os.pwrite(slot.tensors, part, at)
        rest = []
        for size in (offered.state, offered.meta):
            rest.append(b"".join(bytes(part) for part in wire.receive(size)))
            digest.update(rest[-1])
        if wire.hear(_Sum).sha256 != digest.hexdigest():
            raise ProtocolError("What came is not what was sent.")
        header = Header(self._sequence, source.round, source.step, offered.training, *sizes)
        slot.commit(header, *rest)
        return header


def _shut(sock: socket.socket) -> None:
    """Wake up whoever waits at a socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
