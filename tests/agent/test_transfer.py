"""Snapshots sent from one agent to another over real sockets, and failures in between."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from harness import wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_agents.snapshots import snapshot_store, transfer
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.snapshots.transfer import TransferServer
from elastic_launch.contract import CopyJob, Fetched, Stored
from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.rendezvous.wire.authentication import Channel
from elastic_launch.rendezvous.wire.messages import SnapshotSource
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter, read_meta, read_state

KEY = b"k" * 32


class Node:
    """A snapshot store; what a worker finds in its slots."""

    def __init__(self) -> None:
        self.snapshot_store = SnapshotStore(lambda: True, lambda copied: self.rested.set() or True)
        self.snapshot_store.start()
        _, numbers = self.snapshot_store.offer()
        self.slots = [Slot(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        self.rested = threading.Event()
        self.fetched: list[Fetched] = []

    def store(self, step: int, *, round: int = 1, size: int = 300_000) -> None:
        offer, _ = self.snapshot_store.offer()
        writer = SlotWriter(self.slots[offer.use])
        state = {"x": torch.arange(size, dtype=torch.float64) + step, "name": "a"}
        draft = SlotDraft(state, {"step": step}, lambda x: True)
        writer.write(draft, Header(offer.sequence + 1, round, step, EVALUATED, 2))
        writer.close()
        self.snapshot_store.stored(Stored(offer.use, CopyJob(offer.sequence + 1, step, round)))

    def serve(self, key: bytes | None = None) -> SnapshotSource:
        newest = self.snapshot_store.newest
        assert newest is not None
        port = self.snapshot_store.serve(listen("127.0.0.1"), key)
        return SnapshotSource("127.0.0.1", port, newest.round, newest.step)

    def fetch(self, *sources: SnapshotSource, key: bytes | None = None) -> None:
        self.snapshot_store.fetch(sources, key, self.fetched.append)

    def holds(self) -> tuple[int, int] | None:
        """Round and step of the newest snapshot, once nothing is being fetched."""
        wait_for("the end of the fetch", lambda: not self.snapshot_store.offer()[0].fetching)
        newest = self.snapshot_store.newest
        return None if newest is None else (newest.round, newest.step)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with ExitStack() as stack:
        made = Node(), Node()
        for node in made:
            stack.callback(node.snapshot_store.close)
        yield made


@pytest.mark.parametrize("key", [None, KEY], ids=["no token", "token"])
def test_a_snapshot_arrives_to_the_bit(nodes: tuple[Node, Node], key: bytes | None) -> None:
    old, new = nodes
    old.store(7, round=3)
    source = old.serve(key)
    new.fetch(source, key=key)
    assert new.holds() == (3, 7)
    held = new.snapshot_store.newest
    assert held is not None
    slot = new.slots[held.slot]
    header = slot.header()
    assert header is not None
    assert (header.sequence, header.training) == (1, 2)
    state = read_state(slot, header)
    assert torch.equal(state["x"], torch.arange(300_000, dtype=torch.float64) + 7)
    assert (state["name"], read_meta(slot, header)) == ("a", {"step": 7})
    wait_for("the word to the workers", lambda: new.fetched)
    assert [(told.use != held.slot, told.sequence) for told in new.fetched] == [(True, 1)]
    wait_for("the server's rest", old.rested.is_set)
    assert old.snapshot_store.idle


def test_during_a_fetch_workers_wait_and_get_no_slot_to_write(nodes: tuple[Node, Node]) -> None:
    _, new = nodes
    with listen("127.0.0.1") as silent:
        new.fetch(SnapshotSource("127.0.0.1", silent.getsockname()[1], 3, 7))
        offer, _ = new.snapshot_store.offer()
        assert (offer.fetching, offer.use) == (True, None)
        new.fetch()  # the next round has it
        assert new.holds() is None
        wait_for("the word to the workers", lambda: new.fetched)
    assert new.snapshot_store.offer()[0].use >= 0


def test_a_fetch_that_does_not_end_holds_up_nothing_and_keeps_its_descriptors(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel reserves memory for as long as it likes."""
    old, new = nodes
    old.store(7)
    source = old.serve()
    reserving, go_on = threading.Event(), threading.Event()

    def reserve(descriptor: int, offset: int, size: int) -> None:
        reserving.set()
        go_on.wait(60)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    for module in (transfer, snapshot_store):
        monkeypatch.setattr(module, "ENDING", 0.2)
    new.fetch(source)
    assert reserving.wait(30)
    new.fetch(replace(source, step=8))
    assert new.holds() is None
    assert "the newest snapshot is not fetched: an earlier fetch does not end" in caplog.text
    slots = new.snapshot_store._slots
    new.snapshot_store.close()
    assert [slot.allocated for slot in slots], "a closed one would raise an error"
    go_on.set()
    fetch = new.snapshot_store._last_fetch
    assert fetch is not None
    assert fetch.join(30)
    for slot in slots:
        slot.close()


def test_a_node_that_has_it_fetches_nothing(nodes: tuple[Node, Node]) -> None:
    old, new = nodes
    old.store(7)
    new.store(7)
    new.fetch(old.serve())
    assert not new.snapshot_store.offer()[0].fetching
    assert new.fetched == []


def test_an_older_snapshot_is_kept_until_the_newer_one_is_complete(nodes: tuple[Node, Node]) -> None:
    old, new = nodes
    new.store(3)
    old.store(7)
    new.fetch(old.serve())
    assert new.holds() == (1, 7)
    steps = {header.step for slot in new.slots if (header := slot.header()) is not None}
    assert steps == {3, 7}


def test_one_source_that_lives_is_enough(nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture) -> None:
    old, new = nodes
    old.store(7)
    with listen("127.0.0.1") as gone:
        dead = SnapshotSource("127.0.0.1", gone.getsockname()[1], 1, 7)
    new.fetch(dead, old.serve())
    assert new.holds() == (1, 7)
    assert "the snapshot of step 7 could not be fetched from 127.0.0.1" in caplog.text


@pytest.mark.parametrize(("theirs", "ours"), [(KEY, b"x" * 32), (KEY, None), (None, KEY)])
def test_a_node_with_another_token_gets_and_gives_nothing(
    nodes: tuple[Node, Node], theirs: bytes | None, ours: bytes | None
) -> None:
    old, new = nodes
    old.store(7)
    new.fetch(old.serve(theirs), key=ours)
    assert new.holds() is None
    assert [slot.header() for slot in new.slots] == [None] * len(new.slots)


def test_another_snapshot_than_the_one_agreed_on_is_not_given(nodes: tuple[Node, Node]) -> None:
    old, new = nodes
    old.store(7, round=2)
    source = old.serve()
    new.fetch(SnapshotSource(source.address, source.port, 3, 7))
    assert new.holds() is None


class Relay:
    """A relay to a server: after a number of bytes from the server, one byte changes or the connection ends."""

    def __init__(self, port: int, after: int, *, cut: bool) -> None:
        self._listener = listen("127.0.0.1")
        self._port, self._after, self._cut = port, after, cut
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        with suppress(OSError), sock, socket.create_connection(("127.0.0.1", self._port)) as server:
            back = threading.Thread(target=self._pass, args=(sock, server))
            back.start()
            seen = 0
            while data := server.recv(65536):
                at, seen = self._after - seen, seen + len(data)
                if 0 <= at < len(data):
                    if self._cut:
                        break
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                sock.sendall(data)
            for end in (sock, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()

    def _pass(self, sock: socket.socket, server: socket.socket) -> None:
        try:
            while data := sock.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


@pytest.mark.parametrize("cut", [False, True], ids=["altered", "cut off"])
@pytest.mark.parametrize("key", [None, KEY], ids=["no token", "token"])
def test_what_does_not_arrive_as_it_was_sent_is_none(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture, cut: bool, key: bytes | None
) -> None:
    old, new = nodes
    old.store(7)
    source = old.serve(key)
    relay = Relay(source.port, 1_000_000, cut=cut)
    try:
        new.fetch(SnapshotSource(source.address, relay.port, 1, 7), key=key)
        assert new.holds() is None
    finally:
        relay.close()
    assert [slot.header() for slot in new.slots] == [None] * len(new.slots)
    assert ("hung up before all was there" if cut else "What came is not what was sent") in caplog.text


def test_strangers_do_not_prevent_a_server_from_closing(tmp_path: Path) -> None:
    slot = Slot.make("test")
    server = TransferServer(listen("127.0.0.1"), slot, None, lambda: None)
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_for("strangers", lambda: sum(peer.stranger for peer in server._peers) == 6)
        assert not server.busy
        server.close()
    assert not server.busy
    slot.close()


@contextmanager
def dripping(port: int, number: int) -> Iterator[Callable[[], int]]:
    """Connections that send a byte every now and then; yields the number of connections that the server has closed."""
    ended, hung_up = threading.Event(), 0

    def drip(socks: list[socket.socket]) -> None:
        nonlocal hung_up
        while not ended.wait(0.2):
            for sock in list(socks):
                try:
                    sock.sendall(b"x")
                except OSError:
                    socks.remove(sock)
                    hung_up += 1

    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(number)]
        thread = threading.Thread(target=drip, args=(socks,))
        thread.start()
        try:
            yield lambda: hung_up
        finally:
            ended.set()
            thread.join(30)


@pytest.mark.parametrize("key", [None, KEY], ids=["no token", "token"])
@pytest.mark.parametrize("number", [5, 100])
def test_connections_that_drip_do_not_keep_a_node_from_its_snapshot(
    nodes: tuple[Node, Node], key: bytes | None, number: int
) -> None:
    old, new = nodes
    old.store(7)
    source = old.serve(key)
    with dripping(source.port, number):
        new.fetch(source, key=key)
        assert new.holds() == (1, 7)


def test_a_connection_that_drips_is_closed_in_time(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "IDLE", 1.0)
    old, _ = nodes
    old.store(7)
    source = old.serve(KEY)
    with dripping(source.port, 5) as hung_up:
        wait_for("their end", lambda: hung_up() == 5)
    assert caplog.text.count("a snapshot was not given to 127.0.0.1") == 1
    assert not old.rested.is_set(), "no node was served"


def test_a_part_may_take_longer_than_a_pause_between_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of values, or eight megabytes of tensors, through a link that is slow."""
    monkeypatch.setattr(transfer, "IDLE", 0.5)
    monkeypatch.setattr(transfer, "SLOWEST", 16 * 1024)
    part, received = bytes(range(256)) * 2048, bytearray()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def read_slowly() -> None:
            while len(received) < len(part):
                received.extend(theirs.recv(32 * 1024))
                paused.wait(0.1)

        paused = threading.Event()
        reader = threading.Thread(target=read_slowly)
        reader.start()
        transfer._Wire(ours, cast(Channel, None)).send(part)
        paused.set()
        reader.join(30)
    assert received == part


def test_numbers_that_no_snapshot_has_end_a_fetch_and_no_thread(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    _, new = nodes
    header = {"sequence": 1, "round": 1, "step": 7, "phase": 0, "training": 0, "tensors": 8, "state": 8, "meta": 8}
    wrong = [{"training": 10**30}, {"tensors": 2**70}, {"state": -8}, {"state": 10**400}, {"tensors": 8.5}]
    offers = [header | numbers for numbers in wrong]
    with listen("127.0.0.1") as listener:

        def lie() -> None:
            for offer in offers:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(4096)
                    sock.sendall(json.dumps(offer).encode() + b"\n")
                    sock.recv(4096)

        liar = threading.Thread(target=lie)
        liar.start()
        new.fetch(
            *[SnapshotSource("127.0.0.1", listener.getsockname()[1], 1, 7 + number) for number in range(len(offers))]
        )
        assert new.holds() is None
        liar.join(30)
    assert caplog.text.count("could not be fetched") == len(offers)
    assert caplog.text.count("No snapshot has such numbers and sizes.") == len(offers) - 1
    assert "Header.tensors: int was expected" in caplog.text
    assert [slot.header() for slot in new.slots] == [None] * len(new.slots)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_anything_that_a_stranger_sends_is_refused(sent: bytes, token: bool) -> None:
    _hear(sent, KEY if token else None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=3000), st.booleans())
def test_anything_that_a_stranger_sends_is_refused_at_length(sent: bytes, token: bool) -> None:
    _hear(sent, KEY if token else None)


def _hear(sent: bytes, key: bytes | None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        wire = transfer._Wire(ours, Channel.of_leader(key, 65536))
        with suppress(ProtocolError):
            assert isinstance(wire.hear(transfer._Wanted), transfer._Wanted)
            assert key is None
