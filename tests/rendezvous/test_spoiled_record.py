"""Foreign writes into an elected leader's record end nothing: real leaders and links, an in-memory store."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import elected_nodes
import pytest
from elected_nodes import PORT, TIMING, Nodes, Sink, View, backend_for
from leader_run import failure

from elastic_launch.config.launch_config import Limits
from elastic_launch.errors import RefusedError, StoreError
from elastic_launch.events.types import CauseFound, LeaderElected, RoundBroken
from elastic_launch.rendezvous.backends import election as elected_module
from elastic_launch.rendezvous.backends.c10d import FoundLeader
from elastic_launch.rendezvous.backends.election import ElectedBackend
from elastic_launch.rendezvous.continuity import STANDS, UNSEEN, Claim, Continuity, Sight, SpoiledError
from elastic_launch.rendezvous.record import ControlRecord, End, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.seal import ValueSeal
from elastic_launch.secret import Token
from elastic_launch.testing import FakeClock, MemoryStore

TOKEN = Token("correct-horse-battery-staple", "test")
SEAL = ValueSeal(TOKEN, "run")
FORGER = ValueSeal(Token("another-token-of-some-length", "test"), "run")

RECORD = ControlRecord("run", "digest", 3, Leader("a", "a1", "127.0.0.1", 4711), Round(7), run="0123").renewed()
OLD = replace(RECORD, run="4567", term=9, end=End(0, "all workers finished")).renewed()

SPOILED = {
    "garbage": b"\x00\xff{",
    "other json": b"{}",
    "forged": FORGER.close(RECORD.renewed().encode()),
    "an older round": SEAL.close(replace(RECORD, round=Round(6)).renewed().encode()),
    "an older term": SEAL.close(replace(RECORD, term=2).renewed().encode()),
    "the end of another run": SEAL.close(OLD.encode()),
    "deleted": None,
}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for name in list(nodes.nodes):
        nodes.leave(name)


def _member() -> Continuity:
    continuity = Continuity(SEAL)
    assert continuity.judge(SEAL.close(RECORD.encode())) == RECORD
    continuity.welcomed("0123")
    assert continuity.member
    return continuity


# Pure decisions.


@pytest.mark.parametrize("stored", SPOILED.values(), ids=list(SPOILED))
def test_a_member_believes_only_what_continues_its_run(stored: bytes | None) -> None:
    member = _member()
    with pytest.raises(SpoiledError):
        member.judge(stored)
    assert member.newest == RECORD
    for following in (RECORD.renewed(), replace(RECORD, round=Round(8)), replace(RECORD, term=4, end=End(1, "x"))):
        assert member.judge(SEAL.close(following.encode())) == following


def test_a_new_node_believes_a_sealed_record_until_a_leader_names_its_run() -> None:
    newcomer = Continuity(SEAL)
    assert newcomer.judge(None) is None
    assert newcomer.judge(SEAL.close(OLD.encode())) == OLD
    newcomer.welcomed("0123")
    assert not newcomer.member, "the record by which it came was another run's"
    assert newcomer.judge(SEAL.close(RECORD.encode())) == RECORD
    newcomer.welcomed("0123")
    assert newcomer.member


def test_a_member_learns_of_rounds_that_it_is_not_in() -> None:
    member = _member()
    member.heard(3, Round(40), 2)
    member.heard(2, Round(99), 3)
    assert member.newest == replace(RECORD, round=Round(40), restarts=2)


@pytest.mark.parametrize("stored", SPOILED.values(), ids=list(SPOILED))
def test_a_leader_recognizes_its_own_record_and_those_of_others(stored: bytes | None) -> None:
    claim = Claim(SEAL, RECORD, now=9.0)
    assert claim.look(stored) is Sight.SPOILED
    assert claim.look(SEAL.close(RECORD.encode())) is Sight.OWN
    following = replace(RECORD, round=Round(8)).renewed()
    pending = claim.propose(following)
    assert {claim.look(pending), claim.look(SEAL.close(RECORD.encode()))} == {Sight.OWN}
    claim.wrote(following, 9.5)
    assert claim.look(pending) is Sight.OWN
    assert claim.look(SEAL.close(RECORD.encode())) is Sight.SPOILED
    assert claim.look(SEAL.close(replace(RECORD, term=4).encode())) is Sight.SUCCEEDED
    assert claim.look(SEAL.close(replace(OLD, end=None).encode())) is Sight.RIVAL
    assert claim.look(SEAL.close(replace(OLD, end=None, first_term=4).encode())) is Sight.SPOILED


# Real nodes.


def _spoil(nodes: Nodes, value: bytes | None) -> None:
    with nodes.store._lock:
        nodes.store._value = value


def _repaired(nodes: Nodes, spoiled: bytes | None) -> None:
    nodes.until("the record to be repaired", lambda: nodes.store.load(1) != spoiled)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"garbage", id="garbage"),
        pytest.param(b"{}", id="other json", marks=pytest.mark.soak),
        pytest.param(None, id="deleted"),
    ],
)
def test_the_leader_repairs_its_record_and_the_run_continues(
    nodes: Nodes, value: bytes | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A leader counts its silence from its last confirmed claim: on a busy machine it would be cut off before it leads
    # again.
    monkeypatch.setattr(elected_nodes, "TIMING", replace(TIMING, dead_after=10.0))
    nodes.start("a", "b")
    nodes.together("a", "b")
    before, itself = nodes.record, 0
    for number in range(20):
        if number >= 3 and itself:
            break
        _spoil(nodes, value)
        _repaired(nodes, value)
        after = nodes.record
        assert (after.round, after.run) == (before.round, before.run)
        # On a busy machine another node may come first, or the leader has been silent for too long to know its terms.
        assert after.term > before.term
        itself += after.leader == before.leader and after.term == before.term + UNSEEN + 1
        before = after
        seen = [node.backend._continuity for node in nodes.nodes.values()]
        nodes.until("both to know it", lambda seen=seen, term=after.term: all(x.newest.term == term for x in seen))
    _spoil(nodes, value)
    if value is None:  # else a node that comes before the repair begins a run of its own
        _repaired(nodes, value)
    nodes.start("c")
    nodes.together("a", "b", "c")
    assert itself, "the leader usually repairs it itself"
    said = [x for x in caplog.records if "It is ignored, and will be repaired" in x.getMessage()]
    assert 1 <= len(said) <= 3, "each node says it once"


def test_a_leader_that_steps_down_before_its_own_node_has_connected_repairs_the_record(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it waited for an answer at its own port, which nothing served any more."""
    connect = socket.create_connection
    ended = []

    def late(address: tuple[str, int], timeout: float) -> socket.socket:
        if not ended:
            term = nodes.nodes["a"].backend._leader_term
            assert term is not None
            _spoil(nodes, b"garbage")
            nodes.until("the leader's end", lambda: not term.service._thread.is_alive())
            ended.append(term)
        return connect(address, timeout)

    monkeypatch.setattr(elected_nodes, "TIMING", replace(TIMING, dead_after=600.0))
    nodes.start("a")
    nodes.together("a")
    monkeypatch.setattr(socket, "create_connection", late)
    _spoil(nodes, b"garbage")
    nodes.until("the second repair", lambda: bool(ended) and nodes.store.load(1) != b"garbage")


def test_a_crash_right_after_the_record_was_spoiled_is_charged(nodes: Nodes) -> None:
    nodes.start("a", "b")
    nodes.together("a", "b")
    number = nodes.record.round.number
    _spoil(nodes, b"garbage")
    crashed = nodes.nodes["a"].membership
    crashed.report(failure("a", round=number))
    crashed.report(m.Stopped(number, PORT))
    _repaired(nodes, b"garbage")
    nodes.until("the next round", lambda: nodes.record.round.number > number)
    assert nodes.record.restarts == 1
    found = {event.kind for event in nodes.events.seen if isinstance(event, RoundBroken | CauseFound)}
    assert "crash" in found


def test_a_replayed_end_of_an_earlier_run_ends_neither_the_run_nor_a_node_that_comes(nodes: Nodes) -> None:
    nodes.start("a", token=TOKEN)
    nodes.together("a")
    seal = ValueSeal(TOKEN, "none")
    value = nodes.store.load(1)
    assert value is not None
    standing = ControlRecord.parse(seal.open(value))
    old = seal.close(replace(standing, run="old", term=9, end=End(0, "all workers finished")).renewed().encode())
    _spoil(nodes, old)
    nodes.start("b", token=TOKEN)
    nodes.together("a", "b")
    assert not nodes.nodes["a"].ends
    assert not nodes.nodes["b"].ends


def test_a_new_node_verifies_that_a_run_has_ended(nodes: Nodes) -> None:
    """With a token; without one nothing proves the end, see test_elected."""
    config, backend = backend_for("b", nodes.store, nodes.events, Limits(1, 4, 3), token=TOKEN)
    leader = Leader("a", "a1", "127.0.0.1", 1)
    ended = ControlRecord(config.run_id, config.digest(), 3, leader, end=End(0, "all workers finished"), run="01")
    _spoil(nodes, ValueSeal(TOKEN, config.run_id).close(ended.encode()))
    with contextlib.closing(backend):
        backend.open()
        began = time.monotonic()
        with pytest.raises(StoreError, match="waiting for a leader that may contradict"):
            backend.find_leader(1.0)
        assert _settled(backend).record == ended
        assert time.monotonic() - began >= STANDS


def test_members_repair_what_no_leader_repairs_and_skip_rounds_that_they_may_not_know(nodes: Nodes) -> None:
    nodes.start("a", "b", "c")
    nodes.together("a", "b", "c")
    leader, before = nodes.leader(), nodes.record
    others = sorted({"a", "b", "c"} - {leader})
    _crash(nodes, leader, then=lambda: _spoil(nodes, b"garbage"))
    nodes.together(*others)
    after = nodes.record
    assert after.leader.node_id in others
    assert after.run == before.run
    assert after.term > before.term + UNSEEN
    assert after.round.number > before.round.number + UNSEEN
    elected = [event for event in nodes.events.seen if isinstance(event, LeaderElected)]
    assert [event.term for event in elected] == [1, after.term]


def test_a_new_node_that_keeps_finding_garbage_gives_up_with_the_reason(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elected_nodes, "TIMING", replace(TIMING, dead_after=1.0))
    _spoil(nodes, b"garbage")
    nodes.start("a")
    nodes.until("the node to give up", lambda: bool(nodes.nodes["a"].lost), 20)
    assert "not JSON" in str(nodes.nodes["a"].lost[0])
    assert nodes.store.load(1) == b"garbage", "it is not this node's to repair"


def test_another_run_that_began_on_a_deleted_key_yields(nodes: Nodes) -> None:
    """The node came between the deletion and the repair: of the two runs the older one continues."""
    nodes.start("a", "b")
    nodes.together("a", "b")
    leader_term = nodes.nodes[nodes.leader()].backend._leader_term
    assert leader_term is not None
    config, _ = backend_for("c", nodes.store, nodes.events, Limits(1, 4, 3))
    other = ControlRecord(
        config.run_id, config.digest(), 1, Leader("c", "c1", "127.0.0.1", 1), Round(1, _members("c")), run="other"
    ).renewed()
    _spoil(nodes, other.encode())
    nodes.until("the older run to have its record again", lambda: nodes.record.run != "other")
    assert leader_term.service.alive


def test_a_run_without_a_round_yields_to_another() -> None:
    """As when the key is deleted while nodes join."""
    limits = Limits(2, 4, 3)
    nodes, other = Nodes(), Nodes()
    nodes.store = view = View(hidden := MemoryStore())
    with contextlib.ExitStack() as stack:
        for each in (nodes, other):
            stack.callback(lambda each=each: [each.leave(name) for name in list(each.nodes)])
        nodes.start("a", limits=limits)
        other.start("b", limits=limits)
        for each in (nodes, other):
            each.until("a record", lambda each=each: each.store.load(1) is not None)
        # From now on it is one store: where b is slow to answer, a may take its place, and b has to see that.
        view._shared = other.store
        with hidden._lock:
            hidden._value = other.store.load(1)
        found = [nodes.nodes["a"], other.nodes["b"]]
        nodes.until("both to be in one round", lambda: all(sorted(node.members()) == ["a", "b"] for node in found))
        assert not any(node.lost for node in found)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_of_two_runs_with_one_id_that_both_have_rounds_one_ends(
    monkeypatch: pytest.MonkeyPatch, token: Token | None
) -> None:
    """As when the key is deleted while nodes of one run cannot see it; before the fix, both repaired it forever."""
    monkeypatch.setattr(elected_module, "WATCH", 0.05)
    runs = Nodes(), Nodes()
    runs[0].store = view = View(hidden := MemoryStore())
    with contextlib.ExitStack() as stack:
        for each, name in zip(runs, "ab", strict=True):
            stack.callback(lambda each=each: [each.leave(name) for name in list(each.nodes)])
            each.start(name, token=token)
            each.until("a round", lambda each=each, name=name: bool(each.nodes[name].rounds))
        numbers = {name: each.nodes[name].backend._continuity.newest.run for each, name in zip(runs, "ab", strict=True)}
        view._shared = runs[1].store
        with hidden._lock:
            hidden._value = b"{}"
        loser, winner = sorted(numbers, key=numbers.__getitem__)
        both = {**runs[0].nodes, **runs[1].nodes}
        runs[0].until("one of them to end", lambda: both[loser].ends == [95], 30)
        assert both[winner].ends == []
        assert not both[winner].broken
        runs[1].until("its record", lambda: _run_in(runs[1], token) == numbers[winner])
    # The one that asks first is told; the other may end before it has asked.
    assert f"its leader is node {winner} at" in both[loser].causes[0]


def _run_in(nodes: Nodes, token: Token | None) -> str:
    value = nodes.store.load(1)
    assert value is not None
    return ControlRecord.parse(ValueSeal(token, nodes.nodes[next(iter(nodes.nodes))].config.run_id).open(value)).run


def _members(*names: str) -> tuple[Member, ...]:
    return tuple(Member(name, f"{name}1", 1, "127.0.0.1", 1) for name in names)


def _crash(nodes: Nodes, name: str, then: object) -> None:
    """End a leader as a kill does: it sends no message, and its port refuses connections."""
    node = nodes.nodes.pop(name)
    backend: ElectedBackend = node.backend
    leader_term = backend._leader_term
    assert leader_term is not None
    leader_term._stop.set()
    leader_term._thread.join(10)
    assert callable(then)
    then()
    node.membership._closing.set()
    leader_term.service.depose("killed by the test")
    node.membership.close()


def test_a_refusal_for_the_token_is_believed_once_it_stands(nodes: Nodes) -> None:
    _, backend = backend_for("b", nodes.store, nodes.events, Limits(1, 4, 3), token=TOKEN)
    _spoil(nodes, FORGER.close(RECORD.encode()))
    with contextlib.closing(backend):
        backend.open()
        with pytest.raises(StoreError, match="Waiting for the run's leader"):
            backend.find_leader(1.0)
        with pytest.raises(RefusedError, match="The token differs"):
            _settled(backend)


def _settled(backend: ElectedBackend) -> FoundLeader:
    """What a node finds when it no longer waits for a leader's repair."""
    deadline = time.monotonic() + 10 * STANDS
    while True:
        try:
            return backend.find_leader(1.0)
        except StoreError:
            assert time.monotonic() < deadline
            time.sleep(TIMING.beat)


def _later_run(record: ControlRecord) -> ControlRecord:
    """The record of a run that has begun under the same id after the end of this one."""
    leader, term = Leader("c", "c1", "127.0.0.1", 10), record.term + 2
    begun = replace(record, term=term, leader=leader, round=Round(record.round.number + 2), first_term=term, run="0")
    return begun.renewed()


def _looks_for(seconds: float, backend: ElectedBackend, clock: FakeClock) -> None:
    """A node looks for its leader, which is gone."""
    for _ in range(int(seconds / 0.25)):
        backend.unreachable(backend.find_leader(1.0), refused=True)
        clock.advance(0.25)


def test_a_node_that_was_frozen_until_its_run_had_ended_leaves_the_next_ones_record_alone() -> None:
    store, sink, clock, limits = MemoryStore(), Sink(), FakeClock(1000.0), Limits(1, 4, 3)
    config, _ = backend_for("t", store, sink, limits)
    record = ControlRecord("none", config.digest(), 3, Leader("a", "a1", "127.0.0.1", 9), run="ffff", limits=limits)
    record = record.renewed()
    assert store.compare_and_set(None, record.encode(), 1)
    with contextlib.closing(ElectedBackend(config, clock, sink, lambda: View(store))) as backend:
        backend.open()
        backend.find_leader(1.0)
        backend.reached(m.Welcome(3, "t", 0.1, 2.5, run="ffff", leader="a1"))
        backend.reached(m.Form(3, Round(7, _members("a", "t")), 0, "first"))
        clock.advance(60.0)
        later = _later_run(replace(record, round=Round(7)))
        assert store.compare_and_set(record.encode(), later.encode(), 1)
        _looks_for(4 * TIMING.dead_after, backend, clock)
        assert store.load(1) == later.encode()
        # What claims to be of a run that began before is a stranger's.
        strange = replace(later, first_term=record.term).renewed()
        assert store.compare_and_set(later.encode(), strange.encode(), 1)
        _looks_for(4 * TIMING.dead_after, backend, clock)
        assert [event.node for event in sink.seen if isinstance(event, LeaderElected)] == ["t"]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_leader_that_was_frozen_until_its_run_had_ended_does_so_too(frozen: bool) -> None:
    store, sink, clock, limits = MemoryStore(), Sink(), FakeClock(1000.0), Limits(1, 4, 3)
    config, _ = backend_for("t", store, sink, limits)
    with contextlib.closing(ElectedBackend(config, clock, sink, lambda: View(store))) as backend:
        backend.open()
        led = backend.find_leader(1.0).record
        assert led is not None
        backend.reached(m.Welcome(1, "t", 0.1, 2.5, run=led.run, leader=led.leader.incarnation))
        backend.reached(m.Form(1, Round(1, _members("t")), 0, "first"))
        leader_term = backend._leader_term
        assert leader_term is not None
        leader_term._stop.set()  # its watch would look again before the clock shows that it was frozen
        leader_term._thread.join(10)
        if frozen:
            clock.advance(60.0)
        later, stored = _later_run(led), store.load(1)
        assert store.compare_and_set(stored, later.encode(), 1)
        assert not leader_term._judge(store.load(1))
        leader_term.service.close(5)
        _looks_for(4 * TIMING.dead_after, backend, clock)
        assert (store.load(1) == later.encode()) == frozen


def test_a_leader_whose_run_has_ended_leaves_the_next_ones_record_alone() -> None:
    """It looks once more before it closes, when another node has begun the next run."""
    store, sink, clock, limits = MemoryStore(), Sink(), FakeClock(1000.0), Limits(1, 4, 3)
    config, _ = backend_for("t", store, sink, limits)
    with contextlib.closing(ElectedBackend(config, clock, sink, lambda: View(store))) as backend:
        backend.open()
        backend.find_leader(1.0)
        leader_term = backend._leader_term
        assert leader_term is not None
        leader_term._stop.set()
        leader_term._thread.join(10)
        before, claimed = leader_term.claim.record, leader_term._claimed
        ended = replace(before, end=End(0, "done")).renewed()
        assert claimed.compare_and_set(before.encode(), ended.encode(), 1)
        later, stored = _later_run(before), store.load(1)
        assert store.compare_and_set(stored, later.encode(), 1)
        assert not leader_term._judge(store.load(1))
        assert not claimed.compare_and_set(ended.encode(), replace(ended, restarts=1).renewed().encode(), 1)
        assert store.load(1) == later.encode()
        leader_term.service.close(5)
