"""A leader that takes over from another, in the middle of a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from leader_run import Run, failure

from elastic_launch.config.launch_config import Limits
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import CauseFound, NodeExcluded, NodeJoined, RestartCharged, RoundBroken
from elastic_launch.rendezvous.leader.restart_budget import JITTER
from elastic_launch.rendezvous.record import ControlRecord, FaultyNode, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m

HELD: dict[str, Any] = {"holding": 4, "seen_term": 4, "seen_round": 4, "seen_restarts": 1}
STOPPED: dict[str, Any] = HELD | {"holding": 0}
TOLD: dict[str, Any] = STOPPED | {"broken": True}


def record_of_running_round(nodes: str = "ab") -> ControlRecord:
    members = tuple(Member(node_id, f"{node_id}1", 1, f"host-{node_id}", 7000) for node_id in nodes)
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
    broken = run.told(RoundBroken)[0]
    assert broken.cause == "node b did not come to the new leader"
    assert sentence(broken).startswith("round 4 broken: node b did not come")
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (5, "a", 1)
    run.fail("a")
    assert run.told(RoundBroken)[-1].lasted_s is not None


def test_a_leader_that_takes_over_counts_workers_that_finished_meanwhile() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", "b", holding=4, done=True, seen_term=4, seen_round=4)
    run.advance(1)
    assert run.code == 0


def test_failures_in_a_row_are_counted_on_under_each_new_leader() -> None:
    record, delays = replace(record_of_running_round(), limits=Limits(2, 2, 100, max_idle_restarts=3), best=7), []
    while record.end is None:
        run, number = Run("2", record=replace(record, term=record.term + 1)), record.round.number
        run.hello("a", "b", holding=number, seen_term=record.term, seen_round=number, seen_restarts=record.restarts)
        run.report("b", m.ProgressBeat(number, 7))
        run.fail("a", ran=1.0, round=number)
        run.stop("a", "b")
        run.advance(5.0)
        record = run.record
        delays += [event.delay_s for event in run.told(RestartCharged)]
    assert delays == [0.0, pytest.approx(1.0, rel=JITTER), pytest.approx(2.0, rel=JITTER)]
    assert (record.end.code, record.end.cause.split(":")[0]) == (
        92,
        "no new step in 3 restarts (--max-idle-restarts 3)",
    )


def test_no_round_is_formed_while_a_member_may_still_train() -> None:
    """b stopped under the old leader; a has not connected yet, and its workers may live."""
    run = Run("1:3", record=record_of_running_round("abc"))
    run.hello("b", **STOPPED)
    assert run.told(RoundBroken)[0].cause == "node b came to the new leader without its workers"
    run.hello("c", **HELD)
    assert len(run.orders("c", m.Break)) == 1
    run.stop("c")
    run.advance(4.5)
    assert run.number == 4
    run.hello("a", **HELD)
    assert len(run.orders("a", m.Break)) == 1
    assert run.number == 4
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (5, "abc", 1)


@pytest.mark.parametrize("state", [HELD, STOPPED], ids=["still stops", "has stopped"])
def test_a_crash_is_charged_although_the_leader_that_received_it_is_gone(state: dict[str, Any]) -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", **state, failed=failure("a", round=4))
    run.hello("b", **HELD, failed=failure("b", round=4, rank=1, symptom="broken connection"))
    assert [(event.kind, event.cause[:6]) for event in run.told(RoundBroken)] == [("crash", "rank 0")]
    run.stop("a", "b")
    assert (run.number, run.members, run.record.restarts) == (5, "ab", 2)


@pytest.mark.parametrize("state", [HELD, STOPPED], ids=["still stops", "has stopped"])
def test_a_crash_is_charged_although_a_member_that_was_stopped_for_it_comes_first(state: dict[str, Any]) -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("b", **TOLD)
    assert [event.kind for event in run.told(RoundBroken)] == ["node loss"], "all that is known so far"
    run.hello("a", **state, failed=failure("a", round=4))
    assert [(event.kind, event.cause[:6]) for event in run.told(CauseFound)] == [("crash", "rank 0")]
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (5, "ab", 2)


def test_a_crash_costs_nothing_if_a_member_stopped_its_workers_without_being_told() -> None:
    """It had lost its leader, and its workers' end may have made the other crash."""
    run = Run("1:2", record=record_of_running_round())
    run.hello("b", **STOPPED)
    run.hello("a", **STOPPED, failed=failure("a", round=4))
    assert (run.number, run.members, run.record.restarts) == (5, "ab", 1)


def test_a_crash_costs_nothing_if_another_member_is_lost_before_its_node_comes() -> None:
    run = Run("1:3", record=record_of_running_round("abc"))
    run.hello("b", **TOLD)
    run.hello("c", **HELD)
    run.close("c")
    run.hello("a", **STOPPED, failed=failure("a", round=4))
    assert (run.number, run.members, run.record.restarts) == (5, "ab", 1)


def test_a_crash_that_the_last_leader_has_charged_is_not_charged_again() -> None:
    run = Run("1:2", record=replace(record_of_running_round(), restarts=2))
    run.hello("a", "b", **STOPPED, failed=failure("a", round=4))
    assert (run.number, run.record.restarts) == (5, 2)


@pytest.mark.parametrize("others_first", [False, True])
def test_a_round_is_not_judged_again_if_others_have_been_in_a_later_one(others_first: bool) -> None:
    """This leader was cut off, repaired the record, and knows only the round in which its own worker crashed."""
    run = Run("1:3", record=replace(record_of_running_round("abc"), term=100, floor=90))
    if others_first:
        run.hello("b", "c", **STOPPED | {"seen_term": 7, "seen_round": 6})
    run.hello("a", **STOPPED, failed=failure("a", round=4))
    if not others_first:
        run.hello("b", "c", **STOPPED | {"seen_term": 7, "seen_round": 6})
    run.advance(6)
    assert (run.number, run.members, run.record.restarts) == (91, "abc", 1)
    causes = [event.cause for event in run.told(RoundBroken) + run.told(CauseFound)]
    assert (causes[-1] == "round 6 has been formed since") is not others_first


def test_a_crash_of_an_earlier_round_says_nothing_about_the_current_one() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", "b", **HELD, failed=failure("a", round=3))
    run.advance(1)
    assert not run.told(RoundBroken)


def test_a_crash_beside_a_member_that_died_with_the_leader_costs_nothing() -> None:
    run = Run("1:2", record=record_of_running_round(), dead=frozenset({"a1"}))
    run.hello("b", **STOPPED, failed=failure("b", round=4))
    assert (run.number, run.members, run.record.restarts) == (5, "b", 1)


def test_a_member_that_never_comes_is_waited_for_until_it_counts_as_dead() -> None:
    run = Run("1:3", record=record_of_running_round("abc"))
    run.hello("b", "c", **STOPPED)
    run.advance(4.5)
    assert run.number == 4
    run.advance(1.0)
    assert (run.number, run.members) == (5, "bc")


def test_a_member_that_is_known_to_be_dead_is_not_awaited() -> None:
    run = Run("1:3", record=record_of_running_round("abc"), dead=frozenset({"a1"}))
    run.hello("b", **HELD)
    assert run.told(RoundBroken)[0].cause == "node a did not come to the new leader"
    run.stop("b")
    assert run.number == 4, "c may have its workers still"
    run.hello("c", **STOPPED)
    assert (run.number, run.members, run.record.restarts) == (5, "bc", 1)


def test_a_member_that_was_silent_for_long_before_has_little_time_to_come() -> None:
    run = Run("1:3", record=record_of_running_round("abc"), silent=frozenset({"a1"}))
    run.hello("b", **HELD)
    run.advance(0.4)
    assert not run.told(RoundBroken)
    run.advance(0.2)
    assert run.told(RoundBroken)[0].cause == "node a did not come to the new leader"
    run.stop("b")
    assert run.number == 4, "c may have its workers still"
    run.hello("c", **STOPPED)
    assert (run.number, run.members, run.record.restarts) == (5, "bc", 1)
    late = Run("1:3", record=record_of_running_round("abc"), silent=frozenset({"a1"}))
    late.hello("b", "c", **STOPPED, failed=failure("b", round=4))
    assert late.number == 4
    late.advance(0.6)
    assert (late.number, late.members, late.record.restarts) == (5, "bc", 1), "its loss is the cause"
    back = Run("1:2", record=record_of_running_round(), silent=frozenset({"a1"}))
    back.advance(0.4)
    back.hello("a", "b", **HELD)
    back.advance(60)
    assert back.number == 4


def test_a_newer_agent_of_a_member_shows_that_the_older_is_gone() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", **HELD)
    run.hello("b", incarnation="b2")
    assert run.told(RoundBroken)[0].cause == "node b did not come to the new leader"
    run.stop("a")
    assert (run.number, run.members) == (5, "ab")


def test_an_older_agent_of_a_member_that_was_frozen_is_evicted_by_a_new_leader_too() -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", "b", **HELD)
    run.advance(1)
    run.hello("b", incarnation="b0", seen_term=2, seen_round=2)
    assert not run.told(RoundBroken)
    assert [order.final for order in run.orders("b", m.Evicted)] == [True]


@pytest.mark.parametrize("first", ["old", "new"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, 2), (4, 3)),
        ((4, 2), (4, 3)),
        ((3, 2), (4, 0)),
        ((2, 2), (0, 0)),
    ],
    ids=["earlier term", "earlier round", "waits for its first round", "begins under this leader"],
)
def test_the_agent_that_knows_less_is_the_older_one_in_whatever_order_they_come(
    first: str, old: tuple[int, int], new: tuple[int, int]
) -> None:
    run = Run("1:2", record=record_of_running_round())
    run.hello("a", **HELD)
    links: dict[str, int] = {}
    for name in ("old", "new") if first == "old" else ("new", "old"):
        term, number = old if name == "old" else new
        run.hello("c", incarnation=name, seen_term=term, seen_round=number)
        links |= {name: run.links["c"]} if "c" in run.links else {}
    assert run.machine.nodes["c"].hello.incarnation == "new"
    # Nor does it take the place of the newer one while that has no link.
    run.links["c"] = links["new"]
    run.close("c")
    run.hello("c", incarnation="old", seen_term=old[0], seen_round=old[1])
    assert "c" not in run.machine.nodes


def test_of_two_agents_that_know_as_much_the_one_that_comes_last_counts() -> None:
    """The newer one may have waited for its first round when the leader changed."""
    for known in ({"seen_round": 4}, {"seen_round": 0}):
        run = Run("1:2", record=record_of_running_round())
        run.hello("a", **HELD)
        run.hello("c", incarnation="old", seen_term=4, seen_round=4)
        run.hello("c", incarnation="new", seen_term=4, **known)
        assert run.machine.nodes["c"].hello.incarnation == "new"


def test_a_crash_costs_nothing_if_a_member_died_with_the_leader_before() -> None:
    run = Run("1:3", record=record_of_running_round("abc"))
    run.hello("b", "c", **HELD)
    run.fail("b")
    run.stop("b", "c")
    run.advance(4.5)
    assert run.number == 4
    run.advance(1.0)
    assert (run.number, run.members, run.record.restarts) == (5, "bc", 1)


def test_a_crash_is_charged_once_all_members_have_come_to_the_new_leader() -> None:
    run = Run("1:3", record=record_of_running_round("abc"))
    run.hello("b", "c", **HELD)
    run.fail("b")
    run.stop("b", "c")
    run.hello("a", **HELD)
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (5, "abc", 2)


# What members bring of a round that another leader formed.

TRAINED = STOPPED | {"round_seen": m.RoundSeen(formed_ago=500.0, lasted=130.0, begun=7, reached=20)}


def record_of_restarted_round(**known: Any) -> ControlRecord:
    limits = Limits(1, 3, 9, restart_refill=100.0)
    return replace(record_of_running_round("abc"), limits=limits, restarts=2, best=7, last_step=5, vain=2, **known)


def test_the_time_and_the_steps_of_a_round_whose_leader_was_lost_count() -> None:
    run = Run("1:3", record=record_of_restarted_round(), dead=frozenset({"a1"}))
    run.hello("b", "c", **TRAINED)
    record = run.record
    assert (run.number, run.members) == (5, "bc")
    assert (record.refilled, record.last_step, record.best, record.vain, record.idle) == (1, 7, 20, 1, 0)


@pytest.mark.parametrize(
    "brought",
    [STOPPED, TRAINED | {"seen_round": 3}, TRAINED | {"incarnation": "b2"}],
    ids=["nothing", "of another round", "of another node"],
)
def test_what_does_not_belong_to_that_round_counts_for_nothing(brought: dict[str, Any]) -> None:
    run = Run("1:3", record=record_of_restarted_round(), dead=frozenset({"a1", "c1"}))
    run.hello("b", **brought)
    run.advance(6.0)
    assert run.number == 5
    assert (run.record.refilled, run.record.last_step, run.record.best, run.record.vain) == (0, 5, 7, 3)


def test_a_round_that_goes_on_under_the_new_leader_counts_as_a_whole() -> None:
    run = Run("1:3", record=record_of_restarted_round())
    run.hello("a", "b", "c", **HELD, round_seen=m.RoundSeen(formed_ago=90.0, lasted=90.0, begun=7, reached=20))
    run.advance(5.0)
    run.hello("b", **HELD, round_seen=m.RoundSeen(formed_ago=95.0, lasted=95.0, begun=7, reached=20))
    run.advance(9.0)
    run.fail("a", round=4)
    run.stop("a", "b", "c")
    assert (run.number, run.record.refilled) == (5, 1)
    assert run.record.healthy == pytest.approx(4.0)


def test_a_node_that_was_left_out_stays_so_under_the_new_leader() -> None:
    run = Run("1:3", record=replace(record_of_running_round("ab"), faulty=(FaultyNode("c", 1, 600.0),)))
    run.hello("c")
    run.hello("a", "b", **HELD, round_seen=m.RoundSeen(formed_ago=500.0, lasted=500.0))
    run.report("a", m.NodeReady(4))
    run.report("b", m.NodeReady(4))
    run.advance(90.0)
    assert run.number == 4
    assert not run.orders("a", m.DrainRound)
    run.advance(20.0)
    assert [order.cause for order in run.orders("a", m.DrainRound)] == ["resize: node c waits to join"]


def test_a_failing_node_is_left_out_although_the_leader_has_changed() -> None:
    faults = FaultyNode("b", faults=(50.0, 20.0))
    run = Run("1:3", record=replace(record_of_running_round("abc"), limits=Limits(1, 3, 9), faulty=(faults,)))
    run.hello("a", "b", "c", **HELD, round_seen=m.RoundSeen(formed_ago=500.0, lasted=500.0))
    run.fail("b", round=4)
    run.stop("a", "b", "c")
    assert [event.node for event in run.told(NodeExcluded)] == ["b"]
    assert (run.number, run.members) == (5, "ac")
    assert run.record.faulty == (FaultyNode("b", 1, 600.0),)
