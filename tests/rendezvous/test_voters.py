"""Voters with files, sockets and threads, and the flags that ask for them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from harness import free_port, wait_for

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import Endpoint, parse_voters
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.errors import (
    EndpointError,
    LeasedError,
    RecordTooLargeError,
    StoreError,
    UnresolvedError,
    UsageError,
)
from elastic_launch.events.facts import Misfit
from elastic_launch.rendezvous.backends.voting import VotingBackend
from elastic_launch.rendezvous.stores import majority
from elastic_launch.rendezvous.stores.majority import MajorityStore, OwnVoter
from elastic_launch.rendezvous.voters.messages import (
    MESSAGES,
    Ballot,
    Greeting,
    Prepare,
    ReadValue,
    VoterAnswer,
    VoterRequest,
    group_of,
)
from elastic_launch.rendezvous.voters.server import MAX_STRANGERS, VoterServer
from elastic_launch.rendezvous.voters.vote_file import VoteFile
from elastic_launch.rendezvous.voters.voter import VoterState
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import link_key
from elastic_launch.secret import Token

DEAD_AFTER = 1.0

TOKEN = Token("correct-horse-battery-staple", "test")


class Voters:
    """Voters on this host, each with its store."""

    def __init__(self, directory: Path, names: str = "abc") -> None:
        self.directory = directory
        self.endpoints = {name: Endpoint("127.0.0.1", free_port()) for name in names}
        self.group = group_of("run", map(str, self.endpoints.values()))
        self.key = link_key(TOKEN, "run")
        self.stores: dict[str, MajorityStore] = {}
        self.servers: dict[str, VoterServer] = {}
        self.own: dict[str, OwnVoter] = {}

    def start(self, *names: str) -> None:
        for name in names:
            endpoint = self.endpoints[name]
            others = frozenset(map(str, self.endpoints.values())) - {str(endpoint)}
            file = VoteFile(self.directory, str(endpoint))
            own = OwnVoter(str(endpoint), self.group, others, file, DEAD_AFTER, MonotonicClock().now())
            store = self._store(own)
            listener = socket.create_server((endpoint.host, endpoint.port))
            self.servers[name] = VoterServer(listener, self.key, store.vote, Misfit("alone"))
            self.servers[name].start()
            self.stores[name], self.own[name] = store, own

    def begin(self) -> None:
        """Start all voters that are missing, and wait until all vote."""
        self.start(*(name for name in self.endpoints if name not in self.stores))
        wait_for("their votes", lambda: all(own.founded for own in self.own.values()))

    def lose_file(self, name: str) -> None:
        self.stop(name)
        with contextlib.closing(VoteFile(self.directory, str(self.endpoints[name]))) as file:
            file.remove()

    def _store(self, own: OwnVoter | None) -> MajorityStore:
        endpoints = tuple(self.endpoints.values())
        return MajorityStore(endpoints, "run", self.key, MonotonicClock(), own, DEAD_AFTER)

    @contextlib.contextmanager
    def reader(self) -> Iterator[MajorityStore]:
        store = self._store(None)
        try:
            yield store
        finally:
            store.close()

    def stop(self, *names: str) -> None:
        for name in names:
            self.servers.pop(name).close()
            self.stores.pop(name).close()
            self.own.pop(name).file.close()


@pytest.fixture
def voters(tmp_path: Path) -> Iterator[Voters]:
    found = Voters(tmp_path)
    try:
        yield found
    finally:
        found.stop(*found.stores)


def test_a_majority_keeps_the_value_and_one_writer_replaces_another(voters: Voters) -> None:
    voters.begin()
    a, b = voters.stores["a"], voters.stores["b"]
    assert a.load(20) is None
    assert a.compare_and_set(None, b"1", 20)
    assert b.load(20) == b"1"
    with pytest.raises(StoreError, match=r"wait for .* s more for the leader that they have heard"):
        b.compare_and_set(b"1", b"2", 5)
    assert a.compare_and_set(b"1", b"2", 20)
    assert a.renew(20) == b"2"
    a.resign()
    with voters.reader() as reader:
        assert reader.load(20) == b"2"
        with pytest.raises(StoreError):
            reader.compare_and_set(b"2", b"3", 1)

    def replaced() -> list[bool]:
        with contextlib.suppress(LeasedError):  # the third voter may hear of a's farewell after b asks it
            return [b.compare_and_set(b"1", b"3", 20)]
        return []

    assert wait_for("a's farewell to arrive", replaced) == [False]
    assert b.compare_and_set(b"2", b"3", 20)
    assert a.load(20) == b"3"
    with pytest.raises(RecordTooLargeError):
        b.compare_and_set(b"3", b"4" * (majority.MAX_RECORD + 1), 1)


def test_a_majority_goes_on_and_the_rest_says_what_it_waits_for(voters: Voters) -> None:
    voters.start("a", "b")

    def waits_for_c() -> bool:
        with pytest.raises(StoreError) as caught:
            voters.stores["a"].compare_and_set(None, b"1", 1)
        assert "Start the agents on all hosts" in caught.value.hint
        return caught.value.message.endswith(f"missing: {voters.endpoints['c']} (nothing listens there).")

    wait_for("what is missing", waits_for_c)
    voters.begin()
    assert voters.stores["a"].compare_and_set(None, b"1", 20)
    wait_for("the third vote", lambda: voters.own["c"].voter.state.value == "1")
    voters.stop("a")
    b = voters.stores["b"]
    assert b.load(20) == b"1"

    def written() -> bool:
        with contextlib.suppress(StoreError):
            return b.compare_and_set(b"1", b"2", 2)
        return False

    wait_for("the end of the lease", written)
    voters.stop("c")
    with pytest.raises(StoreError, match=r"2 of 3 voters lost .*waiting until one of them is back") as caught:
        b.load(0.5)
    assert "Start the agents" in caught.value.hint
    voters.start("a")
    assert b.load(20) == b"2"


def _promise_another_ballot(voters: Voters, name: str, leader: str) -> Ballot:
    """As of a candidate that came to nothing."""
    own = voters.own[leader].voter
    ballot = replace(own.state.promised, number=own.state.promised.number + 1)
    answer = voters.stores[name].vote(Prepare(-1, voters.group, ballot, own.state.life))
    assert answer is not None
    assert answer.granted
    return ballot


def test_a_leader_that_one_voter_refuses_does_not_need_the_third(voters: Voters) -> None:
    voters.begin()
    a = voters.stores["a"]
    assert a.load(20) is None
    assert a.compare_and_set(None, b"1", 20)
    wait_for("the third vote", lambda: voters.own["c"].voter.state.value == "1")
    _promise_another_ballot(voters, "b", "a")
    voters.stop("c")
    assert a.renew(20) == b"1"
    assert a.compare_and_set(b"1", b"2", 20)


def test_a_voter_that_refuses_the_leader_follows_it_again(voters: Voters) -> None:
    voters.begin()
    a = voters.stores["a"]
    assert a.load(20) is None
    assert a.compare_and_set(None, b"1", 20)
    for name in "bc":
        promised = _promise_another_ballot(voters, name, "a")

        def follows() -> bool:
            assert a.renew(20) == b"1"
            return len({own.voter.state.promised for own in voters.own.values()}) == 1

        wait_for("one ballot", follows)
        assert voters.own[name].voter.state.promised > promised


def test_a_write_that_one_voter_refuses_waits_for_the_third(voters: Voters, monkeypatch: pytest.MonkeyPatch) -> None:
    voters.begin()
    a, save = voters.stores["a"], voters.own["c"].file.save
    assert a.load(20) is None
    assert a.compare_and_set(None, b"1", 20)

    def save_slowly(state: VoterState) -> None:
        time.sleep(3 * majority.LATE)
        save(state)

    monkeypatch.setattr(voters.own["c"].file, "save", save_slowly)
    for number in range(1, 4):
        _promise_another_ballot(voters, "b", "a")
        assert a.compare_and_set(b"%d" % number, b"%d" % (number + 1), 20)


def test_a_voter_without_its_file_takes_the_state_of_all_others(voters: Voters) -> None:
    voters.begin()
    assert voters.stores["a"].compare_and_set(None, b"1", 20)
    voters.stop("b")
    voters.lose_file("c")
    voters.start("c")
    with pytest.raises(StoreError, match="has no state of the run, which begins only when all voters are there"):
        voters.stores["c"].load(0.5)
    voters.start("b")
    assert voters.stores["c"].load(20) == b"1"
    wait_for("its vote", lambda: voters.own["c"].founded)


def test_a_voter_that_leaves_last_answers_those_that_are_connected(voters: Voters) -> None:
    voters.begin()
    assert voters.stores["a"].compare_and_set(None, b"1", 20)
    with voters.reader() as reader:
        assert reader.load(20) == b"1"
        wait_for("all links", lambda: all(_asked(server) == 3 for server in voters.servers.values()))
        for store in voters.stores.values():
            store.close()
        leaving = [
            threading.Thread(target=server.close, args=(seconds,))
            for server, seconds in zip(voters.servers.values(), (600, 600, 0), strict=True)
        ]
        for thread in leaving:
            thread.start()
        leaving[-1].join(10)
        assert reader.load(20) == b"1"
        assert [thread.is_alive() for thread in leaving] == [True, True, False]
    for thread in leaving:
        thread.join(10)
    assert not any(thread.is_alive() for thread in leaving)


def test_a_voter_that_is_busy_for_longer_than_its_end_is_waited_for_ends_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, go_on = threading.Event(), threading.Event()

    def vote(request: VoterRequest) -> None:
        called.set()
        go_on.wait(60)

    server = VoterServer(socket.create_server(("127.0.0.1", 0)), None, vote, Misfit("alone"))
    thread = server._thread
    with socket.create_connection(server._listener.getsockname(), timeout=20) as link:
        server.start()
        link.sendall(MESSAGES.pack(Greeting(1, "run")))
        assert called.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(thread, "join", lambda seconds: None)  # as if the 5 s were over
            server.close(600)  # so it waits in its selector for what is sent
        go_on.set()
        link.shutdown(socket.SHUT_WR)
        thread.join(60)
        assert not thread.is_alive()
        assert server._links.waker._file.closed


def _asked(server: VoterServer) -> int:
    return sum(link.greeted for link in list(server._links.open.values()))


def test_two_voters_without_their_files_say_how_to_begin_again(voters: Voters) -> None:
    voters.begin()
    for name in "bc":
        voters.lose_file(name)
    voters.start("b", "c")

    def said() -> bool:
        with pytest.raises(StoreError) as caught:
            voters.stores["b"].load(0.2)
        return "have no file, but another one has" in caught.value.message and "--rdzv-id" in caught.value.hint

    wait_for("what is to be done", said)


def test_a_voter_that_cannot_write_its_file_does_not_vote(voters: Voters, monkeypatch: pytest.MonkeyPatch) -> None:
    voters.begin()
    a = voters.stores["a"]
    assert a.load(20) is None
    assert a.compare_and_set(None, b"1", 20)

    def full(state: VoterState) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    own = voters.own["c"]
    # A write returns once most voters have it, which need not be this one.
    wait_for("the write at the voter", lambda: own.voter.state.value == "1")
    with monkeypatch.context() as patch:
        patch.setattr(own.file, "save", full)
        assert a.compare_and_set(b"1", b"2", 20)
        wait_for("its problem", lambda: "No space left" in own.problem)
        assert own.voter.state.value == "1"
        a.resign()
        with pytest.raises(StoreError, match=r"does not vote: .* cannot be written: No space left"):
            voters.stores["c"].compare_and_set(b"2", b"3", 0.5)
    assert a.load(20) == b"2"


def test_a_file_is_of_one_process_and_one_group(tmp_path: Path) -> None:
    state = VoterState("group", "life", promised=majority.VoterAnswer(0, "").promised)
    with contextlib.closing(VoteFile(tmp_path, "[::1]:29400")) as file:
        assert file.load("group") is None
        file.save(state)
        assert file.load("group") == state
        assert file.load("other") is None
        file.path.write_text("{")
        assert file.load("group") is None
        file.remove()
        assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(EndpointError, match=r"cannot keep its state in .*File exists"):
        VoteFile(tmp_path / "file" / "below", "a:1")


def _connected(voters: Voters, name: str) -> socket.socket:
    endpoint = voters.endpoints[name]
    return socket.create_connection((endpoint.host, endpoint.port), timeout=20)


def test_strangers_neither_stop_a_voter_nor_learn_anything(voters: Voters) -> None:
    voters.key = None
    voters.begin()
    a = voters.stores["a"]
    assert a.load(20) is None
    with contextlib.ExitStack() as links:
        for _ in range(MAX_STRANGERS + 5):
            links.enter_context(_connected(voters, "b"))
        for garbage in (
            b"\0" * 100_000,
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"type":"voteranswer","id":1,"voter":"a"}\n',
            b"[]\n",
        ):
            link = links.enter_context(_connected(voters, "b"))
            link.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(4096) == b""
        assert a.compare_and_set(None, b"1", 20)
        for hello in (m.NodeHello(m.PROTOCOL_VERSION, "run", "", "", "", "n", "n1", 1, "h", 1), Greeting(1, "other")):
            link = links.enter_context(_connected(voters, "b"))
            link.sendall(m.pack(hello) if isinstance(hello, m.NodeHello) else MESSAGES.pack(hello))
            line = link.makefile("rb").readline()
            if isinstance(hello, m.NodeHello):
                refused = m.unpack(line)
                assert isinstance(refused, m.Refused)
                assert "one of several" in refused.reason
            else:
                answer = MESSAGES.unpack(line)
                assert isinstance(answer, VoterAnswer)
                assert answer.refused
                assert not answer.life
        assert a.load(20) == b"1"


def test_a_stranger_of_another_group_is_refused_and_is_not_waited_for(voters: Voters) -> None:
    voters.key = None
    voters.begin()
    server = voters.servers["b"]
    with contextlib.ExitStack() as links:
        for request in (Greeting(1, "other"), ReadValue(1, "other")):
            link = links.enter_context(_connected(voters, "b"))
            before = _asked(server)
            link.sendall(MESSAGES.pack(request) * 2)
            lines = link.makefile("rb").readlines()  # to the end of the connection
            answer = MESSAGES.unpack(lines[0])
            assert isinstance(answer, VoterAnswer)
            assert answer.refused
            assert len(lines) == 1
            assert _asked(server) == before


def test_nodes_of_another_run_are_told_so(voters: Voters) -> None:
    voters.begin()
    store = MajorityStore(tuple(voters.endpoints.values()), "another", voters.key, MonotonicClock())

    def said() -> bool:
        with pytest.raises(StoreError) as caught:
            store.load(0.5)
        return caught.value.message.count("it was started for another run, or with other names") == 3

    with contextlib.closing(store):
        wait_for("all refusals", said)
        assert said(), "it stays with that"


def test_nodes_with_another_token_are_told_so(voters: Voters) -> None:
    voters.begin()
    voters.key = link_key(Token("another-horse-battery-staple", "test"), "run")
    with voters.reader() as reader, pytest.raises(StoreError, match="The token differs from that of the run"):
        reader.load(1.0)


def test_a_closed_store_answers_at_once(voters: Voters) -> None:
    voters.start("a")
    began = time.monotonic()
    voters.stores["a"].close()
    with pytest.raises(StoreError):
        voters.stores["a"].load(300)
    assert time.monotonic() - began < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "names 2 hosts: with an even number"),
        ("a,b,c,d", "names 4 hosts"),
        ("a,b,a", "names a host and port twice"),
        ("a:0,b,c", "has port 0"),
        ("a,b,", "names no host"),
        (",".join(f"h{i}" for i in range(9)), "names 9 hosts, of at most 7"),
    ],
)
def test_what_is_no_set_of_voters_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_voters(text)


def test_the_voters_are_part_of_what_nodes_must_agree_on() -> None:
    assert parse_voters("a:1") == (Endpoint("a", 1),)
    three = parse_voters("a, b:1,[::1]:2")
    assert three == (Endpoint("a", 29400), Endpoint("b", 1), Endpoint("::1", 2))
    command = Command((), ("train.py",))
    config = LaunchConfig(command, endpoint=three[0], endpoints=three)
    assert config.kind.elected
    assert config.digest() == LaunchConfig(command, endpoint=three[2], endpoints=three[::-1]).digest()
    assert config.digest() != LaunchConfig(command, endpoint=three[0]).digest()
    assert (
        config.digest() != LaunchConfig(command, endpoint=three[0], endpoints=(*three[:2], Endpoint("c", 1))).digest()
    )


def test_a_host_is_the_voter_of_its_name_rather_than_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS may still give its address for the name of a host that is gone."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.localdomain")
    hosts = ("127.0.0.1", "localhost", "127.0.0.1")
    endpoints = tuple(Endpoint(host, free_port()) for host in hosts)
    config = LaunchConfig(Command(("python",), ("train.py",)), run_id="run", endpoint=endpoints[0], endpoints=endpoints)
    endpoint, listener = VotingBackend(config, MonotonicClock(), lambda event: None)._bind()
    assert listener is not None
    listener.close()
    assert endpoint == endpoints[1]


def test_a_node_that_waits_for_the_voters_names_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens its backend again, several times a second, until one of the names resolves."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: _raise(socket.gaierror(-2, "unknown")))
    endpoints = tuple(Endpoint(f"voter{number}.invalid", 29400) for number in range(3))
    config = LaunchConfig(Command(("python",), ("train.py",)), run_id="run", endpoint=endpoints[0], endpoints=endpoints)
    before = {*threading.enumerate()}
    with contextlib.closing(VotingBackend(config, MonotonicClock(), lambda event: None)) as backend:
        for _ in range(3):
            with pytest.raises(UnresolvedError):
                backend.open()
            assert {*threading.enumerate()} <= before


def test_a_voter_that_cannot_open_lets_its_port_and_its_file_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = tuple(Endpoint("127.0.0.1", free_port()) for _ in range(3))
    command = Command(("python",), ("train.py",))
    config = LaunchConfig(command, run_id="run", endpoint=endpoints[0], endpoints=endpoints, log_dir=tmp_path)
    backend = VotingBackend(config, MonotonicClock(), lambda event: None)
    with contextlib.closing(backend):
        with monkeypatch.context() as fails:
            fails.setattr(backend, "_advertised", lambda: _raise(UnresolvedError("not yet.")))
            for _ in range(2):
                with pytest.raises(UnresolvedError):
                    backend.open()
        backend.open()


def _raise(error: Exception) -> NoReturn:
    raise error
