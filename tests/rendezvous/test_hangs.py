"""Which workers of a round that stands still hang, by what their nodes report, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from leader_run import Run, running

from elastic_launch.events.sentences import divided, how_failed, occupation, why
from elastic_launch.events.types import CauseFound, HangFound, RestartCharged, RoundBroken, RoundDraining
from elastic_launch.failure import Doing, StallPlace, Suspect
from elastic_launch.rendezvous.leader.hangs import ALIKE, Verdict, judge_stalled
from elastic_launch.rendezvous.leader.rounds import MOST_SECONDS
from elastic_launch.rendezvous.record import ControlRecord, Leader, Member, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.messages import Collective, Stalled, StalledWorker
from elastic_launch.shared_progress import FIRST_STEPS, Activity

STEP_7 = Doing(Activity.STEP, 6)

PREPARES = object()


def judged(
    *workers: tuple[Any, ...], nodes: int = 1, seconds: float = 12.0, early: bool = False, before: Collection[str] = ()
) -> Verdict | None:
    """The verdict on a round's workers, on so many nodes.

    Args:
        workers: by rank, as (state, frame, moves, PREPARES or collectives...).
        early: whether those of the last node are in a first step.
    """
    by_node: dict[str, list[StalledWorker]] = {"abcdefgh"[node]: [] for node in range(nodes)}
    each = len(workers) // nodes
    for rank, (state, frame, *more) in enumerate(workers):
        moves, collectives = True in more, tuple(x for x in more if isinstance(x, Collective))
        where = rank, rank % each, 1000 + rank
        found = StalledWorker(*where, state, moves, frame, ("x",), "logs", collectives, PREPARES in more)
        by_node["abcdefgh"[rank // each]].append(found)
    reports = {
        node: Stalled(3, seconds, STEP_7, f"host-{node}", tuple(those), early=early and node == [*by_node][-1])
        for node, those in by_node.items()
    }
    return judge_stalled(3, reports, 99.0, before=before)


def ranks(verdict: Verdict | None) -> list[int]:
    assert verdict is not None
    return [failure.rank for failure in verdict.failures]


def told(verdict: Verdict) -> str:
    return "; ".join(map(divided, verdict.collectives))


EXCHANGE = ("exchange", "train.py:9 in main")


@pytest.mark.parametrize(
    ("doing", "text"),
    [
        (Doing(), "its script"),
        (Doing(ends=True), "the end of its script"),
        (Doing(Activity.FORMING), "the forming of the round"),
        (Doing(Activity.RESTORE), "the restoring of its state"),
        (Doing(Activity.CHECKPOINT, 3), "the checkpoint after step 3"),
        (Doing(Activity.EVALUATION, 3), "the evaluation after step 3"),
        (Doing(Activity.PAUSE, 3, "upload"), "the announced upload after step 3"),
        (Doing(Activity.PAUSE, 3), "the announced pause after step 3"),
        *((Doing(x, 3), "step 4") for x in (Activity.STEP, *FIRST_STEPS)),
    ],
)
def test_what_a_worker_does_is_told_in_a_few_words(doing: Doing, text: str) -> None:
    assert occupation(doing) == text


def test_the_rank_that_is_not_in_an_exchange_hangs() -> None:
    verdict = judged(EXCHANGE, ("code", "train.py:41 in forward"), EXCHANGE, EXCHANGE, nodes=2)
    assert ranks(verdict) == [1]
    assert verdict is not None
    (failure,) = verdict.failures
    assert why(verdict.cause) == f"rank 1 on node a: {how_failed(failure)}"
    assert how_failed(failure) == "hangs in step 7 on host host-a, at train.py:41 in forward; no progress for 12 s"
    assert (failure.kind, failure.exit_code, failure.local_rank, failure.pid) == ("hang", -9, 1, 1001)
    assert (failure.round, failure.ran, failure.log, failure.detail) == (3, 99.0, "logs", ("x",))
    event = verdict.event(3)
    assert (event.ranks, event.nodes, event.hosts) == ((1,), ("a",), ("host-a",))
    assert event.places == (StallPlace("code", "train.py:41 in forward"),)


def test_whether_the_others_move_in_their_exchange_does_not_matter() -> None:
    """With NCCL they spin."""
    assert ranks(judged((*EXCHANGE, True), ("loader", "data.py:5 in __getitem__"), (*EXCHANGE, True))) == [1]


def test_a_worker_that_does_something_outside_of_an_exchange_excuses_all() -> None:
    assert judged(EXCHANGE, ("code", "train.py:41 in evaluate", True)) is None
    assert judged(EXCHANGE, ("code", "a"), ("loader", "b", True)) is None


def test_a_stopped_worker_hangs_whatever_the_others_do() -> None:
    verdict = judged(("code", "train.py:3 in main", True), ("stopped", ""), nodes=2)
    assert ranks(verdict) == [1]
    assert verdict is not None
    assert "on host host-b, stopped (SIGSTOP); " in why(verdict.cause)


def test_all_in_the_same_exchange_hang_and_no_rank_is_named() -> None:
    verdict = judged(EXCHANGE, EXCHANGE, EXCHANGE)
    assert ranks(verdict) == []
    assert verdict is not None
    assert why(verdict.cause) == (
        "the round hangs in step 7, and no rank stands out: ranks 0, 1, 2 waiting for other ranks at train.py:9 in main"
    )


def test_an_exchange_in_which_something_moves_may_just_be_slow() -> None:
    assert judged(EXCHANGE, (*EXCHANGE, True), EXCHANGE) is None


def test_a_rank_that_waits_elsewhere_than_most_has_left_an_exchange_out() -> None:
    verdict = judged(EXCHANGE, ("exchange", "train.py:12 in main"), EXCHANGE)
    assert ranks(verdict) == [1]
    assert verdict is not None
    assert "waiting for other ranks at train.py:12 in main, ranks 0, 2 waiting for other ranks at train" in why(
        verdict.cause
    )


def test_of_two_ranks_that_wait_in_different_exchanges_none_is_named() -> None:
    verdict = judged(EXCHANGE, ("exchange", "train.py:12 in main"))
    assert ranks(verdict) == []
    assert verdict is not None
    assert "rank 0 waiting for other ranks at train.py:9 in main; rank 1 " in why(verdict.cause)


def begun(number: int, what: str = "all_reduce of Float[9]", *, group: str = "0", waits: bool = True) -> Collective:
    return Collective(group, "default_pg" if group == "0" else "", number, what, waits)


def test_the_rank_that_most_wait_for_in_a_collective_hangs() -> None:
    """All wait at the same place, such as in a backward pass."""
    behind = (*EXCHANGE, begun(2, "broadcast of Long[1]", group="7"), begun(4, waits=False))
    verdict = judged((*EXCHANGE, begun(5)), behind, (*EXCHANGE, begun(5)))
    assert ranks(verdict) == [1]
    assert verdict is not None
    assert told(verdict) == (
        "ranks 0, 2 wait in all_reduce of Float[9], number 5 of group default_pg, rank 1 has not begun it"
    )
    assert verdict.event(3).collectives == verdict.collectives
    assert (
        "waiting for other ranks in broadcast of Long[1] at train.py:9 in main, "
        "ranks 0, 2 waiting for other ranks in all_reduce of Float[9] at train.py:9 in main;"
    ) in why(verdict.cause)


def test_a_rank_that_began_another_collective_than_most_hangs() -> None:
    odd = (*EXCHANGE, begun(5, "all_reduce of Float[8]"))
    verdict = judged(odd, (*EXCHANGE, begun(5)), (*EXCHANGE, begun(5)))
    assert ranks(verdict) == [0]
    assert verdict is not None
    assert told(verdict) == (
        "ranks 1, 2 wait in all_reduce of Float[9], number 5 of group default_pg, "
        "rank 0 began all_reduce of Float[8] instead"
    )


def test_of_two_ranks_that_wait_for_each_other_both_collectives_are_named() -> None:
    one = (*EXCHANGE, begun(5), begun(2, group="7", waits=False))
    other = (*EXCHANGE, begun(3, group="7"), begun(4, waits=False))
    verdict = judged(one, other)
    assert ranks(verdict) == []
    assert verdict is not None
    assert why(verdict.cause).endswith(
        "; rank 0 waits in all_reduce of Float[9], number 5 of group default_pg, rank 1 has not begun it; "
        "rank 1 waits in all_reduce of Float[9], number 3 of group 7, rank 0 has not begun it"
    )


def test_a_rank_that_has_finished_a_collective_or_has_gone_on_is_not_waited_for() -> None:
    source = (*EXCHANGE, begun(5, waits=False))
    ahead = (*EXCHANGE, begun(6, waits=False))
    verdict = judged(source, ahead, (*EXCHANGE, begun(5)))
    assert ranks(verdict) == []
    assert verdict is not None
    assert verdict.collectives == ()


@pytest.mark.parametrize("odd", ["scatter of Float[2, 3]", "scatter"])
def test_sizes_that_may_differ_between_ranks_are_not_another_collective(odd: str) -> None:
    """The source of a scatter has inputs, and no other rank; those of all_to_all may have any size."""
    some = (*EXCHANGE, begun(7, "scatter of Float[9]"))
    verdict = judged((*EXCHANGE, begun(7, odd)), some, some)
    assert ranks(verdict) == []
    assert verdict is not None
    assert verdict.collectives == ()
    behind = judged((*EXCHANGE, begun(7, odd)), some, (*EXCHANGE, begun(6, waits=False)))
    assert ranks(behind) == [2]


def test_each_backend_of_a_group_counts_its_own_collectives() -> None:
    gloo = replace(begun(3), backend="gloo")
    nccl = replace(begun(90, waits=False), backend="nccl")
    verdict = judged((*EXCHANGE, gloo, nccl), (*EXCHANGE, gloo, nccl), (*EXCHANGE, replace(gloo, number=2), nccl))
    assert ranks(verdict) == [2]


def test_what_a_rank_that_hangs_in_its_code_keeps_others_from_is_recorded() -> None:
    verdict = judged((*EXCHANGE, begun(5)), ("code", "train.py:41 in forward", begun(4, waits=False)))
    assert ranks(verdict) == [1]
    assert verdict is not None
    assert "rank 1 has not begun it" in told(verdict)


def test_all_at_the_same_place_of_their_code_may_wait_for_something_there() -> None:
    place = ("code", "train.py:20 in next_shard")
    assert judged(place, place) is None
    assert judged(place) is None
    assert ranks(judged(place, place, seconds=ALIKE)) == []


def test_without_stacks_no_rank_is_named() -> None:
    assert ranks(judged(("unknown", ""), ("unknown", ""))) == []


def test_the_one_whose_stack_is_unknown_stands_out_among_those_that_wait() -> None:
    assert ranks(judged(EXCHANGE, EXCHANGE, ("unknown", ""))) == [2]


def test_in_a_first_step_ranks_that_wait_in_different_exchanges_hang() -> None:
    """By the flight recorder, or by their places if there is none."""
    for nodes in (1, 3):
        waits = (*EXCHANGE, begun(5))
        assert ranks(judged(waits, (*EXCHANGE, begun(4, waits=False)), waits, nodes=nodes, early=True)) == [1]
        assert ranks(judged(EXCHANGE, EXCHANGE, ("exchange", "train.py:12 in main"), nodes=nodes, early=True)) == [2]
    assert ranks(judged(EXCHANGE, ("exchange", "train.py:12 in main"), early=True)) == [], "none stands out"


def test_in_a_first_step_ranks_in_the_same_exchange_may_be_slow() -> None:
    assert judged(EXCHANGE, EXCHANGE, early=True) is None


def test_in_a_first_step_a_rank_that_does_something_else_may_prepare_it() -> None:
    assert judged(EXCHANGE, ("code", "train.py:41 in forward"), EXCHANGE, early=True) is None


@pytest.mark.parametrize(
    "what", [("exchange", "x", True), ("exchange", "x", PREPARES), ("loader", "x"), ("unknown", "")]
)
def test_in_a_first_step_a_rank_that_prepares_or_moves_excuses_all(what: tuple[Any, ...]) -> None:
    waits, left_out = (*EXCHANGE, begun(5)), (*EXCHANGE, begun(4, waits=False))
    assert judged(waits, left_out, waits, what, early=True) is None
    assert judged(waits, left_out, waits, what, early=True, before={StallPlace("exchange", "x")}) is None


def test_a_rank_that_hangs_where_one_has_hung_before_hangs_in_a_first_step_too() -> None:
    at = ("code", "train.py:41 in forward")
    first = judged(EXCHANGE, at, EXCHANGE)
    assert first is not None
    assert ranks(judged(EXCHANGE, EXCHANGE, at, nodes=3, early=True, before=first.stood)) == [2]
    assert judged(EXCHANGE, ("code", "train.py:42 in forward"), EXCHANGE, early=True, before=first.stood) is None
    assert judged(EXCHANGE, (*at, PREPARES), EXCHANGE, early=True, before=first.stood) is None
    assert judged(EXCHANGE, (*at, True), EXCHANGE, early=True, before=first.stood) is None
    assert judged((*EXCHANGE, True), at, EXCHANGE, early=True, before=first.stood) is None
    none_stands_out = judged(EXCHANGE, EXCHANGE)
    assert none_stands_out is not None
    assert ranks(judged(EXCHANGE, EXCHANGE, early=True, before=none_stands_out.stood)) == []


def test_a_stopped_worker_hangs_in_a_first_step_too() -> None:
    assert ranks(judged(("code", "import", True, PREPARES), ("stopped", ""), early=True)) == [1]


def test_no_worker_is_no_verdict() -> None:
    assert judge_stalled(3, {"a": Stalled(3, 12.0)}, 1.0) is None


def stalls(
    run: Run,
    node: str,
    state: str = "exchange",
    *,
    seconds: float = 12.0,
    early: bool = False,
    frame: str = "train.py:9",
) -> None:
    """A node of one worker reports that it is late."""
    worker = StalledWorker("ab".index(node), 0, 7, state, frame=f"{frame} in main")
    run.report(node, Stalled(run.number, seconds, STEP_7, f"host-{node}", (worker,) if seconds else (), early=early))


def test_a_rank_that_all_others_have_left_behind_hangs_wherever_it_is() -> None:
    for state in ("code", "exchange", "unknown"):
        report = Stalled(3, 9.0, Doing(), "h", (StalledWorker(1, 0, 7, state, frame="x"),), asked=True)
        assert ranks(judge_stalled(3, {"a": report}, 99.0, finished=True)) == [1]
        assert ranks(judge_stalled(3, {"a": report}, 99.0)) == []
    busy = replace(report, workers=(StalledWorker(1, 0, 7, "code", moves=True),))
    assert judge_stalled(3, {"a": busy}, 99.0, finished=True) is None


def test_nodes_that_have_finished_are_not_waited_for_if_the_user_has_set_the_time() -> None:
    run = running("2", "ab")
    run.done("a")
    stalls(run, "b", "code")
    assert run.told(RoundBroken) == [], "it may save its last checkpoint"
    worker = StalledWorker(1, 0, 7, "code", frame="threading.py:1 in _shutdown")
    run.report("b", Stalled(run.number, 12.0, Doing(), "host-b", (worker,), asked=True))
    (order,) = run.orders("b", m.Break)
    assert (order.kind, order.hung) == ("hang", (1,))


def judged_once_both_are_late(run: Run) -> m.Break:
    stalls(run, "a")
    assert not run.orders("a", m.Break), "the other may still evaluate"
    stalls(run, "b", "code")
    (order,), (other,) = run.orders("a", m.Break), run.orders("b", m.Break)
    assert (order.kind, order.hung) == ("hang", (1,))
    assert order == other
    return order


def test_a_round_is_judged_once_all_its_nodes_are_late() -> None:
    run = running("2", "ab")
    stalls(run, "a")
    order = judged_once_both_are_late(run)
    assert order.cause.startswith("rank 1 on node b: hangs in step 7 on host host-b, at train.py:9 in main")
    (found,) = run.told(HangFound)
    assert (found.cause, found.ranks, found.nodes) == (order.cause, (1,), ("b",))
    run.fail("a", error="RuntimeError: Connection closed by peer", symptom="broken connection", alive=True)
    run.stop("a", "b")
    assert [(event.kind, event.restarts) for event in run.told(RestartCharged)] == [("hang", 1)]
    assert run.told(CauseFound) == []
    assert run.number == 2
    stalls(run, "b", "code")
    assert run.number == 2, "the other's report was about the last round"


def test_a_stopped_worker_is_judged_without_the_reports_of_other_nodes() -> None:
    """Those of a plain script are not watched."""
    run = running("2", "ab")
    stalls(run, "b", "stopped")
    (order,) = run.orders("a", m.Break)
    assert (order.kind, order.hung) == ("hang", (1,))


def test_a_second_hang_at_the_same_place_is_judged_in_the_first_step() -> None:
    run = running("2", "ab")
    for number in (1, 2):
        stalls(run, "a")
        if number == 2:
            stalls(run, "b", "code", early=True, frame="train.py:12")
            assert len(run.told(RoundBroken)) == 1, "it may load something there"
        stalls(run, "b", "code", early=number == 2)
        assert len(run.told(HangFound)) == number
        run.stop("a", "b")


def test_a_node_that_advances_again_takes_its_report_back() -> None:
    run = running("2", "ab")
    stalls(run, "a")
    stalls(run, "a", seconds=0.0)
    stalls(run, "b", "code")
    assert run.told(RoundBroken) == []


def test_a_report_ends_with_the_link_that_it_came_by() -> None:
    """The node may have advanced since then; it reports again if not."""
    run = running("2", "ab")
    stalls(run, "a")
    member: dict[str, Any] = {"holding": run.number, "joined": True, "ready": True, "seen_round": run.number}
    run.hello("a", **member)
    stalls(run, "b", "code")
    assert run.told(RoundBroken) == []
    stalls(run, "a")
    assert [event.cause.split(":")[0] for event in run.told(RoundBroken)] == ["rank 1 on node b"]
    assert [event.suspects for event in run.told(RoundBroken)] == [(Suspect("b", 1),)]


def test_a_round_in_which_no_rank_stands_out_is_broken_and_charged() -> None:
    run = running("2", "ab", max_restarts=0)
    stalls(run, "a")
    stalls(run, "b")
    (order,) = run.orders("a", m.Break)
    assert (order.kind, order.hung) == ("hang", ())
    run.stop("a", "b")
    assert run.record.end is not None
    assert run.record.end.code == 91
    assert "no rank stands out" in run.record.end.cause


def test_a_run_whose_budget_is_spent_ends_with_the_hang_as_its_cause() -> None:
    run = running("2", "ab", max_restarts=0)
    stalls(run, "a")
    stalls(run, "b", "stopped")
    run.stop("a", "b")
    (end,) = run.orders("b", m.RunEnd)
    assert end.code == 137
    assert end.failure is not None
    assert (end.failure.rank, end.failure.kind, end.failure.host) == (1, "hang", "host-b")


def drainable(nodes: str, node_ids: str, **arguments: Any) -> Run:
    run = running(nodes, node_ids, **arguments)
    for node in node_ids:
        run.report(node, m.NodeReady(run.number))
    return run


def test_a_drain_with_a_limit_is_not_judged() -> None:
    run = drainable("2", "ab")
    run.stop_run(60.0)
    stalls(run, "a")
    stalls(run, "b", "stopped")
    assert run.orders("a", m.Break) == []


def test_neither_is_a_drain_that_a_node_limits_later() -> None:
    run = drainable("1:3", "ab")
    run.resize(1, 1)
    run.report("b", m.Leaving("SIGTERM", 30.0))
    stalls(run, "a")
    stalls(run, "b", "stopped")
    assert run.told(RoundBroken) == []
    run.advance(30.1)
    assert [event.kind for event in run.told(RoundBroken)] == ["membership"]


@pytest.mark.parametrize("how", ["a node joins", "resize", "a node is drained", "the run is drained"])
def test_a_drain_without_a_limit_is_judged_as_a_round_that_runs(how: str) -> None:
    run = drainable("1:3", "ab")
    match how:
        case "a node joins":
            run.hello("c")
            run.advance(1.1)
        case "resize":
            run.resize(1, 1)
        case "a node is drained":
            run.report("b", m.Leaving("elasticctl drain", MOST_SECONDS))
        case _:
            run.stop_run()
    assert [event.seconds for event in run.told(RoundDraining)] == [None]
    judged_once_both_are_late(run)
    assert [event.ranks for event in run.told(HangFound)] == [(1,)]
    run.stop("a", "b")
    if how == "the run is drained":
        assert run.code == 143
    else:
        assert (run.number, run.record.restarts) == (2, 1)


def test_a_stopped_worker_is_judged_in_such_a_drain_too() -> None:
    run = drainable("1:2", "a")
    run.hello("b")
    run.advance(1.1)
    stalls(run, "a", "stopped")
    (order,) = run.orders("a", m.Break)
    assert (order.kind, order.hung) == ("hang", (0,))


def test_nodes_that_have_stopped_in_a_drain_are_not_waited_for() -> None:
    run = drainable("2:3", "ab")
    run.resize(2, 2)
    run.hello("c")
    run.resize(2, 3)
    run.advance(1.1)
    assert run.told(RoundDraining)
    stalls(run, "b")
    run.report("a", m.Stopped(run.number, 7000, drained=5))
    assert run.told(RoundBroken) == [], "its report was of a time when the other may have kept it waiting"
    stalls(run, "b", "code")
    assert run.told(RoundBroken) == [], "a rank alone in its own code may wait for something there"
    stalls(run, "b")
    (order,) = run.orders("b", m.Break)
    assert (order.kind, order.hung) == ("hang", ())
    run.stop("b", number=1)
    assert (run.number, run.members) == (2, "abc")


def test_members_that_a_new_leader_does_not_know_yet_are_waited_for() -> None:
    members = tuple(Member(node_id, f"{node_id}1", 1, f"host-{node_id}", 7000) for node_id in "cab")
    record = ControlRecord("run", "digest", 5, Leader("z", "z1", "10.0.0.9", 1), Round(4, members)).renewed()
    run = Run("1:3", record=record)
    known: dict[str, Any] = {"holding": 4, "joined": True, "ready": True, "seen_term": 4, "seen_round": 4}
    run.hello("c", "a", **known)
    run.report("c", m.Stopped(4, 7000, drained=5))
    assert run.told(RoundDraining)
    stalls(run, "a")
    assert run.told(RoundBroken) == []
    run.hello("b", **known)
    stalls(run, "b")
    assert [event.kind for event in run.told(RoundBroken)] == ["hang"]
