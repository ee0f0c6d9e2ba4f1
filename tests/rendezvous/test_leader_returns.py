"""The end of the work, and nodes that come back."""

from __future__ import annotations

import pytest
from leader_run import Run, running

from elastic_launch.events.types import (
    RoundBroken,
)
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m

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


@pytest.mark.parametrize("how", ["lost", "leaves", "replaced"])
def test_what_a_node_has_finished_stays_finished_when_it_goes(how: str) -> None:
    """Others that have finished do not train again, and none is waited for in its place."""
    run = running("3", "abc")
    run.done("a", "b")
    match how:
        case "lost":
            run.close("b")
        case "leaves":
            run.leave("b")
            run.close("b")
        case "replaced":
            run.hello("b", incarnation="b2")
    run.hello("d")
    run.advance(100)
    assert run.orders("a", m.Break) == run.orders("c", m.Break) == []
    assert run.orders("d", m.Form) == []
    run.done("c")
    assert run.end == (0, "all workers finished")
    assert run.told(RoundBroken) == []


def test_the_loss_of_the_last_node_that_trains_breaks_the_round_all_the_same() -> None:
    run = running("1:3", "abc")
    run.done("a", "b")
    run.close("b")
    run.close("c")
    run.stop("a")
    assert (run.number, run.members) == (2, "a")
    run.done("a")
    assert run.code == 0


def test_a_finished_node_that_was_lost_may_come_back() -> None:
    run = running("1:3", "abc")
    run.done("a")
    run.close("a")
    run.hello("a", holding=1, done=True, seen_term=1, seen_round=1)
    run.close("a")
    run.hello("a", seen_term=1, seen_round=1)
    run.done("b")
    assert run.told(RoundBroken) == []
    run.fail("c")
    run.stop("b", "c")
    assert (run.number, run.members) == (2, "abc"), "a broken round is done again by all that are there"


def test_a_drained_round_goes_on_without_a_finished_node_that_was_lost() -> None:
    run = running("1:4", "ab")
    for node_id in "ab":
        run.report(node_id, m.NodeReady(1))
    run.hello("c")
    run.advance(10)
    run.done("a")
    run.close("a")
    assert run.told(RoundBroken) == []
    run.done("b")
    assert run.end == (0, "all workers finished")


def test_after_the_end_a_hello_gets_it_at_once() -> None:
    run = running("1:1", "a", max_restarts=0)
    run.fail("a", exit_code=7)
    run.stop("a")
    run.hello("z")
    (order,) = run.orders("z", m.RunEnd)
    assert order == run.orders("a", m.RunEnd)[0]
    assert run.orders("z", m.Welcome) == []


def test_after_the_end_nothing_happens_any_more() -> None:
    run = running("1:2", "ab")
    run.done("a", "b")
    before = [len(run.commits), len(run.events), len(run.orders("a", object)), len(run.orders("b", object))]
    run.fail("a")
    run.leave("b")
    run.close("b")
    run.silent.add("a")
    run.advance(1000)
    assert [len(run.commits), len(run.events), len(run.orders("a", object)), len(run.orders("b", object))] == before


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


def test_a_hello_with_stopped_workers_breaks_the_round() -> None:
    """The reports of a lost link are lost; the node's hello contains what matters."""
    run = running("1:2", "ab")
    run.hello("b", holding=0, seen_term=1, seen_round=1, store_port=7009)
    assert run.forming
    run.stop("a")
    assert (run.number, run.members) == (2, "ab")
    assert run.record.round.members[1].store_port == 7009


def test_a_hello_with_stopped_workers_ends_the_wait_for_them() -> None:
    run = running("1:2", "ab")
    run.fail("a")
    run.stop("a")
    run.hello("b", holding=0, seen_term=1, seen_round=1)
    assert (run.number, run.members) == (2, "ab")


def test_a_hello_with_finished_workers_counts_as_done() -> None:
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


def test_reports_over_a_link_of_no_node_are_ignored() -> None:
    run = running("1:1", "a")
    assert run.machine.report(99, m.Stopped(1, 7000), run.clock.now()) == []
    assert run.machine.closed(99, run.clock.now()) == []


# A leader that lost its store.


def test_a_member_of_an_earlier_term_raises_term_and_number_and_keeps_restarts() -> None:
    run = Run("1:2")
    run.hello("a")
    run.hello("b", seen_term=3, seen_round=7, seen_restarts=2)
    assert run.record.term == 4
    assert run.number == 8
    assert run.record.restarts == 2
    form = run.orders("b", m.Form)[0]
    assert (form.term, form.restarts) == (4, 2)
    assert run.orders("b", m.Welcome)[0].term == 4


def test_the_term_rises_above_that_of_an_earlier_leader_with_the_same_term() -> None:
    run = Run("1:2")
    run.hello("b", seen_term=1, seen_round=1)
    assert run.record.term == 2
    run.hello("c", seen_term=1, seen_round=1)
    assert run.record.term == 2
    assert run.number == 2


def test_a_spare_of_an_earlier_term_can_be_ordered_too() -> None:
    """It ignores orders of terms below the one it has seen, though it was never in a round."""
    run = Run("1:2")
    run.hello("b", seen_term=3, seen_round=0)
    run.advance(2.1)
    assert run.orders("b", m.Welcome)[0].term >= 3
    assert run.orders("b", m.Form)[0].term >= 3


def test_a_member_of_an_earlier_term_with_live_workers_is_evicted_and_its_knowledge_kept() -> None:
    run = Run("1:2")
    run.hello("b", holding=7, seen_term=3, seen_round=7, seen_restarts=2)
    (order,) = run.orders("b", m.Evicted)
    assert (order.term, order.final) == (4, False)
    run.hello("a")
    run.advance(2.1)
    assert (run.number, run.record.restarts, run.members) == (8, 2, "a")


def test_what_a_late_node_of_an_earlier_term_knows_holds_from_the_next_round_on() -> None:
    run = running("1:3", "a")
    run.hello("b", seen_term=5, seen_round=9, seen_restarts=1)
    run.advance(1.1)
    run.stop("a")
    assert (run.number, run.record.term, run.record.restarts, run.members) == (10, 6, 1, "ab")


def test_restarts_of_an_earlier_term_count_for_the_budget() -> None:
    run = Run("1:1", max_restarts=2)
    run.hello("a", seen_term=1, seen_round=3, seen_restarts=2)
    run.fail("a")
    run.stop("a")
    assert run.code == 91


def test_a_link_that_waited_since_an_earlier_term_of_the_leader_is_closed() -> None:
    """What its node said then may be untrue by now: here that the node has no workers."""
    run = Run("1:3", record=ControlRecord("run", "digest", 7, Leader("a", "a1", "10.0.0.1", 1)))
    run.hello("b", term=6)
    assert "b" not in run.links
    assert not run.events
    run.hello("b", term=7)
    run.hello("c")  # it found the leader without a record
    assert set(run.links) == {"b", "c"}


# Runs that begin anew, since their record was lost with its host.


def test_the_state_of_nodes_that_come_before_the_first_round_counts() -> None:
    run = Run("1:2")
    run.hello("a", seen_run="earlier", seen_round=7, held=m.HeldSnapshot(7, 40, 0))
    run.hello("b")
    assert (run.number, run.members) == (8, "ab")
    run.hello("c", seen_run="earlier", seen_round=5, held=m.HeldSnapshot(5, 20, 0))
    assert [len(run.orders(name, m.Evicted)) for name in "abc"] == [0, 0, 0], "its numbers are lower than this run's"


def test_a_node_of_the_earlier_run_that_knew_none_of_its_last_rounds_does_not_vouch_for_those() -> None:
    """As a spare, which was in no round: the run begins with a number that the earlier one has used."""
    run = Run("1:2")
    run.hello("a")
    run.hello("c", seen_run="earlier")
    assert (run.number, run.members) == (1, "ac")
    run.hello("b", seen_run="earlier", seen_round=1, held=m.HeldSnapshot(1, 40, 0))
    assert [x.anew for x in run.orders("b", m.Evicted)] == [True]


def test_states_keep_the_number_of_the_run_whose_record_was_lost() -> None:
    """The workers of two runs with one id tell the runs' checkpoints apart by it, and this is still the first one."""
    run = Run("1:2")
    run.hello("a", seen_run="second", seen_round=3, origin="first")
    run.hello("b", seen_run="other", seen_round=2, origin="other")
    assert run.members == "ab"
    assert {order.origin for name in "ab" for order in run.orders(name, m.Form)} == {"first"}
    run.hello("c", seen_run="second", seen_round=9, origin="later")
    run.stop("a", "b")
    assert [order.origin for order in run.orders("a", m.Form)] == ["first", "first"]
    assert run.record.origin == "first"


def test_a_run_that_begins_has_a_number_of_its_own() -> None:
    run = Run("1:1")
    run.hello("a")
    assert [order.origin for order in run.orders("a", m.Form)] == [run.record.run]


def test_what_a_node_knows_of_another_run_spends_no_budget_of_this_one() -> None:
    run = running("1:2", "a", max_restarts=3)
    run.hello("b", seen_run="earlier", seen_round=9, seen_restarts=3, seen_term=1)
    run.hello("b", seen_term=1)
    assert run.record.restarts == 0
    run.stop("a")
    assert (run.number, run.members, run.record.restarts) == (10, "ab", 0)
    run.fail("a")
    run.stop("a", "b")
    assert run.record.restarts == 1
    assert run.told(RoundBroken)[-1].kind == "crash"


def test_a_node_that_comes_after_the_first_round_with_the_state_of_an_earlier_run_drops_it() -> None:
    """Rounds of the two have the same numbers, and different states."""
    run = running("1:2", "a")
    fields = {"seen_run": "earlier", "seen_round": 1, "seen_term": 1}
    run.hello("b", holding=1, **fields)
    assert [(x.final, x.anew) for x in run.orders("b", m.Evicted)] == [(False, False)], "its workers end first"
    run.hello("b", held=m.HeldSnapshot(1, 40, 0), **fields)
    assert [(x.final, x.anew) for x in run.orders("b", m.Evicted)][1:] == [(False, True)]
    assert run.orders("b", m.Welcome) == []
    run.hello("b", seen_round=1, seen_term=1)
    assert len(run.orders("b", m.Welcome)) == 1
    assert len(run.orders("b", m.Evicted)) == 2


def test_a_node_that_has_been_in_no_round_is_taken_from_any_run() -> None:
    run = running("1:2", "a")
    run.hello("b", seen_run="earlier")
    assert len(run.orders("b", m.Welcome)) == 1
