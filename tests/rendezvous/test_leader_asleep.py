"""A leader whose process was stopped for some time, and nodes whose links broke with reports pending."""

from __future__ import annotations

from leader_run import Run, running

from elastic_launch.events.types import NodeLeft, RoundBroken
from elastic_launch.failure import Suspect
from elastic_launch.rendezvous.wire import messages as m


def test_a_parked_leader_that_was_stopped_does_not_count_its_sleep() -> None:
    run = Run("2", min_wait=60.0)
    run.hello("a")
    run.advance(10)
    run.sleep(3600)
    assert run.end is None
    run.advance(40)
    assert run.end is None
    run.advance(10)
    assert run.code == 94


def test_members_that_stopped_in_time_are_not_left_out_by_a_leader_that_slept() -> None:
    run = running("1:3", "abc", return_after=10.0)
    run.leave("c")
    run.clock.advance(60)
    run.stop("a")
    run.stop("b")
    run.close("c")
    assert (run.number, run.members) == (2, "ab")


def test_a_round_that_was_started_while_the_leader_slept_runs_on() -> None:
    run = Run("2", join_timeout=30.0)
    run.hello("a", "b")
    run.clock.advance(600)
    run.report("a", m.Beat())
    run.join("a", "b")
    run.advance(60)
    assert run.told(RoundBroken) == []


def test_a_node_that_leaves_states_it_in_the_hello_of_its_next_link() -> None:
    run = running("1:2", "ab")
    run.hello("b", holding=1, joined=True, leaving="SIGTERM")
    assert run.told(NodeLeft)[0].cause == "SIGTERM"
    run.stop("a", "b")
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_a_node_that_leaves_and_comes_to_a_leader_for_the_first_time_is_in_no_round() -> None:
    run = Run("1:2")
    run.hello("a")
    run.hello("b", leaving="SIGTERM")
    run.advance(3)
    assert run.members == "a"


def test_a_node_that_holds_a_round_but_has_not_started_its_workers_is_still_waited_for() -> None:
    run = Run("2", join_timeout=30.0)
    run.hello("a", "b")
    run.join("a")
    run.hello("b", holding=1)
    run.advance(31)
    assert run.told(RoundBroken)[0].cause == "node b did not start its workers within join_timeout"
    assert run.told(RoundBroken)[0].suspects == (Suspect("b"),)
