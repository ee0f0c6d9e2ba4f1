"""Electing a leader and its successor: real links, leaders and threads, on an in-memory store."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from elected_nodes import TIMING, Nodes, View, backend_for

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.launch_config import Command, Limits
from elastic_launch.errors import RefusedError, StoreError
from elastic_launch.events.types import LeaderElected, NodeJoined, RoundFormed
from elastic_launch.rendezvous.backends.election import ElectedBackend, found_by
from elastic_launch.rendezvous.backends.succession import REFUSED_FOR
from elastic_launch.rendezvous.record import ControlRecord, End, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.testing import FakeClock


class Cable(View):
    """A view that can be cut off."""

    cut = False

    def load(self, timeout: float) -> bytes | None:
        if self.cut:
            raise StoreError("cut off.")
        return super().load(timeout)


class Unanswered(View):
    """A view whose writes are carried out, but not answered."""

    answers = False

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        written = super().compare_and_set(expected, value, timeout)
        if not self.answers:
            raise StoreError("the write was not answered.")
        return written


def record_by(backend: ElectedBackend) -> ControlRecord:
    record = backend.find_leader(1.0).record
    assert record is not None
    return record


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


def test_the_others_continue_when_the_leader_is_gone(nodes: Nodes) -> None:
    nodes.start("a", "b", "c")
    nodes.together("a", "b", "c")
    first = nodes.leader()
    others = sorted({"a", "b", "c"} - {first})
    nodes.leave(first)
    nodes.together(*others)
    assert nodes.leader() in others
    assert nodes.record.term >= 2
    assert _elected(nodes)[-1].cause == f"leader {first} left", "it has said so"
    assert nodes.record.restarts == 0


def test_numbers_of_rounds_and_terms_only_rise_through_one_leader_after_the_other(nodes: Nodes) -> None:
    nodes.start("a", "b", "c", "d")
    nodes.together("a", "b", "c", "d")
    for _ in range(3):
        nodes.leave(nodes.leader())
        nodes.together(*nodes.nodes)
    nodes.until("four events", lambda: len(_formed(nodes)) >= 4)  # a leader tells its nodes first
    formed = _formed(nodes)
    assert formed == sorted(set(formed))
    assert len({number for _, number in formed}) == len(formed)
    assert len(formed) == 4


def _formed(nodes: Nodes) -> list[tuple[int, int]]:
    return [(event.term, event.round) for event in nodes.events.seen if isinstance(event, RoundFormed)]


def test_a_running_round_survives_a_new_leader_that_takes_over_from_a_live_one(nodes: Nodes) -> None:
    """As after a pause of the leader: it steps down, its links close, and all bring the new one their workers."""
    nodes.start("a", "b")
    nodes.together("a", "b")
    first, record = nodes.leader(), nodes.record
    _, outsider = backend_for("c", nodes.store, nodes.events, Limits(1, 4, 3))
    with contextlib.closing(outsider):
        outsider.open()
        outsider.unreachable(found_by(record), refused=False, silent_for=TIMING.dead_after)
        taken = record_by(outsider)
        assert (taken.leader.node_id, taken.term) == ("c", record.term + 1)
        leader_term = nodes.nodes[first].backend._leader_term
        assert leader_term is not None
        nodes.until("the old leader has stepped down", lambda: not leader_term.service.alive)
        nodes.until("both have come to the new one", lambda: sorted(_joined(nodes)) == ["a", "a", "b", "b"])
        time.sleep(2 * TIMING.dead_after)
        assert [len(nodes.nodes[name].rounds) for name in "ab"] == [1, 1]
        assert [nodes.nodes[name].evictions for name in "ab"] == [0, 0]
        assert nodes.record.round.number == 1


def test_a_leader_that_answers_no_more_is_succeeded_after_its_silence(nodes: Nodes) -> None:
    """It listens but does not answer, like a frozen process."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        nodes.start("b")
        nodes.together("b")
        record = nodes.record
        leader = replace(record.leader, node_id="a", incarnation="elsewhere", port=frozen.getsockname()[1])
        held = replace(record, term=record.term + 1, leader=leader).renewed()
        value = nodes.store.load(1)
        assert nodes.store.compare_and_set(value, held.encode(), 1)
        nodes.until("b leads again", lambda: _elected(nodes)[-1].term == held.term + 1)
        assert "could not be reached for" in _elected(nodes)[-1].cause


def test_a_node_that_comes_to_an_ended_run_ends_at_once(nodes: Nodes) -> None:
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
    config, _ = backend_for("b", nodes.store, nodes.events, Limits(1, 4, 3))
    with contextlib.closing(ElectedBackend(config, MonotonicClock(), nodes.events, lambda: cable)) as backend:
        backend.open()
        record = record_by(backend)
        backend.unreachable(found_by(record), refused=False, silent_for=TIMING.dead_after)
        cable.cut = True
        with pytest.raises(StoreError):
            backend.find_leader(1.0)
        cable.cut = False
        assert record_by(backend).leader.node_id == "a"
        backend.unreachable(found_by(record), refused=False)
        assert record_by(backend).leader.node_id == "b"


def test_a_write_of_the_term_without_an_answer_is_not_the_death_of_its_writer(nodes: Nodes) -> None:
    """Nodes that read the record name a leader that does not know it yet: it must keep listening until it does."""
    config, _ = backend_for("a", nodes.store, nodes.events, Limits(1, 4, 3))
    unanswered = Unanswered(nodes.store)
    backend = ElectedBackend(config, MonotonicClock(), nodes.events, lambda: unanswered)
    with contextlib.closing(backend):
        backend.open()
        with pytest.raises(StoreError):
            backend.find_leader(1.0)
        leader = nodes.record.leader
        socket.create_connection((leader.address, leader.port), timeout=1.0).close()
        unanswered.answers = True
        taken = record_by(backend)
        assert (taken.term, taken.leader) == (2, leader)


def _lone(nodes: Nodes, name: str, clock: FakeClock, **changes: Any) -> ElectedBackend:
    """A node's way to the leader, without its membership."""
    config = replace(backend_for(name, nodes.store, nodes.events, Limits(1, 4, 3))[0], **changes)
    return ElectedBackend(config, clock, nodes.events, lambda: View(nodes.store))


def _leave_record(nodes: Nodes, **changes: Any) -> ControlRecord:
    """A record as left by a node that no longer exists."""
    digest = backend_for("a", nodes.store, nodes.events, Limits(1, 4, 3))[0].digest()
    members = (Member("a", "a1", 1, "127.0.0.1", 9),)
    record = ControlRecord("none", digest, 3, Leader("a", "a1", "127.0.0.1", 9), Round(7, members), restarts=2)
    record = replace(record, **changes).renewed()
    assert nodes.store.compare_and_set(None, record.encode(), 1)
    return record


def test_a_leader_counts_as_gone_after_refusals_without_a_break(nodes: Nodes) -> None:
    clock, record = FakeClock(), _leave_record(nodes)
    with contextlib.closing(_lone(nodes, "b", clock)) as backend:
        backend.open()
        backend.unreachable(found_by(record), refused=False)
        clock.advance(0.8 * TIMING.dead_after)
        backend.unreachable(found_by(record), refused=True)
        assert record_by(backend).term == 3
        clock.advance(0.1)
        backend.unreachable(found_by(record), refused=False)  # not dead after all
        backend.unreachable(found_by(record), refused=True)
        assert record_by(backend).term == 3


@pytest.mark.parametrize("first", [True, False])
def test_answers_that_take_turns_do_not_put_a_succession_off(nodes: Nodes, first: bool) -> None:
    clock, record = FakeClock(), _leave_record(nodes)
    with contextlib.closing(_lone(nodes, "b", clock)) as backend:
        backend.open()
        refused = first
        while record_by(backend).term == 3:
            assert clock.now() <= TIMING.dead_after
            backend.unreachable(found_by(record), refused=refused)
            refused = not refused
            clock.advance(0.3)
        assert "could not be reached for" in _elected(nodes)[-1].cause


def test_a_leader_that_has_answered_is_not_doubted(nodes: Nodes) -> None:
    clock, record = FakeClock(), _leave_record(nodes)
    with contextlib.closing(_lone(nodes, "b", clock)) as backend:
        backend.open()
        backend.unreachable(found_by(record), refused=True)
        clock.advance(TIMING.dead_after)
        backend.reached(m.Pulse(3))
        assert record_by(backend).term == 3


def test_what_listens_in_the_place_of_a_dead_leader_and_hangs_up_does_not_stop_the_succession(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        _leave_record(nodes, leader=Leader("a", "a1", "127.0.0.1", other.getsockname()[1]))
        hanging_up = threading.Thread(target=_hang_up, args=(other,))
        hanging_up.start()
        try:
            nodes.start("b")
            nodes.together("b")
        finally:
            other.shutdown(socket.SHUT_RDWR)
            hanging_up.join()
    assert nodes.record.term == 4
    assert nodes.record.round.number == 8


def _hang_up(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def test_a_run_whose_nodes_all_died_is_taken_over(nodes: Nodes) -> None:
    _leave_record(nodes)
    nodes.start("b")
    nodes.together("b")
    record = nodes.record
    assert (record.term, record.round.number, record.restarts) == (4, 8, 2)


def test_a_node_with_other_arguments_and_limits_leads_on_by_those_of_the_run(nodes: Nodes) -> None:
    clock, record = FakeClock(), _leave_record(nodes, limits=Limits(1, 4, 3))
    other = Command(("train.py",), ("./train.py", "--node-rank", "1"))
    with contextlib.closing(_lone(nodes, "b", clock, limits=Limits(2, 5, 0), command=other)) as backend:
        backend.open()
        backend.unreachable(found_by(record), refused=True)
        clock.advance(REFUSED_FOR)
        taken = record_by(backend)
        assert (taken.leader.node_id, taken.term, taken.limits) == ("b", 4, Limits(1, 4, 3))
        assert nodes.record == taken


def test_a_node_that_came_with_another_script_does_not_lead(nodes: Nodes) -> None:
    clock, record = FakeClock(), _leave_record(nodes)
    other = Command(("other.py",), ("other.py",))
    with contextlib.closing(_lone(nodes, "b", clock, command=other, reuse=True)) as backend:
        backend.open()
        backend.unreachable(found_by(record), refused=True)
        clock.advance(REFUSED_FOR)
        with pytest.raises(
            RefusedError, match="has another script or --replica-size than the run began with"
        ) as caught:
            backend.find_leader(1.0)
    assert "etcdctl del /elastic-launch/runs/none/record" in caught.value.hint
    assert nodes.record == record


def test_an_ended_run_is_followed_by_a_new_one_only_on_request(nodes: Nodes) -> None:
    ended = _leave_record(nodes, end=End(0, "all workers finished"))
    with contextlib.closing(_lone(nodes, "b", FakeClock())) as backend:
        backend.open()
        with pytest.raises(RefusedError, match="had ended with 0 before this node came") as caught:
            backend.find_leader(1.0)
        assert "reuse=true" in caught.value.hint
    assert nodes.record == ended
    with contextlib.closing(_lone(nodes, "b", FakeClock(), reuse=True, limits=Limits(1, 9, 0))) as backend:
        backend.open()
        begun = record_by(backend)
        assert (begun.term, begun.first_term, begun.leader.node_id) == (4, 4, "b")
        assert (begun.round, begun.restarts, begun.end) == (Round(7), 0, None)
        assert begun.run


def test_a_record_that_is_led_is_not_replaced(nodes: Nodes) -> None:
    record = _leave_record(nodes)
    with contextlib.closing(_lone(nodes, "b", FakeClock(), reuse=True)) as backend:
        backend.open()
        assert record_by(backend) == record
        assert nodes.record == record


def test_of_several_nodes_that_use_an_id_again_one_begins_the_run(nodes: Nodes) -> None:
    ended = _leave_record(nodes, end=End(91, "all 3 restarts spent"))
    nodes.start("b", "c", "d", reuse=True)
    nodes.together("b", "c", "d")
    assert [event.term for event in _elected(nodes)] == [4]
    assert nodes.record.round.number == ended.round.number + 1


def test_a_link_that_waited_for_an_earlier_term_is_closed_unanswered(nodes: Nodes) -> None:
    """A leader keeps its listening socket between its terms."""
    _leave_record(nodes)
    nodes.start("b")
    nodes.together("b")
    config, record = nodes.nodes["b"].config, nodes.record
    waited = m.NodeHello(
        m.PROTOCOL_VERSION,
        record.run_id,
        config.digest(),
        " ".join(config.command.display),
        str(config.limits),
        *("a", "a1", 1, "127.0.0.1", 9),
        term=record.term - 1,
    )
    with socket.create_connection((record.leader.address, record.leader.port), timeout=10) as link:
        link.sendall(m.pack(waited))
        assert link.makefile("rb").read() == b""
    assert _joined(nodes) == ["b"]


def test_a_node_left_over_from_the_ended_run_is_refused(nodes: Nodes) -> None:
    _leave_record(nodes, end=End(0, "all workers finished"))
    nodes.start("b", reuse=True)
    nodes.together("b")
    config = nodes.nodes["b"].config
    command, limits = " ".join(config.command.display), str(config.limits)
    left_over = m.NodeHello(
        m.PROTOCOL_VERSION, "none", config.digest(), command, limits, "a", "a1", 1, "127.0.0.1", 9, seen_term=3
    )
    with socket.create_connection((nodes.record.leader.address, nodes.record.leader.port), timeout=10) as link:
        link.sendall(m.pack(left_over))
        answer = m.unpack(link.makefile("rb").readline())
    assert isinstance(answer, m.Refused)
    assert "earlier run 'none'" in answer.reason
