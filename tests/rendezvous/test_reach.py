"""A node that joins a running round takes part once it can connect to where the round's workers meet."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from leader_run import Run, running

from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import JoinBlocked
from elastic_launch.rendezvous.node import reach
from elastic_launch.rendezvous.node.machine import NodeMachine
from elastic_launch.rendezvous.node.reach import ReachTest
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.wire import messages as m


def reached(run: Run, node: str, error: str = "") -> None:
    run.report(node, m.Reached(run.number, error))


def waits(nodes: str = "2:3", **hello: int) -> Run:
    """A run of a and b, for which c waits."""
    run = running(nodes, "ab", resize_delay=1.0)
    for node in "ab":
        run.report(node, m.NodeReady(run.number))
    run.reaches = False
    run.hello("c", **hello)
    return run


def drains(run: Run) -> bool:
    return bool(run.orders("a", m.DrainRound))


def test_a_node_that_joins_connects_before_the_round_is_resized_for_it() -> None:
    run = waits()
    first = run.record.round.members[0]
    assert run.orders("c", m.Reach) == [m.Reach(run.record.term, 1, first.address, first.store_port)]
    assert run.orders("a", m.Reach) == [], "members have connected"
    run.advance(5.0)
    assert not drains(run)
    reached(run, "c")
    run.advance(5.0)
    assert drains(run)
    assert run.told(JoinBlocked) == []


def test_one_that_cannot_connect_is_named_and_takes_part_when_it_can() -> None:
    run = waits()
    reached(run, "c", "timed out")
    (event,) = run.told(JoinBlocked)
    assert (event.node, event.member, event.address, event.port) == ("c", run.members[0], "host-a", 7000)
    assert run.orders("c", m.UserMessage)[-1].text == sentence(event)
    run.advance(60.0)
    assert not drains(run)
    reached(run, "c")
    run.advance(5.0)
    assert drains(run)


def test_a_round_without_it_is_formed_if_there_are_enough_others_and_it_tries_again() -> None:
    run = waits("1:3")
    reached(run, "c", "timed out")
    run.fail("b")
    run.stop("a", "b")
    assert sorted(run.members) == ["a", "b"]
    assert [order.round for order in run.orders("c", m.Reach)] == [1, 2]
    run.report("c", m.Reached(1, ""))
    run.advance(5.0)
    assert not drains(run), "that was about the last round"
    reached(run, "c")
    for node in "ab":
        run.report(node, m.NodeReady(run.number))
    run.advance(5.0)
    assert drains(run)


def test_a_round_that_lacks_nodes_is_formed_with_it() -> None:
    run = waits("2:3")
    reached(run, "c", "timed out")
    run.close("b")
    run.stop("a")
    assert sorted(run.members) == ["a", "c"]
    run.hello("d")
    assert [order.round for order in run.orders("d", m.Reach)] == [2]


def test_a_round_that_lacked_nodes_is_formed_without_it_when_there_are_enough_others() -> None:
    run = waits("2:3")
    reached(run, "c", "timed out")
    run.close("b")
    run.stop("a")
    assert sorted(run.members) == ["a", "c"]
    run.reaches = True
    run.hello("b", incarnation="b2")
    run.advance(5.0)
    run.stop("a", "c")
    assert sorted(run.members) == ["a", "b"]
    assert run.orders("c", m.Reach)[-1].round == run.number


def test_one_that_trains_with_the_others_has_connected() -> None:
    run = waits("2:3")
    reached(run, "c", "timed out")
    run.close("b")
    run.stop("a")
    run.join("a", "c")
    for node in "ac":
        run.report(node, m.NodeReady(run.number))
    run.fail("a")
    run.stop("a", "c")
    assert sorted(run.members) == ["a", "c"]
    assert len(run.orders("c", m.Reach)) == 1


def test_a_round_that_breaks_before_the_answer_is_followed_by_one_without_the_node() -> None:
    run = waits("1:3")
    run.fail("b")
    run.stop("a", "b")
    assert sorted(run.members) == ["a", "b"]
    assert len(run.orders("c", m.Reach)) == 2


def test_another_leader_learns_from_the_node_that_it_cannot_connect() -> None:
    run = waits("1:3")
    run.fail("b")
    run.hello("d", apart=True)
    run.stop("a", "b")
    assert sorted(run.members) == ["a", "b"]
    assert run.orders("d", m.Reach) == [m.Reach(run.record.term, 2, run.record.round.members[0].address, 7000)]


def test_a_round_that_ends_closes_its_store_which_blocks_no_node() -> None:
    run = waits("1:3")
    run.fail("b")
    reached(run, "c", "Connection refused")
    assert run.told(JoinBlocked) == []
    run.stop("a", "b")
    reached(run, "c")
    for node in "ab":
        run.report(node, m.NodeReady(run.number))
    run.advance(5.0)
    assert drains(run)


def test_what_a_node_cannot_do_is_part_of_its_next_hello() -> None:
    side = NodeMachine()
    side.begin(m.NodeHello(1, "run", "digest", "train.py", "", "c", "c1", 1, "host-c", 7000))
    side.say(m.Reached(1, "timed out"), 1.0)
    assert side.hello.apart
    side.say(m.Reached(1, ""), 2.0)
    assert not side.hello.apart


def test_a_node_that_comes_before_the_first_round_has_nothing_to_connect_to() -> None:
    run = Run("2:3")
    run.hello("a", "b")
    assert run.orders("a", m.Reach) == run.orders("b", m.Reach) == []


def test_of_a_member_of_the_first_round_it_is_only_said() -> None:
    run = running("1:2", "ab")
    reached(run, "b", "timed out")
    (event,) = run.told(JoinBlocked)
    assert (event.node, event.member, event.address, event.port) == ("b", "a", "host-a", 7000)
    run.fail("b", rank=1)
    run.stop("a", "b")
    assert sorted(run.members) == ["a", "b"], "perhaps it is node a that is behind a firewall"
    for node in "ab":
        run.report(node, m.NodeReady(run.number))
    reached(run, "b", "timed out")
    assert len(run.told(JoinBlocked)) == 1, "it trains with the others, so it has connected"


def test_a_member_that_could_not_connect_does_not_say_so_in_its_next_hello() -> None:
    side = NodeMachine()
    side.begin(m.NodeHello(1, "run", "digest", "train.py", "", "c", "c1", 1, "host-c", 7000))
    side.obey(m.Form(1, Round(1), 0, "first"), 1.0)
    side.say(m.Reached(1, "timed out"), 2.0)
    assert not side.hello.apart


def test_a_node_that_returns_on_another_link_is_asked_again() -> None:
    run = waits()
    run.hello("c")
    assert len(run.orders("c", m.Reach)) == 2


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_it_is_reported_that_a_node_connects_or_why_not(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "AGAIN", 0.05)
    reports: queue.Queue[m.Reached] = queue.Queue()
    address, port = listener.getsockname()
    with closing(ReachTest(reports.put)) as test:
        test.begin(m.Reach(1, 4, address, port))
        assert reports.get(timeout=20) == m.Reached(4, "")
        with socket.socket() as bound:
            bound.bind((address, 0))
            test.begin(m.Reach(1, 5, address, bound.getsockname()[1]))
            assert reports.get(timeout=20) == m.Reached(5, "Connection refused")
            bound.listen()
            assert reports.get(timeout=20) == m.Reached(5, ""), "each change is reported, not each attempt"
    assert reports.empty()


def test_what_the_leader_does_not_await_is_reported_only_if_it_fails(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "AGAIN", 0.05)
    reports: queue.Queue[m.Reached] = queue.Queue()
    address, port = listener.getsockname()
    with closing(ReachTest(reports.put)) as test:
        test.begin(m.Reach(1, 4, address, port), asked=False)
        assert test._thread is not None
        test._thread.join(20)
        assert reports.empty()
        with socket.socket() as bound:
            bound.bind((address, 0))
            test.begin(m.Reach(1, 5, address, bound.getsockname()[1]), asked=False)
            assert reports.get(timeout=20) == m.Reached(5, "Connection refused")
            bound.listen()
            assert reports.get(timeout=20) == m.Reached(5, "")


def test_a_name_that_does_not_resolve_is_said_so() -> None:
    reports: queue.Queue[m.Reached] = queue.Queue()
    with closing(ReachTest(reports.put)) as test:
        test.begin(m.Reach(1, 1, "no-such-host.invalid", 1))
        assert reports.get(timeout=60).error


def test_without_a_thread_to_spare_the_node_counts_as_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(reach.VitalThread, "start", none)
    reports: list[m.Reached] = []
    with closing(ReachTest(reports.append)) as test:
        test.begin(m.Reach(1, 3, "127.0.0.1", 1))
    assert reports == [m.Reached(3, "")]
