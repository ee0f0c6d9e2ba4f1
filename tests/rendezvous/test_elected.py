"""Electing and succeeding a leader: real links, leaders and threads, on a store in memory."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from elastic_launch.clock import MonotonicClock
from elastic_launch.config import Command, Endpoint, LaunchConfig, Limits, Timing
from elastic_launch.errors import StoreError
from elastic_launch.events import Event, LeaderElected, NodeJoined, RoundFormed
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.elected import ElectedBackend
from elastic_launch.rendezvous.membership import Membership, MembershipEvent
from elastic_launch.rendezvous.record import ControlRecord, End
from elastic_launch.testing import MemoryStore

TIMING = Timing(join_settle=0.3, beat=0.1, dead_after=1.0, min_wait=20.0, read_timeout=5.0)


class View(MemoryStore):
    """One node's view of a store that all share: closing it closes nothing."""

    def __init__(self, shared: MemoryStore) -> None:
        self._shared = shared

    def load(self, timeout: float) -> bytes | None:
        return self._shared.load(timeout)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        return self._shared.compare_and_set(expected, value, timeout)

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        return self._shared.wait_changed(known, timeout)

    def close(self) -> None:
        return


class Cable(View):
    """A view that can be cut off."""

    cut = False

    def load(self, timeout: float) -> bytes | None:
        if self.cut:
            raise StoreError("cut off.")
        return super().load(timeout)


class Unanswered(View):
    """A view whose writes are made, but not answered."""

    answers = False

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        written = super().compare_and_set(expected, value, timeout)
        if not self.answers:
            raise StoreError("the write was not answered.")
        return written


class Sink:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)


def _backend(name: str, store: MemoryStore, events: Sink, limits: Limits) -> tuple[LaunchConfig, ElectedBackend]:
    config = LaunchConfig(
        Command(("python", "train.py"), ("train.py",)),
        limits=limits,
        backend="etcd",
        endpoint=Endpoint("127.0.0.1", 2379),
        timing=TIMING,
        node_id=name,
    )
    return config, ElectedBackend(config, MonotonicClock(), events, lambda: View(store))


class Node:
    """A node whose workers start and stop at once."""

    def __init__(self, name: str, store: MemoryStore, events: Sink, limits: Limits) -> None:
        self.name = name
        self.config, self.backend = _backend(name, store, events, limits)
        self.rounds: list[m.Form] = []
        self.broken: list[int] = []
        self.ends: list[int] = []
        self.evictions = 0
        self.deaf = False
        self.membership = Membership(self.config, self.backend, MonotonicClock(), self.hear, lambda address: 29500)

    def hear(self, event: MembershipEvent) -> None:
        match event:
            case m.Form():
                self.rounds.append(event)
                self.membership.joined(event.round.number)
            case m.Break(round=number):
                self.broken.append(number)
                self.membership.stopped(number, 29500)
            case m.Evicted():
                self.evictions += 1
                self.membership.stopped(self.rounds[-1].round.number if self.rounds else 0, 29500)
            case m.RunEnd(code=code):
                self.ends.append(code)

    def members(self) -> list[str]:
        return [member.node_id for member in self.rounds[-1].round.members] if self.rounds else []


class Nodes:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.events = Sink()
        self.nodes: dict[str, Node] = {}

    def start(self, *names: str, limits: Limits | None = None) -> None:
        for name in names:
            self.nodes[name] = Node(name, self.store, self.events, limits or Limits(1, 4, 3))
            self.nodes[name].membership.start()

    def leave(self, name: str) -> None:
        """As a process that is killed: its sockets close, its leader's too."""
        node = self.nodes.pop(name)
        node.membership._closing.set()  # before it could lead anew
        if node.backend._reign is not None:
            node.backend._reign._service.depose("killed")  # or it would see its own node go, and act on that
        node.membership.close()

    @property
    def record(self) -> ControlRecord:
        value = self.store.load(1)
        assert value is not None
        return ControlRecord.parse(value)

    def leader(self) -> str:
        return self.record.leader.node_id

    def until(self, what: str, probe: Callable[[], bool], timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not probe():
            assert time.monotonic() < deadline, f"not seen: {what}; {self.events.seen}"
            time.sleep(0.01)

    def together(self, *names: str) -> None:
        wanted = sorted(names)
        self.until(
            f"a round of {wanted}",
            lambda: (
                all(sorted(self.nodes[n].members()) == wanted for n in names)
                and len({self.nodes[n].rounds[-1].round.number for n in names}) == 1
            ),
        )


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for name in list(nodes.nodes):
        nodes.leave(name)


def _elected(nodes: Nodes) -> list[LeaderElected]:
    return [event for event in nodes.events.seen if isinstance(event, LeaderElected)]


def _joined(nodes: Nodes) -> list[str]:
    return [event.node for event in nodes.events.seen if isinstance(event, NodeJoined)]


def test_one_of_several_that_come_at_once_leads(nodes: Nodes) -> None:
    nodes.start("a", "b", "c")
    nodes.together("a", "b", "c")
    assert [event.term for event in _elected(nodes)] == [1]
    assert nodes.record.term == 1


def test_the_others_go_on_when_the_leader_is_gone(nodes: Nodes) -> None:
    nodes.start("a", "b", "c")
    nodes.together("a", "b", "c")
    first = nodes.leader()
    others = sorted({"a", "b", "c"} - {first})
    nodes.leave(first)
    nodes.together(*others)
    assert nodes.leader() in others
    assert nodes.record.term >= 2
    assert "its process is gone" in _elected(nodes)[-1].cause
    assert nodes.record.restarts == 0


def test_numbers_of_rounds_and_terms_only_rise_through_one_leader_after_the_other(nodes: Nodes) -> None:
    nodes.start("a", "b", "c", "d")
    nodes.together("a", "b", "c", "d")
    for _ in range(3):
        nodes.leave(nodes.leader())
        nodes.together(*nodes.nodes)
    formed = [(event.term, event.round) for event in nodes.events.seen if isinstance(event, RoundFormed)]
    assert formed == sorted(set(formed))
    assert len({number for _, number in formed}) == len(formed)
    assert len(formed) == 4


def test_a_running_round_survives_a_new_leader_that_takes_over_from_a_live_one(nodes: Nodes) -> None:
    """As after a pause of the leader: it steps down, its links close, and all bring the new one their workers."""
    nodes.start("a", "b")
    nodes.together("a", "b")
    first, record = nodes.leader(), nodes.record
    _, outsider = _backend("c", nodes.store, nodes.events, Limits(1, 4, 3))
    with contextlib.closing(outsider):
        outsider.open()
        outsider.unreachable(record, refused=False, silent_for=TIMING.dead_after)
        taken = outsider.find_leader(1.0)
        assert (taken.leader.node_id, taken.term) == ("c", record.term + 1)
        reign = nodes.nodes[first].backend._reign
        assert reign is not None
        nodes.until("the old leader has stepped down", lambda: not reign.alive)
        nodes.until("both have come to the new one", lambda: sorted(_joined(nodes)) == ["a", "a", "b", "b"])
        time.sleep(2 * TIMING.dead_after)
        assert [len(nodes.nodes[name].rounds) for name in "ab"] == [1, 1]
        assert [nodes.nodes[name].evictions for name in "ab"] == [0, 0]
        assert nodes.record.round.number == 1


def test_a_leader_that_answers_no_more_is_succeeded_after_its_silence(nodes: Nodes) -> None:
    """It listens, and says nothing: a frozen process."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        nodes.start("b")
        nodes.together("b")
        record = nodes.record
        leader = replace(record.leader, node_id="a", incarnation="elsewhere", port=frozen.getsockname()[1])
        held = replace(record, term=record.term + 1, leader=leader).renewed()
        value = nodes.store.load(1)
        assert nodes.store.compare_and_set(value, held.encode(), 1)
        nodes.until("b leads again", lambda: _elected(nodes)[-1].term == held.term + 1)
        assert nodes.record.term == held.term + 1
        assert "could not be reached for" in _elected(nodes)[-1].cause


def test_a_node_that_comes_to_an_ended_run_is_told_so_at_once(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.together("a")
    record = nodes.record
    nodes.leave("a")
    value = nodes.store.load(1)
    ended = replace(record, end=End(91, "all 3 restarts spent")).renewed()
    assert nodes.store.compare_and_set(value, ended.encode(), 1)
    nodes.start("b")
    nodes.until("the end", lambda: nodes.nodes["b"].ends == [91])


def test_a_node_that_was_cut_off_tries_the_leader_again_before_it_takes_over(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.together("a")
    cable = Cable(nodes.store)
    config, _ = _backend("b", nodes.store, nodes.events, Limits(1, 4, 3))
    with contextlib.closing(ElectedBackend(config, MonotonicClock(), nodes.events, lambda: cable)) as backend:
        backend.open()
        record = backend.find_leader(1.0)
        backend.unreachable(record, refused=False, silent_for=TIMING.dead_after)
        cable.cut = True
        with pytest.raises(StoreError):
            backend.find_leader(1.0)
        cable.cut = False
        assert backend.find_leader(1.0).leader.node_id == "a"
        backend.unreachable(record, refused=False)
        assert backend.find_leader(1.0).leader.node_id == "b"


def test_a_write_of_the_term_without_an_answer_is_not_the_death_of_its_writer(nodes: Nodes) -> None:
    """Whoever finds the record names a leader that does not know it: it must be found listening, until it does."""
    config, _ = _backend("a", nodes.store, nodes.events, Limits(1, 4, 3))
    unanswered = Unanswered(nodes.store)
    backend = ElectedBackend(config, MonotonicClock(), nodes.events, lambda: unanswered)
    with contextlib.closing(backend):
        backend.open()
        with pytest.raises(StoreError):
            backend.find_leader(1.0)
        leader = nodes.record.leader
        socket.create_connection((leader.address, leader.port), timeout=1.0).close()
        unanswered.answers = True
        taken = backend.find_leader(1.0)
        assert (taken.term, taken.leader) == (2, leader)
