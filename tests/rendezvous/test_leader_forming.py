"""Which nodes train together: the first round, growing, ranks, and refused nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from leader_run import Run, running

from elastic_launch.config.launch_config import Limits
from elastic_launch.events.sentences import command_differs, sentence
from elastic_launch.events.types import (
    NodeDiffers,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Parked,
    RoundBroken,
    RoundFormed,
)
from elastic_launch.rendezvous.leader import machine
from elastic_launch.rendezvous.leader.admission import differences
from elastic_launch.rendezvous.record import ControlRecord, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m

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
        assert run.orders(node_id, m.Welcome) == [m.Welcome(1, node_id, 1.0, 5.0, max_nodes=3, leader="a1")]


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
    assert [sentence(event).partition(";")[0] for event in run.told(Parked)] == ["parked with 1 node, 2 needed"]
    run.advance(100)
    assert run.number == 0
    run.hello("b")
    run.advance(2.1)
    assert run.members == "ab"


def test_a_run_without_nodes_does_not_park() -> None:
    run = Run("1:2", min_wait=5)
    run.advance(100)
    assert run.events == []


def test_a_node_that_waits_learns_for_what() -> None:
    run = Run("2:4")
    run.hello("a")
    run.advance(0.1)
    run.hello("b")
    (notice,) = run.orders("a", m.UserMessage)
    assert "parked with 1 node, 2 needed" in notice.text
    (notice,) = run.orders("b", m.UserMessage)
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
    run.fail("b", error="RuntimeError: Connection reset by peer")
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
        ({"version": 99}, "speaks version 99 of the protocol, the run's leader version"),
        ({"run_id": "other"}, "belongs to run 'other', this endpoint serves another run"),
        (
            {"digest": "x", "command": "other.py"},
            "came with the command `other.py`, run 'run' executes `train.py --lr 1`",
        ),
        (
            {"digest": "x", "command": "--replica-size 2 train.py --lr 1"},
            "came with the command `--replica-size 2 train.py --lr 1`, run 'run' executes `train.py --lr 1`",
        ),
    ],
    ids=["version", "run id", "command", "size of replicas"],
)
def test_a_node_that_does_not_fit_is_refused_with_the_difference(fields: dict[str, Any], found: str) -> None:
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


def test_a_node_with_other_arguments_or_limits_joins_and_gets_a_notice_of_the_difference() -> None:
    run = Run("1:4", max_restarts=2)
    run.hello("a")
    run.hello("b", command="/srv/train.py --lr 2")
    run.hello("c", command="/data/train.py --lr 3", limits="--nnodes 1:2 --max-restarts 5")
    run.hello("d", command="./train.py --lr 4")
    arguments = "`/srv/train.py` instead of `train.py`, `--lr 2` instead of `--lr 1`"
    (note,) = [order.text for order in run.orders("b", m.UserMessage) if "other arguments" in order.text]
    assert note == f"node b came with other arguments: {arguments}"
    assert len([order for order in run.orders("d", m.UserMessage) if "--lr 4" in order.text]) == 1
    limits = "--nnodes 1:2 --max-restarts 5; those of the run hold: --nnodes 1:4 --max-restarts 2"
    assert [(event.node, event.limits) for event in run.told(NodeDiffers)] == [("b", ""), ("c", limits)]
    run.join("a", "b", "c", "d")
    assert (run.members, run.machine.limits) == ("abcd", Limits(1, 4, 2))
    assert [order.max_restarts for order in run.orders("c", m.Form)] == [2]
    run.close("b")
    run.hello("b", command="/srv/train.py --lr 2", seen_term=1, seen_round=1)
    assert len(run.told(NodeDiffers)) == 2, "it was told before"


def refused(run: Run) -> str:
    """What the last node that is not of the run was told; it is gone."""
    event = run.told(NodeRefused)[-1]
    (order,) = run.orders(event.node, m.Refused)
    assert "--rdzv-endpoint" in order.hint
    assert event.node not in run.links
    return order.reason


def test_a_second_job_at_the_endpoint_of_a_full_run_of_one_node_is_refused() -> None:
    run = Run("1", hosted=True)
    run.hello("a")
    run.join("a")
    run.hello("b")
    assert "run 'run' at this endpoint: it has one node (--nnodes 1), which trains" in refused(run)
    assert run.members == "a"
    elected = Run("1")
    elected.hello("a")
    elected.join("a")
    elected.hello("b")
    assert "b" in elected.links, "it may take over once the leader is gone"


def without_id() -> Run:
    """A run that trains, whose nodes were given no id, and differ in an argument."""
    run = Run("2:4", record=ControlRecord("none", "digest", 1, Leader("a", "a1", "10.0.0.1", 1)).renewed())
    run.hello("a", run_id="none")
    run.hello("b", run_id="none", command="train.py --lr 3")
    run.advance(2.1)
    run.join("a", "b")
    return run


def test_a_job_with_other_arguments_and_no_id_is_refused_once_the_first_round_has_formed() -> None:
    run = without_id()
    run.hello("c", run_id="none", command="train.py --lr 2")
    assert "c" in run.links, "those of the run differ in the same argument"
    run.hello("d", run_id="none", command="train.py --lr 1 --seed 2")
    assert "it came with other arguments, `--seed 2` in addition, and neither has an id" in refused(run)
    named = Run("1:4")
    named.hello("a")
    named.advance(2.1)
    named.join("a")
    named.hello("b", command="train.py --lr 2")
    assert "b" in named.links


def test_nodes_with_more_differences_than_are_noted_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_COMPARED", 1)
    run = without_id()
    run.hello("c", run_id="none", command="train.py --lr 1 --seed 2")
    assert "c" in run.links


def test_a_replaced_node_may_differ_as_before_after_another_leader_took_over() -> None:
    record = ControlRecord("none", "digest", 1, Leader("a", "a1", "10.0.0.1", 1)).renewed()
    run = Run("2:2", record=replace(record, term=2, round=Round(3, ())))
    run.hello("a", run_id="none", seen_term=1, seen_round=3)
    run.hello("b", run_id="none", seen_term=1, seen_round=3, command="train.py --lr 2")
    run.close("b")
    run.hello("b", run_id="none", incarnation="b2", command="train.py --lr 2")
    assert "b" in run.links


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ("t.py --a 1", "t.py --a 1", ""),
        ("t.py --a 1 x", "t.py --a 2 y", "`--a 2 y` instead of `--a 1 x`"),
        ("t.py --a 1 --b", "t.py --a 1", "without `--b`"),
        ("t.py", "t.py --resume 'a b'", "`--resume 'a b'` in addition"),
        ("t.py " + "x " * 300, "t.py " + "x " * 300 + "y", "they are too long to be shown"),
        ("t.py", "t.py 'a", "they are too long to be shown"),
        ("t.py a\x1b", "t.py b", "`b` instead of `'a\\x1b'`"),
        ("1 a 2 b 3 c 4 d 5 e 6 f", "a 1 b 2 c 3 d 4 e 5 f 6", None),
    ],
)
def test_commands_are_compared_in_words(ours: str, theirs: str, found: str | None) -> None:
    differs = differences(ours, theirs)
    words, places = (command_differs(differs), differs.places) if differs is not None else ("", ())
    assert words == found or (found is None and words.endswith("more") and words.count("`") == 18)
    assert bool(places) == ("`" in words)


def test_a_refused_node_does_not_change_the_leaders_state() -> None:
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
