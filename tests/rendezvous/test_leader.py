"""The leader's decisions, scenario by scenario, on a clock that the tests move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from elastic_launch.config import Limits, Timing
from elastic_launch.events import (
    Event,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    Parked,
    RestartCharged,
    RoundBroken,
    RoundFormed,
    RunEnded,
)
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.instructions import Close, Commit, Emit, Instruction, Send
from elastic_launch.rendezvous.leader import COLLECT, TURN_CAP, LeaderMachine
from elastic_launch.rendezvous.record import ControlRecord, Leader, Member, Round
from elastic_launch.testing import FakeClock

T = TypeVar("T")

COMMAND = "train.py --lr 1"


class Run:
    """A leader and the nodes' ends of its links.

    Args:
        nodes: as in ``--nnodes``.
        timing: fields of Timing.
    """

    def __init__(
        self,
        nodes: str = "1:2",
        *,
        max_restarts: int = 3,
        record: ControlRecord | None = None,
        **timing: float,
    ) -> None:
        low, _, high = nodes.partition(":")
        self.limits = Limits(int(low), int(high or low), max_restarts)
        self.clock = FakeClock(1000.0)
        self.record = record or ControlRecord("run", "digest", 1, Leader("a", "a1", "10.0.0.1", 1)).renewed()
        self.machine = LeaderMachine(self.record, self.limits, Timing(**timing), COMMAND, self.clock.now())
        self.links: dict[str, int] = {}
        self.silent: set[str] = set()
        self.commits: list[ControlRecord] = []
        self.events: list[Event] = []
        self._owners: dict[int, str] = {}
        self._orders: list[tuple[str, m.Order]] = []

    # What comes in.

    def hello(self, *node_ids: str, **fields: Any) -> None:
        """Each node opens a link and says hello; its incarnation is its id with a 1 unless given."""
        for node_id in node_ids:
            link = len(self._owners) + 1
            self.links[node_id], self._owners[link] = link, node_id
            hello = m.Hello(
                version=m.PROTOCOL_VERSION,
                run_id="run",
                digest="digest",
                command=COMMAND,
                limits=str(self.limits),
                node_id=node_id,
                incarnation=f"{node_id}1",
                workers=1,
                address=f"host-{node_id}",
                store_port=7000,
            )
            self._do(self.machine.hello(link, replace(hello, **fields), self.clock.now()))

    def report(self, node_id: str, report: m.Report) -> None:
        self._do(self.machine.report(self.links[node_id], report, self.clock.now()))

    def join(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.report(node_id, m.Joined(self.number))

    def done(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.report(node_id, m.Done(self.number))

    def stop(self, *node_ids: str, number: int | None = None, store_port: int = 7000) -> None:
        """Nodes report the workers of the present round as reaped."""
        number = self.number if number is None else number
        for node_id in node_ids:
            self.report(node_id, m.Stopped(number, store_port))

    def fail(self, node_id: str, **fields: Any) -> None:
        """A worker of the node fails: a crash after a minute, unless told otherwise."""
        self.report(node_id, m.Failed(self.number, failure(node_id, **fields)))

    def leave(self, node_id: str) -> None:
        self.report(node_id, m.Leaving("SIGTERM"))

    def close(self, *node_ids: str) -> None:
        """The nodes' processes end."""
        for node_id in node_ids:
            self._do(self.machine.closed(self.links.pop(node_id), self.clock.now()))

    def advance(self, seconds: float) -> None:
        """Let time pass: the leader turns when it is due, nodes beat unless silent."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(self.machine.wait(self.clock.now()), end - self.clock.now()))
            self.beat_and_turn()

    def sleep(self, seconds: float) -> None:
        """The leader's process is stopped for so long; the nodes' beats wait for it."""
        self.clock.advance(seconds)
        self.beat_and_turn()

    def beat_and_turn(self) -> None:
        for node_id in list(self.links):
            if node_id not in self.silent and node_id in self.links:
                self.report(node_id, m.Beat())
        self._do(self.machine.turn(self.clock.now()))

    # What comes out.

    def _do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Commit(record=record):
                    assert record.nonce not in {self.record.nonce, *(commit.nonce for commit in self.commits)}
                    self.record = record
                    self.commits.append(record)
                case Send(link=link, order=order):
                    assert order.term == self.record.term, "an order of another term than the record's"
                    if isinstance(order, m.Form):
                        assert order.round == self.record.round, "a round is ordered that the record does not hold"
                    if isinstance(order, m.RunEnd):
                        assert self.record.end is not None, "an end is ordered that the record does not hold"
                    self._orders.append((self._owners[link], order))
                case Close(link=link):
                    self.links = {node_id: other for node_id, other in self.links.items() if other != link}
                case Emit(event=event):
                    event.line()
                    self.events.append(event)

    def orders(self, node_id: str, kind: type[T]) -> list[T]:
        return [order for owner, order in self._orders if owner == node_id and isinstance(order, kind)]

    def told(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def number(self) -> int:
        return self.record.round.number

    @property
    def members(self) -> str:
        """The ids of the present round's members in rank order, as one word."""
        return "".join(member.node_id for member in self.record.round.members)

    @property
    def forming(self) -> bool:
        """Whether the present round is broken, or there was none yet."""
        broken = [event.round for event in self.told(RoundBroken)]
        return self.number == 0 or self.number in broken

    @property
    def end(self) -> tuple[int, str] | None:
        return (self.record.end.code, self.record.end.cause) if self.record.end else None

    @property
    def code(self) -> int | None:
        return self.record.end.code if self.record.end else None


def failure(node_id: str, **fields: Any) -> m.Failure:
    values: dict[str, Any] = {
        "kind": "crash",
        "rank": 0,
        "local_rank": 0,
        "pid": 42,
        "exit_code": 1,
        "message": "exit code 1: ValueError: boom",
        "ran": 60.0,
        "signature": "s",
    }
    return m.Failure(node_id=node_id, **{**values, **fields})


def running(nodes: str, node_ids: str, **arguments: Any) -> Run:
    """A run whose first round has formed of the given nodes, all of which have started their workers."""
    run = Run(nodes, **arguments)
    run.hello(*node_ids)
    run.advance(2.1)
    assert run.members == node_ids
    assert run.number == 1
    run.join(*node_ids)
    return run


# The first round.


def test_one_of_one_forms_at_once() -> None:
    run = Run("1:1")
    run.hello("a", workers=8, store_port=7123)
    (form,) = run.orders("a", m.Form)
    assert form == m.Form(1, Round(1, (Member("a", "a1", 8, "host-a", 7123),)), restarts=0, cause="first")
    assert form.round.world_size == 8


def test_first_round_forms_at_once_when_all_possible_nodes_are_there() -> None:
    run = Run("1:3")
    run.hello("a", "b")
    assert run.number == 0
    run.hello("c")
    assert run.members == "abc"
    for node_id in "abc":
        assert [order.round.number for order in run.orders(node_id, m.Form)] == [1]
        assert run.orders(node_id, m.Welcome) == [m.Welcome(1, node_id, 1.0, 5.0)]


def test_first_round_at_min_waits_join_settle_for_a_further_arrival() -> None:
    run = Run("1:4")
    run.hello("a")
    run.advance(1.9)
    run.hello("b")
    run.advance(1.9)
    assert run.number == 0
    run.advance(0.2)
    assert run.members == "ab"
    (formed,) = run.told(RoundFormed)
    assert formed.form_s == pytest.approx(3.9, abs=0.1)


def test_a_turn_is_due_when_join_settle_is_over() -> None:
    run = Run("1:2")
    run.hello("a")
    run.advance(1.5)
    assert run.machine.wait(run.clock.now()) == pytest.approx(0.5)


def test_first_round_waits_below_min() -> None:
    run = Run("2:4")
    run.hello("a")
    assert [event.line().partition(";")[0] for event in run.told(Parked)] == ["parked with 1 node, 2 needed"]
    run.advance(100)
    assert run.number == 0
    run.hello("b")
    run.advance(2.1)
    assert run.members == "ab"


def test_nobody_at_all_is_no_park() -> None:
    run = Run("1:2", min_wait=5)
    run.advance(100)
    assert run.events == []


def test_a_node_that_waits_is_told_for_what() -> None:
    run = Run("2:4")
    run.hello("a")
    run.advance(0.1)
    run.hello("b")
    (notice,) = run.orders("a", m.Notice)
    assert "parked with 1 node, 2 needed" in notice.text
    (notice,) = run.orders("b", m.Notice)
    assert notice.text == "the first round forms at 4 nodes or 2 s without an arrival"


def test_a_node_that_leaves_before_the_first_round_is_not_in_it() -> None:
    run = Run("1:3")
    run.hello("a", "b")
    run.leave("b")
    run.advance(2.1)
    assert run.members == "a"


def test_a_node_that_dies_before_the_first_round_is_not_in_it() -> None:
    run = Run("1:3")
    run.hello("a", "b")
    run.close("b")
    run.advance(2.1)
    assert run.members == "a"
    assert run.told(NodeLost)[0].cause == "its connection closed"


# Faults of workers.


def test_crash_breaks_the_round_on_all_members_at_once() -> None:
    run = running("1:3", "abc")
    run.fail("b", rank=1)
    for node_id in "abc":
        (order,) = run.orders(node_id, m.Break)
        assert (order.round, order.kind) == (1, "crash")
        assert order.cause == "rank 1 on node b: exit code 1: ValueError: boom"


def test_next_round_forms_when_all_have_stopped_before_collect_is_over() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    assert run.number == 1
    run.stop("b")
    assert run.number == 2
    assert run.orders("b", m.Form)[-1].restarts == 1
    assert run.orders("b", m.Form)[-1].cause == "rank 0 on node a: exit code 1: ValueError: boom"


def test_a_slow_member_is_waited_for_after_the_judgement() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    run.advance(COLLECT + 0.01)
    assert len(run.told(RestartCharged)) == 1
    run.advance(10)
    assert run.number == 1
    run.stop("b")
    assert (run.number, run.members) == (2, "ab")


def test_a_crash_with_its_collateral_crashes_is_charged_once() -> None:
    run = running("1:3", "abc")
    run.fail("a")
    run.fail("b")
    run.fail("b", local_rank=1)
    run.stop("a", "b")
    run.fail("c")
    run.stop("c")
    assert [event.restarts for event in run.told(RestartCharged)] == [1]
    assert len(run.told(RoundBroken)) == 1
    assert run.record.restarts == 1


def test_a_report_that_comes_after_the_judgement_costs_nothing_more() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    run.advance(COLLECT + 0.01)
    run.fail("b")
    run.stop("b")
    assert run.record.restarts == 1
    assert run.number == 2


def test_failures_of_an_older_round_are_ignored() -> None:
    run = running("1:1", "a")
    run.fail("a")
    run.stop("a")
    run.join("a")
    run.report("a", m.Failed(1, failure("a")))
    run.report("a", m.Done(1))
    run.report("a", m.Stopped(1, 7000))
    assert run.number == 2
    assert not run.forming
    assert run.end is None


def test_a_judgement_is_due_after_collect() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    assert run.machine.wait(run.clock.now()) == pytest.approx(COLLECT)


@pytest.mark.parametrize("kind", ["crash", "out of memory", "hang"])
def test_kinds_that_cost(kind: str) -> None:
    run = running("1:1", "a")
    run.fail("a", kind=kind)
    run.stop("a")
    assert run.record.restarts == 1
    assert run.told(RestartCharged)[0].kind == kind


def test_preempted_workers_cost_nothing() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", kind="preemption", exit_code=-15)
    run.fail("b")
    run.stop("a", "b")
    assert (run.number, run.record.restarts) == (2, 0)


def test_a_node_that_stops_its_workers_unasked_costs_nothing() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.stop("b")
    assert run.told(RoundBroken)[0].kind == "node loss"
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "ab", 0)


def test_the_store_port_of_a_round_is_the_one_that_the_node_reserved_last() -> None:
    run = running("1:1", "a")
    run.fail("a")
    run.stop("a", store_port=7001)
    assert run.record.round.members[0].store_port == 7001


def test_restarts_and_budget_are_announced() -> None:
    run = running("1:1", "a", max_restarts=2)
    run.fail("a")
    run.stop("a")
    assert run.told(RestartCharged)[0].line() == "restart 1 of 2 (--max-restarts 2), charged for a crash"


# The budget and the end by faults.


def test_a_spent_budget_ends_the_run_with_91() -> None:
    run = running("1:2", "ab", max_restarts=1)
    run.fail("a", signature="one")
    run.stop("a", "b")
    run.join("a", "b")
    run.fail("b", signature="two", message="exit code 1: KeyError: 'x'")
    run.stop("a", "b")
    assert run.code == 91
    assert run.number == 2
    assert run.record.restarts == 1
    for node_id in "ab":
        (order,) = run.orders(node_id, m.RunEnd)
        assert order.code == 91
        assert order.cause == "all 1 restarts spent: rank 0 on node b: exit code 1: KeyError: 'x'"
        assert order.failure == failure("b", signature="two", message="exit code 1: KeyError: 'x'")
        assert order.restarts == 1
    assert run.told(RunEnded)[0].rounds == 2


def test_without_budget_the_end_comes_after_collect_even_if_workers_still_stop() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", exit_code=3)
    run.advance(COLLECT + 0.01)
    assert run.end == (3, "no restart allowed (--max-restarts 0): rank 0 on node a: exit code 1: ValueError: boom")


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [(1, 1), (3, 3), (89, 89), (100, 100), (255, 255), (-9, 137), (-11, 139), (2, 1), (90, 1), (95, 1), (99, 1)],
)
def test_without_budget_the_code_is_the_workers_own_unless_it_is_ours(exit_code: int, expected: int) -> None:
    run = running("1:1", "a", max_restarts=0)
    run.fail("a", exit_code=exit_code)
    run.stop("a")
    assert run.code == expected
    assert run.orders("a", m.RunEnd)[0].failure == failure("a", exit_code=exit_code)


def test_the_root_cause_is_the_first_failure_of_all_nodes() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a", exit_code=3, ago=0.01)
    run.advance(0.1)
    run.fail("b", exit_code=4, ago=0.15)
    run.stop("a", "b")
    assert run.code == 4


def test_a_failure_declared_fatal_ends_the_run_with_93() -> None:
    run = running("1:1", "a")
    run.fail("a", kind="fatal")
    run.stop("a")
    assert run.code == 93
    assert run.record.restarts == 0


def test_twice_the_same_failure_at_the_start_ends_the_run_with_90() -> None:
    run = running("1:1", "a")
    run.fail("a", ran=1.0, signature="same")
    run.stop("a")
    assert run.number == 2
    run.join("a")
    run.fail("a", ran=2.0, signature="same")
    run.stop("a")
    assert run.code == 90
    assert run.record.end is not None
    assert run.record.end.cause.startswith("the script fails at its start, twice the same way: rank 0 on node a")
    assert run.orders("a", m.RunEnd)[0].failure == failure("a", ran=2.0, signature="same")


@pytest.mark.parametrize(
    "second",
    [
        {"ran": 2.0, "signature": "other"},
        {"ran": 11.0, "signature": "same"},
        {"ran": 2.0, "signature": "", "exit_code": -9},
    ],
    ids=["looks different", "ran longer", "was killed"],
)
def test_other_failures_at_the_start_are_only_charged(second: dict[str, Any]) -> None:
    run = running("1:1", "a")
    run.fail("a", ran=1.0, signature="same")
    run.stop("a")
    run.fail("a", **second)
    run.stop("a")
    assert run.end is None
    assert (run.number, run.record.restarts) == (3, 2)


def test_failures_at_the_start_count_only_in_a_row() -> None:
    run = running("1:1", "a", max_restarts=5)
    for ran in (1.0, 60.0, 1.0):
        run.fail("a", ran=ran, signature="same")
        run.stop("a")
    assert run.end is None


def test_the_failure_of_an_earlier_round_is_no_root_cause_of_another_end() -> None:
    run = running("2:2", "ab", min_wait=10)
    run.fail("a")
    run.stop("a", "b")
    assert run.number == 2
    run.close("b")
    run.stop("a")
    run.advance(11)
    assert run.code == 94
    assert run.orders("a", m.RunEnd)[0].failure is None


# Loss of nodes.


def test_a_closed_connection_breaks_the_round_at_once() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.close("b")
    (order,) = run.orders("a", m.Break)
    assert (order.kind, order.cause) == ("node loss", "node b lost: its connection closed")
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)
    assert run.told(NodeLost)[0].detect_s == 0


def test_a_silent_node_is_dead_after_dead_after() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.silent.add("b")
    run.advance(4.5)
    assert not run.forming
    run.advance(1.5)
    (lost,) = run.told(NodeLost)
    assert (lost.node, lost.detect_s) == ("b", pytest.approx(5.0, abs=1.0))
    assert run.orders("a", m.Break)[0].kind == "node loss"
    assert "b" not in run.links, "its link is to be closed"
    run.stop("a")
    assert (run.members, run.record.restarts) == ("a", 0)


def test_any_report_is_a_sign_of_life() -> None:
    run = running("1:2", "ab")
    run.silent.add("b")
    for _ in range(10):
        run.advance(3)
        run.join("b")
    assert not run.forming


def test_nobody_is_lost_before_it_was_silent_for_dead_after() -> None:
    """Whenever the leader's turns come: what passed before a report is no silence after it."""
    run = running("1:2", "ab", dead_after=2.0)
    run.silent.add("b")
    run.sleep(1.0)
    run.clock.advance(0.9)
    run.report("b", m.Beat())
    run.clock.advance(0.1)
    run.beat_and_turn()
    run.sleep(1.0)
    assert run.told(NodeLost) == [], "1.1 s of silence"
    run.sleep(1.1)
    assert len(run.told(NodeLost)) == 1, "2.2 s of silence"


@pytest.mark.parametrize("dead_after", [5.0, 2.0])
def test_a_leader_that_slept_evicts_nobody(dead_after: float) -> None:
    run = running("1:2", "ab", dead_after=dead_after)
    run.sleep(3600)
    assert run.told(NodeLost) == []
    assert not run.forming


def test_a_gap_counts_as_little_silence_of_a_node_that_says_nothing() -> None:
    run = running("1:2", "ab")
    run.silent.add("b")
    for _ in range(2):
        run.sleep(3600)
    assert run.told(NodeLost) == []
    for _ in range(2):
        run.sleep(3600)
    assert run.told(NodeLost)[0].node == "b"
    assert run.told(NodeLost)[0].detect_s <= 4 * TURN_CAP


def test_collateral_crashes_of_a_lost_node_are_free() -> None:
    run = running("1:3", "abc", max_restarts=0)
    run.fail("a")
    run.fail("b")
    run.stop("a", "b")
    run.close("c")
    assert run.end is None
    assert (run.number, run.members, run.record.restarts) == (2, "ab", 0)


def test_a_crash_after_the_loss_of_a_node_is_free() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.close("b")
    run.fail("a")
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_the_loss_of_a_node_that_had_stopped_already_does_not_excuse_the_crash() -> None:
    run = running("1:2", "ab")
    run.fail("b")
    run.stop("b")
    run.close("b")
    run.stop("a")
    assert (run.members, run.record.restarts) == ("a", 1)


def test_a_lost_spare_breaks_nothing() -> None:
    run = running("1:1", "a")
    run.hello("b")
    run.close("b")
    assert not run.forming
    assert run.told(NodeLost)[0].next == "training goes on"


def test_a_live_member_that_does_not_stop_is_left_out_after_return_after() -> None:
    run = running("1:2", "ab", return_after=10)
    run.fail("a")
    run.stop("a")
    run.advance(9.5)
    assert run.number == 1
    run.advance(1)
    assert (run.number, run.members) == (2, "a")
    (order,) = run.orders("b", m.Evicted)
    assert not order.final
    assert "return_after (10 s)" in order.reason
    assert "b" not in run.links


def test_who_was_left_out_comes_back_by_a_resize() -> None:
    run = running("1:2", "ab", return_after=10)
    run.fail("a")
    run.stop("a")
    run.advance(11)
    run.join("a")
    run.hello("b", seen_term=1, seen_round=1)
    run.advance(1.1)
    assert run.orders("a", m.Break)[-1].kind == "membership"
    run.stop("a")
    assert run.members == "ab"


def test_members_that_do_not_start_their_workers_break_the_round() -> None:
    run = Run("1:2", join_timeout=20)
    run.hello("a", "b")
    run.join("a")
    run.advance(21)
    assert run.told(RoundBroken)[0].cause == "node b did not start its workers within join_timeout"
    assert run.told(RoundBroken)[0].kind == "node loss"
    run.stop("a")
    if "b" in run.links:
        run.stop("b")
    assert (run.number, run.record.restarts) == (2, 0)
    assert run.members == "ab", "it has stopped, so it can take part again"


def test_a_member_that_was_late_takes_part_again_once_it_is_ready() -> None:
    run = Run("2:2", join_timeout=20)
    run.hello("a", "b")
    run.join("a")
    run.advance(21)
    run.stop("a")
    if "b" in run.links:
        run.stop("b")
    else:
        run.hello("b", seen_term=1, seen_round=1)
    assert (run.number, run.members) == (2, "ab")


# Nodes that leave.


def test_leaving_is_free_and_the_others_go_on_as_soon_as_the_leaver_is_gone() -> None:
    run = running("1:3", "abc", max_restarts=0)
    run.leave("b")
    for node_id in "abc":
        assert [order.kind for order in run.orders(node_id, m.Break)] == ["preemption"]
    run.stop("a", "c")
    assert run.number == 1, "the leaver's workers may still run"
    run.close("b")
    assert (run.number, run.members, run.record.restarts) == (2, "ac", 0)
    assert [event.cause for event in run.told(NodeLeft)] == ["SIGTERM"]
    assert run.told(NodeLost) == [], "it has said so"


def test_a_leaver_that_stopped_but_stays_connected_is_not_waited_for() -> None:
    run = running("1:2", "ab")
    run.leave("b")
    run.stop("a", "b")
    assert (run.number, run.members) == (2, "a")
    run.leave("b")
    assert len(run.told(NodeLeft)) == 1


def test_collateral_crashes_of_a_leaver_are_free() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.fail("a")
    run.stop("a")
    run.leave("b")
    run.close("b")
    assert run.end is None
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_a_crash_after_leaving_was_announced_is_free() -> None:
    run = running("1:2", "ab", max_restarts=0)
    run.leave("b")
    run.fail("a")
    run.stop("a", "b")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_a_spare_that_leaves_breaks_nothing() -> None:
    run = running("1:1", "a")
    run.hello("b")
    run.leave("b")
    run.close("b")
    assert not run.forming
    assert run.told(NodeLost) == []


# Too few nodes.


def test_below_min_the_run_parks_and_goes_on_when_a_node_arrives() -> None:
    run = running("2:2", "ab")
    run.close("b")
    run.stop("a")
    parked = run.told(Parked)[-1]
    assert (parked.nodes, parked.min_nodes, parked.min_wait_s) == (1, 2, 600.0)
    assert "parked with 1 node" in run.orders("a", m.Notice)[-1].text
    run.advance(500)
    run.hello("c")
    assert (run.number, run.members) == (2, "ac")


def test_below_min_for_min_wait_ends_the_run_with_94() -> None:
    run = running("2:2", "ab", min_wait=60)
    run.close("b")
    run.stop("a")
    run.advance(59)
    assert run.end is None
    run.advance(2)
    assert run.end == (94, "1 of at least 2 nodes after min_wait (60 s)")
    assert [order.code for order in run.orders("a", m.RunEnd)] == [94]


def test_each_park_has_its_own_min_wait() -> None:
    run = running("2:2", "ab", min_wait=60)
    run.close("b")
    run.stop("a")
    run.advance(50)
    run.hello("c")
    run.join("a", "c")
    run.close("c")
    run.stop("a")
    run.advance(50)
    assert run.end is None
    run.advance(11)
    assert run.code == 94


def test_a_run_without_any_node_left_ends_after_min_wait() -> None:
    run = running("1:2", "a", min_wait=60)
    run.close("a")
    run.advance(61)
    assert run.code == 94


# Growing.


def test_several_arrivals_make_one_resize_after_resize_delay() -> None:
    run = running("1:3", "a", resize_delay=3)
    run.hello("b")
    assert run.told(NodeJoined)[-1].next == "training is resized"
    run.advance(2.5)
    run.hello("c")
    run.advance(2.5)
    assert not run.forming
    run.advance(1)
    (broken,) = run.told(RoundBroken)
    assert (broken.kind, broken.cause) == ("membership", "resize: node b, c waits to join")
    assert run.orders("b", m.Break) == []
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (2, "abc", 0)


def test_a_resize_waits_until_the_round_has_started() -> None:
    run = Run("1:3")
    run.hello("a")
    run.advance(2.1)
    run.hello("b")
    run.advance(10)
    assert not run.forming
    run.join("a")
    assert run.forming


def test_crashes_in_the_wake_of_a_resize_are_free() -> None:
    run = running("1:3", "ab", max_restarts=0)
    run.hello("c")
    run.advance(1.1)
    assert run.forming
    run.stop("a")
    run.fail("b", message="exit code 1: RuntimeError: Connection reset by peer")
    run.stop("b")
    assert run.end is None
    assert (run.number, run.members, run.record.restarts) == (2, "abc", 0)


def test_a_full_round_is_not_resized_and_its_spare_ends_with_0() -> None:
    run = running("1:2", "ab")
    run.hello("c")
    assert run.told(NodeJoined)[-1].next == "round is full, 1 spare"
    run.advance(60)
    assert not run.forming
    run.done("a", "b")
    assert [order.code for order in run.orders("c", m.RunEnd)] == [0]
    assert run.orders("c", m.Form) == []


def test_a_spare_takes_the_place_of_a_lost_member_at_once() -> None:
    run = running("1:2", "ab")
    run.hello("c")
    run.close("a")
    run.stop("b")
    assert (run.number, run.members) == (2, "bc")


def test_no_resize_once_a_member_is_done() -> None:
    run = running("1:3", "ab")
    run.done("a")
    run.hello("c")
    run.advance(60)
    assert not run.forming
    run.done("b")
    assert run.code == 0
    assert [order.code for order in run.orders("c", m.RunEnd)] == [0]


def test_an_arrival_during_a_break_is_in_the_next_round() -> None:
    run = running("1:3", "ab")
    run.fail("a")
    run.hello("c")
    run.stop("a", "b")
    assert run.members == "abc"


# The end of the work.


def test_the_run_is_done_when_all_members_are() -> None:
    run = running("1:2", "ab")
    run.done("a")
    run.advance(100)
    assert run.end is None
    run.done("b")
    assert run.end == (0, "all workers finished")
    for node_id in "ab":
        (order,) = run.orders(node_id, m.RunEnd)
        assert (order.code, order.failure) == (0, None)


def test_done_before_joined_counts_as_both() -> None:
    run = Run("1:1")
    run.hello("a")
    run.done("a")
    assert run.code == 0


def test_a_done_node_is_taken_back_by_a_break() -> None:
    run = running("1:2", "ab")
    run.done("a")
    run.fail("b")
    assert len(run.orders("a", m.Break)) == 1
    run.stop("a", "b")
    assert (run.number, run.members) == (2, "ab")
    run.done("b")
    assert run.end is None, "what a did in round 1 does not count in round 2"
    run.done("a")
    assert run.code == 0


def test_the_loss_of_a_done_node_breaks_the_round() -> None:
    run = running("1:2", "ab")
    run.done("a")
    run.close("a")
    run.stop("b")
    assert (run.number, run.members) == (2, "b")


def test_after_the_end_a_hello_gets_it_at_once() -> None:
    run = running("1:1", "a", max_restarts=0)
    run.fail("a", exit_code=7)
    run.stop("a")
    run.hello("z")
    (order,) = run.orders("z", m.RunEnd)
    assert order == run.orders("a", m.RunEnd)[0]
    assert run.orders("z", m.Welcome) == []


# Incarnations, links and returns.


def test_a_newer_incarnation_replaces_the_older() -> None:
    run = running("1:2", "ab")
    old = run.links["b"]
    run.hello("b", incarnation="b2")
    assert [order.final for order in run.orders("b", m.Evicted)] == [True]
    assert run.links["b"] != old
    assert run.told(RoundBroken)[0].kind == "node loss"
    run.stop("a")
    assert [member.incarnation for member in run.record.round.members] == ["a1", "b2"]
    assert run.record.restarts == 0
    run._do(run.machine.closed(old, run.clock.now()))
    assert not run.forming, "the end of the old one's connection is no loss"


def test_an_older_incarnation_that_comes_back_does_not_replace_the_newer() -> None:
    run = running("1:2", "ab")
    run.silent.add("b")
    run.advance(6)
    run.silent.clear()
    run.hello("b", incarnation="b2")
    run.stop("a")
    assert [member.incarnation for member in run.record.round.members] == ["a1", "b2"]
    newer = run.links["b"]
    run.hello("b", incarnation="b1", holding=1, seen_term=1, seen_round=1)
    assert not run.forming, "the round of the newer one goes on"
    assert [order.final for order in run.orders("b", m.Evicted)] == [True], "the older one is sent away for good"
    run._do(run.machine.report(newer, m.Joined(2), run.clock.now()))
    run._do(run.machine.report(newer, m.Done(2), run.clock.now()))
    run.done("a")
    assert run.code == 0


def test_a_node_that_still_holds_workers_of_an_older_round_is_evicted() -> None:
    run = running("1:2", "ab")
    run.silent.add("b")
    run.advance(6)
    run.silent.clear()
    run.stop("a")
    assert run.members == "a"
    run.hello("b", holding=1, seen_term=1, seen_round=1)
    (order,) = run.orders("b", m.Evicted)
    assert not order.final
    assert "b" not in run.links
    run.hello("b", seen_term=1, seen_round=1)
    run.join("a")
    run.advance(1.1)
    run.stop("a")
    assert run.members == "ab"


def test_a_node_that_holds_workers_of_a_broken_round_is_evicted() -> None:
    run = running("1:2", "ab")
    run.close("b")
    run.hello("b", holding=1, seen_term=1, seen_round=1)
    assert len(run.orders("b", m.Evicted)) == 1
    run.stop("a")
    assert run.members == "a"


def test_a_new_link_of_the_same_agent_replaces_the_old_one() -> None:
    run = running("1:2", "ab")
    old = run.links["b"]
    run.hello("b", holding=1, seen_term=1, seen_round=1)
    assert not run.forming
    run._do(run.machine.closed(old, run.clock.now()))
    assert not run.forming
    run.fail("b")
    assert run.forming


def test_a_hello_that_tells_of_stopped_workers_breaks_the_round() -> None:
    """The reports of a lost link are lost: by its hello the node says what matters."""
    run = running("1:2", "ab")
    run.hello("b", holding=0, seen_term=1, seen_round=1, store_port=7009)
    assert run.forming
    run.stop("a")
    assert (run.number, run.members) == (2, "ab")
    assert run.record.round.members[1].store_port == 7009


def test_a_hello_that_tells_of_stopped_workers_ends_the_wait_for_them() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    run.hello("b", holding=0, seen_term=1, seen_round=1)
    assert (run.number, run.members) == (2, "ab")


def test_a_hello_that_tells_of_finished_workers_counts_as_done() -> None:
    run = running("1:2", "ab")
    run.done("a")
    run.hello("b", holding=1, done=True, seen_term=1, seen_round=1)
    assert run.code == 0


def test_a_break_that_was_lost_with_the_link_is_sent_again() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    before = len(run.orders("b", m.Break)) + len(run.orders("b", m.Evicted))
    run.hello("b", holding=1, seen_term=1, seen_round=1)
    assert len(run.orders("b", m.Break)) + len(run.orders("b", m.Evicted)) > before


def test_a_form_that_was_lost_with_the_link_does_not_stop_the_run() -> None:
    run = Run("1:2")
    run.hello("a", "b")
    run.join("a")
    run.hello("b", seen_term=1, seen_round=0)
    run.advance(5)
    if run.forming:
        run.stop("a")
    assert run.orders("b", m.Form)[-1].round.number == run.number
    assert len(run.orders("b", m.Form)) == 2, "it is formed again, or sent again"


def test_reports_over_a_link_that_is_no_nodes_are_ignored() -> None:
    run = running("1:1", "a")
    assert run.machine.report(99, m.Stopped(1, 7000), run.clock.now()) == []
    assert run.machine.closed(99, run.clock.now()) == []


# A leader that lost its store.


def test_a_member_of_an_earlier_reign_raises_term_and_number_and_keeps_restarts() -> None:
    run = Run("1:2")
    run.hello("a")
    run.hello("b", seen_term=3, seen_round=7, seen_restarts=2)
    assert run.record.term == 4
    assert run.number == 8
    assert run.record.restarts == 2
    form = run.orders("b", m.Form)[0]
    assert (form.term, form.restarts) == (4, 2)
    assert run.orders("b", m.Welcome)[0].term == 4


def test_the_term_rises_above_that_of_an_earlier_reign_with_the_same_term() -> None:
    run = Run("1:2")
    run.hello("b", seen_term=1, seen_round=1)
    assert run.record.term == 2
    run.hello("c", seen_term=1, seen_round=1)
    assert run.record.term == 2
    assert run.number == 2


def test_a_spare_of_an_earlier_reign_can_be_ordered_too() -> None:
    """It ignores orders of terms below the one it has seen, though it was never in a round."""
    run = Run("1:2")
    run.hello("b", seen_term=3, seen_round=0)
    run.advance(2.1)
    assert run.orders("b", m.Welcome)[0].term >= 3
    assert run.orders("b", m.Form)[0].term >= 3


def test_a_member_of_an_earlier_reign_with_live_workers_is_evicted_and_its_knowledge_kept() -> None:
    run = Run("1:2")
    run.hello("b", holding=7, seen_term=3, seen_round=7, seen_restarts=2)
    (order,) = run.orders("b", m.Evicted)
    assert (order.term, order.final) == (4, False)
    run.hello("a")
    run.advance(2.1)
    assert (run.number, run.record.restarts, run.members) == (8, 2, "a")


def test_what_a_latecomer_of_an_earlier_reign_knows_holds_from_the_next_round_on() -> None:
    run = running("1:3", "a")
    run.hello("b", seen_term=5, seen_round=9, seen_restarts=1)
    run.advance(1.1)
    run.stop("a")
    assert (run.number, run.record.term, run.record.restarts, run.members) == (10, 6, 1, "ab")


def test_restarts_of_an_earlier_reign_count_for_the_budget() -> None:
    run = Run("1:1", max_restarts=2)
    run.hello("a", seen_term=1, seen_round=3, seen_restarts=2)
    run.fail("a")
    run.stop("a")
    assert run.code == 91


def record_of_running_round() -> ControlRecord:
    members = tuple(Member(node_id, f"{node_id}1", 1, f"host-{node_id}", 7000) for node_id in "ab")
    return ControlRecord("run", "digest", 5, Leader("z", "z1", "10.0.0.9", 1), Round(4, members), restarts=1).renewed()


def test_a_leader_that_takes_over_a_running_round_lets_it_run() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", "b", holding=4, seen_term=4, seen_round=4, seen_restarts=1)
    run.advance(60)
    assert run.events == run.told(NodeJoined)
    run.done("a", "b")
    assert run.code == 0


def test_a_leader_that_takes_over_breaks_the_round_of_members_that_do_not_come() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", holding=4, seen_term=4, seen_round=4, seen_restarts=1)
    run.advance(6)
    assert run.told(RoundBroken)[0].cause == "node b did not come to the new leader"
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (5, "a", 1)


def test_a_leader_that_takes_over_counts_workers_that_finished_meanwhile() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", "b", holding=4, done=True, seen_term=4, seen_round=4)
    run.advance(1)
    assert run.code == 0


# Ranks.


def test_ranks_are_stable_over_rounds() -> None:
    run = running("1:4", "abcd")
    run.close("b")
    run.stop("d", "c", "a")
    assert run.members == "acd"
    run.join(*"acd")
    run.hello("b", incarnation="b2")
    run.advance(1.1)
    run.stop("d", "c", "a")
    assert run.members == "acdb"


def test_wanted_ranks_are_honoured() -> None:
    run = Run("3:3")
    run.hello("x", wanted_rank=2)
    run.hello("y", wanted_rank=0)
    run.hello("z", wanted_rank=1)
    assert run.members == "yzx"


def test_wanted_ranks_are_honoured_in_later_rounds() -> None:
    run = running("1:3", "ab")
    run.hello("m", wanted_rank=0)
    run.advance(1.1)
    run.stop("a", "b")
    assert run.members == "mab"


def test_newcomers_are_the_first_to_be_left_out() -> None:
    run = running("1:2", "ab")
    run.hello("c", wanted_rank=0)
    run.fail("a")
    run.stop("b", "a")
    assert run.members == "ab"


# Nodes that do not fit.


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"version": 99}, "speaks version 99 of the protocol, the run's leader version 1"),
        ({"run_id": "other"}, "belongs to run 'other', this endpoint serves run 'run'"),
        (
            {"digest": "x", "limits": "--nnodes 1:9 --max-restarts 3"},
            "came with --nnodes 1:9 --max-restarts 3, run 'run' has --nnodes 1:2 --max-restarts 3",
        ),
        (
            {"digest": "x", "command": "other.py"},
            "came with the command `other.py`, run 'run' executes `train.py --lr 1`",
        ),
    ],
    ids=["version", "run id", "limits", "command"],
)
def test_a_node_that_does_not_fit_is_refused_and_told_what_differs(fields: dict[str, Any], found: str) -> None:
    run = Run("1:2")
    run.hello("a")
    run.hello("b", **fields)
    (order,) = run.orders("b", m.Refused)
    assert found in order.reason
    assert order.reason.startswith("node b ")
    assert order.hint
    assert order.code == 95
    assert "b" not in run.links
    assert [event.node for event in run.told(NodeRefused)] == ["b"]
    run.advance(2.1)
    assert run.members == "a"


def test_a_refused_node_teaches_the_leader_nothing() -> None:
    run = Run("1:2")
    run.hello("b", digest="x", command="other.py", seen_term=9, seen_round=9, seen_restarts=3)
    run.hello("a")
    run.advance(2.1)
    assert (run.record.term, run.number, run.record.restarts) == (1, 1, 0)


def test_a_refused_node_is_refused_after_the_end_too() -> None:
    run = running("1:1", "a")
    run.done("a")
    run.hello("b", digest="x", command="other.py")
    assert run.orders("b", m.RunEnd) == []
    assert len(run.orders("b", m.Refused)) == 1


# Waiting.


def test_a_turn_is_due_at_the_latest_after_a_beat() -> None:
    run = running("1:1", "a", beat=0.25)
    assert run.machine.wait(run.clock.now()) == pytest.approx(0.25)
