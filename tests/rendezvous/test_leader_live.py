"""Live rounds: members keep their workers, take part with some of them, and newcomers start ahead of a place."""

from __future__ import annotations

import pytest
from leader_run import Run, running

from elastic_launch.events.types import NodeJoined, ResizeSkipped, RestartCharged, RoundBroken, RoundDraining
from elastic_launch.rendezvous.record import ControlRecord, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m


def trains(run: Run, node_ids: str, remaining: float = -1.0) -> None:
    for node_id in node_ids:
        run.report(node_id, m.NodeReady(run.number, remaining, live=True))


def suspended(run: Run, *node_ids: str, drained: int = -1, **fields: object) -> None:
    for node_id in node_ids:
        run.report(node_id, m.Stopped(run.number, 7000, drained, **fields))  # type: ignore[arg-type]


def live(nodes: str, node_ids: str, workers: int = 1, **arguments: float) -> Run:
    """A run whose first round trains, with live workers on all its nodes."""
    run = Run(nodes, **arguments)  # type: ignore[arg-type]
    run.hello(*node_ids, workers=workers)
    run.advance(2.1)
    assert (run.number, run.members) == (1, node_ids)
    trains(run, node_ids)
    return run


def partial(**arguments: float) -> Run:
    """A run of two nodes with two workers each; the second worker of b was killed, and is starting again."""
    run = live("1:2", "ab", workers=2, **arguments)
    run.fail("b")
    suspended(run, "a")
    suspended(run, "b", slots=(0,))
    assert run.number == 2
    return run


# Some of a node's workers.


def test_a_node_takes_part_with_the_workers_that_it_offers() -> None:
    run = partial()
    (form,) = [order for order in run.orders("a", m.Form) if order.round.number == 2]
    b = form.round.members[1]
    assert (b.workers, b.slots, b.local_ranks, form.round.world_size) == (1, (0,), (0,), 3)
    assert form.round.members[0].slots == ()


@pytest.mark.parametrize(
    ("offered", "slots"), [((0, 1), (0, 1)), ((2, 3), (2, 3)), ((0,), ()), ((1, 2), ()), ((0, 1, 2), ())]
)
def test_no_round_has_a_broken_replica(offered: tuple[int, ...], slots: tuple[int, ...]) -> None:
    run = Run("1:2")
    run.hello("a", "b", workers=4, replica_size=2)
    run.advance(2.1)
    trains(run, "ab")
    run.fail("b")
    suspended(run, "a")
    suspended(run, "b", slots=offered)
    assert run.number == 2
    assert run.record.round.members[1].slots == slots
    assert run.record.round.world_size == 4 + (len(slots) or 4)


def test_workers_that_are_back_join_at_the_next_boundary_without_resize_delay() -> None:
    run = partial(resize_delay=1000.0)
    trains(run, "ab")
    run.report("b", m.RankOffer((0, 1)))
    (order,) = run.orders("a", m.DrainRound)
    assert (order.kind, order.cause) == ("membership", "resize: node b has workers back")
    suspended(run, "a", "b", drained=7)
    assert (run.number, run.record.round.world_size, run.record.restarts) == (3, 4, 1)
    assert run.record.round.members[1] == Member("b", "b1", 2, "host-b", 7000)


def test_a_round_is_not_broken_for_workers_that_are_back() -> None:
    run = partial()
    run.report("b", m.RankOffer(()))
    trains(run, "a")
    run.advance(30)
    assert [event.round for event in run.told(RoundBroken)] == [1]
    trains(run, "b")
    assert run.orders("a", m.DrainRound)


def test_the_same_workers_again_change_nothing() -> None:
    run = partial()
    trains(run, "ab")
    run.report("b", m.RankOffer((0,)))
    run.report("a", m.RankOffer((0, 1)))
    run.advance(5)
    assert run.told(RoundDraining) == []


def test_no_round_is_drained_for_workers_that_are_back_when_others_have_finished() -> None:
    run = partial()
    trains(run, "ab")
    run.done("a")
    run.report("b", m.RankOffer((0, 1)))
    run.advance(5)
    assert run.told(RoundDraining) == []


def test_workers_that_are_back_too_late_to_pay_are_named_once() -> None:
    run = partial()
    trains(run, "ab", remaining=3.6)
    run.report("b", m.RankOffer((0, 1)))
    run.advance(5)
    (skipped,) = run.told(ResizeSkipped)
    assert (skipped.nodes, skipped.cost_s, skipped.saved_s) == (("b",), 1.0, pytest.approx(3.6 * (1 - 3 / 4), abs=0.1))
    assert run.told(RoundDraining) == []


@pytest.mark.parametrize("slots", [(0, 1), (5,), (1, 2)])
def test_local_ranks_that_a_node_does_not_have_count_as_all(slots: tuple[int, ...]) -> None:
    run = live("1:2", "ab", workers=2)
    run.fail("b")
    suspended(run, "a")
    suspended(run, "b", slots=slots)
    assert run.record.round.members[1] == Member("b", "b1", 2, "host-b", 7000)


def test_a_new_leader_learns_from_the_hello_which_workers_are_back() -> None:
    members = (Member("a", "a1", 2, "host-a", 7000), Member("b", "b1", 1, "host-b", 7000, slots=(0,)))
    leader = Leader("a", "a1", "10.0.0.1", 1)
    run = Run("1:2", record=ControlRecord("run", "digest", 2, leader, round=Round(4, members)).renewed())
    fields = {"workers": 2, "holding": 4, "ready": True, "live": True, "seen_term": 1, "seen_round": 4}
    run.hello("a", **fields)
    run.hello("b", slots=(0,), **fields)
    assert run.told(RoundDraining) == []
    run.hello("b", slots=(0, 1), **fields)
    assert run.told(RoundDraining)[-1].cause == "resize: node b has workers back"


def test_a_node_without_any_worker_is_left_out_if_enough_remain() -> None:
    run = live("1:2", "ab")
    run.fail("b")
    suspended(run, "b", importing=True)
    suspended(run, "a")
    assert (run.number, run.members) == (2, "a")
    trains(run, "a")
    run.advance(5)
    assert run.told(RoundDraining) == []
    assert run.orders("b", m.StartAhead) == [], "it is starting already"
    run.report("b", m.Imported())
    run.report("b", m.Imported())  # the answer to the order
    assert run.orders("a", m.DrainRound)
    suspended(run, "a", drained=9)
    assert (run.number, run.members) == (3, "ab")


def test_a_node_without_any_worker_is_taken_at_once_if_too_few_remain() -> None:
    run = live("2", "ab")
    run.fail("b")
    suspended(run, "b", importing=True)
    suspended(run, "a")
    assert (run.number, run.members) == (2, "ab")


# Broken connections.


def test_broken_connections_alone_are_free_while_training_advances() -> None:
    run = live("1:2", "ab", resize_delay=1000.0)
    for step in (1, 2, 3, 4, 5, 6):
        run.report("a", m.NodeReady(run.number, step=step, live=True))
        run.fail("a", symptom="broken connection", alive=True)
        run.advance(1)
        assert run.told(RestartCharged) == []
        suspended(run, "a", "b")
        assert (run.number, run.record.restarts) == (step + 1, 0)
    for _ in range(6):
        run.report("a", m.NodeReady(run.number, step=6, live=True))
        run.fail("a", symptom="broken connection", alive=True)
        suspended(run, "a", "b")
    assert run.told(RestartCharged)[0].idle == 6, "a round without a step is not free without end"


def test_a_crash_that_is_reported_after_the_connections_that_it_broke_is_charged() -> None:
    run = live("1:2", "ab")
    run.report("a", m.NodeReady(1, step=5, live=True))
    run.fail("a", symptom="broken connection", alive=True)
    suspended(run, "a")
    run.advance(1)
    run.fail("b", rank=1)
    suspended(run, "b")
    (charged,) = run.told(RestartCharged)
    assert (charged.kind, run.record.restarts, run.number) == ("crash", 1, 2)


# Starting ahead.


def test_a_newcomer_starts_ahead_and_the_round_is_drained_once_it_is_there() -> None:
    run = live("1:2", "a")
    run.hello("b")
    assert run.orders("b", m.StartAhead) == [m.StartAhead(1, 1)]
    assert run.told(NodeJoined)[-1].next == "training is resized once workers have started there"
    run.advance(20)
    assert run.told(RoundDraining) == []
    run.report("b", m.Imported())
    assert run.told(RoundDraining)[-1].cause == "resize: node b waits to join"
    suspended(run, "a", drained=7)
    assert (run.number, run.members, run.told(RoundBroken)) == (2, "ab", [])
    trains(run, "ab")
    run.advance(5)
    assert len(run.orders("b", m.StartAhead)) == 1


def test_nodes_do_not_start_ahead_unless_all_workers_are_live() -> None:
    run = running("1:3", "ab", resize_delay=1000.0)
    trains(run, "a")
    run.report("b", m.NodeReady(1))
    run.hello("c")
    assert run.orders("c", m.StartAhead) == []
    trains(run, "b")
    assert run.orders("c", m.StartAhead) == [m.StartAhead(1, 1)]


def test_a_node_that_still_imports_starts_ahead_afterwards() -> None:
    run = live("1:2", "a")
    run.hello("b", importing=True)
    assert run.orders("b", m.StartAhead) == []
    run.report("b", m.Imported())
    assert len(run.orders("b", m.StartAhead)) == 1
    run.advance(5)
    assert run.told(RoundDraining) == []


def test_of_two_newcomers_each_joins_when_it_is_there() -> None:
    run = live("1:3", "a")
    run.hello("b", "c")
    run.advance(2)
    run.report("c", m.Imported())
    suspended(run, "a", drained=1)
    assert run.members == "ac"
    trains(run, "ac")
    run.report("b", m.Imported())
    suspended(run, "a", "c", drained=2)
    assert (run.members, run.told(RoundBroken)) == ("acb", [])
    assert [len(run.orders(node_id, m.StartAhead)) for node_id in "abc"] == [0, 1, 1]


def test_a_newcomer_that_dies_as_it_starts_changes_nothing() -> None:
    run = live("1:2", "a")
    run.hello("b")
    run.advance(2)
    run.close("b")
    run.advance(5)
    assert (run.number, run.told(RoundDraining), run.told(RoundBroken)) == (1, [], [])


def test_a_newcomer_lost_during_the_drain_for_it_is_left_out() -> None:
    run = live("1:2", "a", resize_delay=0.0)
    run.hello("b")
    run.report("b", m.Imported())
    run.close("b")
    suspended(run, "a", drained=7)
    assert (run.number, run.members, run.record.restarts) == (2, "a", 0)


def test_a_newcomer_that_is_needed_is_taken_at_once() -> None:
    run = live("2:3", "ab")
    run.hello("c")
    assert run.orders("c", m.StartAhead)
    run.close("b")
    suspended(run, "a")
    assert (run.number, run.members) == (2, "ac")
    run.fail("a")
    suspended(run, "a", "c")
    run.hello("d")
    assert (run.number, run.members) == (3, "ac"), "c has had a place: it is not starting ahead any more"


def test_a_spare_starts_ahead_and_takes_a_lost_members_place() -> None:
    run = live("1:2", "ab")
    run.hello("c")
    assert run.orders("c", m.StartAhead)
    run.report("c", m.Imported())
    run.advance(5)
    assert run.told(RoundDraining) == []
    run.close("b")
    suspended(run, "a")
    assert (run.number, run.members) == (2, "ac")


def test_a_member_that_becomes_a_spare_starts_ahead_again() -> None:
    run = live("1:3", "ab", resize_delay=0.0)
    run.hello("c")
    run.report("c", m.Imported())
    suspended(run, "a", "b", drained=7)
    trains(run, "abc")
    run.resize(1, 2)
    suspended(run, "a", "b", "c", drained=9)
    assert run.members == "ab"
    run.advance(1)
    assert run.orders("c", m.StartAhead) == [m.StartAhead(1, 1), m.StartAhead(1, 3)]


def test_a_spare_that_is_still_starting_does_not_delay_the_others() -> None:
    run = live("1:2", "ab")
    run.hello("c")
    run.close("b")
    suspended(run, "a")
    assert (run.number, run.members) == (2, "a")
    trains(run, "a")
    run.report("c", m.Imported())
    run.advance(2)
    suspended(run, "a", drained=7)
    assert run.members == "ac"


def test_a_node_that_comes_between_two_rounds_does_not_delay_the_next_one() -> None:
    run = live("1:3", "ab")
    run.fail("b")
    run.hello("c")
    assert run.orders("c", m.StartAhead)
    suspended(run, "a", "b")
    assert (run.number, run.members) == (2, "ab")


def test_an_agent_that_comes_back_with_another_address_starts_ahead() -> None:
    run = live("1:2", "ab")
    run.hello("b", incarnation="b2", address="elsewhere")
    assert run.orders("b", m.Evicted)[-1].final
    assert run.orders("b", m.StartAhead)
    suspended(run, "a")
    assert (run.number, run.members) == (2, "a")
    trains(run, "a")
    run.report("b", m.Imported())
    run.advance(2)
    suspended(run, "a", drained=7)
    assert [member.address for member in run.record.round.members] == ["host-a", "elsewhere"]


def test_a_new_leader_forms_the_next_round_of_suspended_members_at_once() -> None:
    members = (Member("a", "a1", 1, "host-a", 7000), Member("b", "b1", 2, "host-b", 7000))
    leader = Leader("a", "a1", "10.0.0.1", 1)
    run = Run("1:2", record=ControlRecord("run", "digest", 2, leader, round=Round(4, members)).renewed())
    run.hello("a", seen_term=1, seen_round=4)
    assert run.number == 4
    run.hello("b", seen_term=1, seen_round=4, workers=2, slots=(1,))
    assert (run.number, run.members, run.record.restarts) == (5, "ab", 0)
    assert run.record.round.members[1].slots == (1,)


def test_a_live_round_that_is_still_meeting_is_not_broken_for_a_newcomer() -> None:
    run = live("1:3", "ab", resize_delay=0.0)
    run.hello("c")
    run.fail("b")
    suspended(run, "a", "b")
    run.report("c", m.Imported())
    run.advance(5)
    assert (run.number, len(run.told(RoundBroken))) == (2, 1)
    trains(run, "ab")
    assert run.orders("a", m.DrainRound)


def test_a_live_round_that_never_trains_is_broken_for_a_newcomer_in_the_end() -> None:
    run = live("1:3", "ab", resize_delay=0.0, join_timeout=20.0)
    run.fail("b")
    suspended(run, "a", "b")
    run.join("a", "b")
    run.hello("c")
    run.report("c", m.Imported())
    run.advance(21)
    assert run.told(RoundBroken)[-1].cause == "resize: node c waits to join"


def test_nodes_do_not_start_ahead_for_a_run_that_ends() -> None:
    run = live("1:3", "ab")
    run.stop_run()
    run.hello("c")
    suspended(run, "a", "b", drained=7)
    assert run.code == 143
    assert run.orders("c", m.StartAhead) == []
    assert run.orders("c", m.RunEnd)


def test_nodes_do_not_start_ahead_once_a_member_has_finished() -> None:
    run = live("1:3", "ab")
    run.done("a")
    run.hello("c")
    assert run.orders("c", m.StartAhead) == []


def test_a_new_leader_knows_who_starts_ahead_and_repeats_the_order() -> None:
    leader = Leader("a", "a1", "10.0.0.1", 1)
    formed = Round(4, (Member("a", "a1", 1, "host-a", 7000),))
    run = Run("1:3", record=ControlRecord("run", "digest", 2, leader, round=formed).renewed())
    run.hello("a", holding=4, ready=True, live=True, seen_term=1, seen_round=4)
    run.hello("b", importing=True, seen_term=1, seen_round=4)
    run.hello("c", seen_term=1, seen_round=4)
    run.advance(5)
    assert run.told(RoundDraining) == []
    assert [len(run.orders(node_id, m.StartAhead)) for node_id in "bc"] == [0, 1]
    run.report("b", m.Imported())
    assert run.orders("b", m.StartAhead) == [m.StartAhead(2, 4)]
    run.report("b", m.Imported())
    assert run.told(RoundDraining)[-1].cause == "resize: node b waits to join"


def test_the_order_is_repeated_on_a_new_link() -> None:
    run = live("1:2", "a")
    run.hello("b")
    run.hello("b")
    assert len(run.orders("b", m.StartAhead)) == 2
    run.advance(5)
    assert run.told(RoundDraining) == []
