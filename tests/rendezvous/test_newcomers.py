"""Newcomers that cannot do what the others do: they are left out, and the run goes on."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL
from typing import Any

import pytest
from leader_run import Run, failure, hello_of

from elastic_launch.config.settings import default_node_id, host_of
from elastic_launch.events.facts import ClosedBy, WorkerArguments
from elastic_launch.events.sentences import how_failed, sentence, why
from elastic_launch.events.types import AdmissionClosed, NewcomerLeftOut, RestartCharged, RoundDraining
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.exclusion import HOST_LONGEST, HOST_SECONDS, Refusals
from elastic_launch.rendezvous.leader.newcomers import difference
from elastic_launch.rendezvous.node.machine import NodeMachine
from elastic_launch.rendezvous.record import ControlRecord, Leader, Member, RefusedHost, Round
from elastic_launch.rendezvous.wire import messages as m

SYMPTOM: dict[str, Any] = {"symptom": "broken connection", "error": "RuntimeError: Connection closed by peer"}
STARTUP: dict[str, Any] = {
    "kind": "startup",
    "ran": 0.1,
    "error": "ModuleNotFoundError: No module named x",
}
CRASH: dict[str, Any] = {"ran": 1.0}


def train(run: Run, node_ids: str, steps: int = 5, *, live: bool = False) -> None:
    """The workers of the round, which are those of these nodes, train for some steps more."""
    begun = max(0, run.record.last_step or 0) + 100 * run.number
    for node_id in node_ids:
        run.report(node_id, m.NodeReady(run.number, step=begun, live=live))
    for node_id in node_ids:
        run.report(node_id, m.ProgressBeat(run.number, begun + steps))


def trains(nodes: str = "1:3", node_ids: str = "a", *, live: bool = False, **arguments: Any) -> Run:
    """A run whose first round trains."""
    run = Run(nodes, **arguments)
    run.hello(*node_ids)
    run.advance(2.1)
    assert (run.number, run.members) == (1, node_ids)
    train(run, node_ids, live=live)
    return run


def joins(run: Run, node_id: str, **fields: Any) -> None:
    """A node joins, and the round is drained for it."""
    number, members = run.number, run.members
    run.hello(node_id, **fields)
    run.advance(1.1)
    for member in members:
        run.report(member, m.Stopped(number, 7000, 5))
    assert (run.number, run.members) == (number + 1, members + node_id)


def fails(run: Run, node_id: str, **fields: Any) -> None:
    """A worker of a member fails, those of the others are stopped, and the next round forms if one does."""
    number, members = run.number, run.members
    run.fail(node_id, round=number, **fields)
    run.advance(0.3)
    for member in members:
        if member in run.links:
            run.report(member, m.Stopped(number, 7000))


def left_out(run: Run, node_id: str) -> m.LeftOut:
    (order,) = run.orders(node_id, m.LeftOut)
    return order


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (STARTUP, 90),
        ({"kind": "fatal", "ran": 0.1}, 93),
        (CRASH, 1),
        ({"kind": "crash", "exit_code": 7, "trained": 0, "ran": 500.0}, 7),
        ({"kind": "hang", "exit_code": -SIGKILL, "ran": 500.0}, 137),
        ({"kind": "out of memory", "exit_code": -SIGKILL}, 137),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) and "kind" in value else str(value)[:5],
)
def test_what_only_a_newcomer_cannot_do_costs_the_run_nothing(fields: dict[str, Any], code: int) -> None:
    run = trains()
    joins(run, "b")
    fails(run, "b", **fields)
    assert (run.number, run.members, run.record.restarts, run.record.vain) == (3, "a", 0, 0)
    assert not run.told(RestartCharged)
    order = left_out(run, "b")
    assert (order.code, order.failure.node_id if order.failure else "") == (code, "b")
    (event,) = run.told(NewcomerLeftOut)
    cause = how_failed(failure("b", **fields))
    assert sentence(event).startswith(f"node b is left out, at no cost to the run: rank 0 on node b: {cause}; ")
    assert (event.round, event.seconds) == (2, HOST_SECONDS)
    assert run.record.refused[0].host == "b"


def test_its_node_leaves_without_another_line() -> None:
    run = trains()
    joins(run, "b")
    fails(run, "b", **STARTUP)
    events = len(run.events)
    run.report("b", m.Leaving("left out"))
    run.close("b")
    assert len(run.events) == events


@pytest.mark.parametrize("kind", ["startup", "fatal"])
def test_what_fails_in_the_first_round_ends_the_run(kind: str) -> None:
    run = trains("2:2", "ab")
    fails(run, "b", kind=kind, ran=0.1)
    assert run.code in (90, 93)
    assert not run.told(NewcomerLeftOut)


def test_what_fails_on_a_node_that_has_trained_ends_the_run() -> None:
    run = trains()
    joins(run, "b")
    fails(run, "a", **STARTUP)
    assert run.code == 90


def test_a_failure_that_a_node_which_has_trained_shares_is_the_runs() -> None:
    run = trains()
    joins(run, "b")
    run.fail("b", round=2, **CRASH)
    fails(run, "a", **CRASH)
    assert run.record.restarts == 1
    assert not run.told(NewcomerLeftOut)


def test_a_newcomer_that_has_completed_a_step_is_none() -> None:
    run = trains()
    joins(run, "b")
    fails(run, "b", trained=1)
    assert run.record.restarts == 1
    run = trains()
    joins(run, "b")
    train(run, "ab")
    fails(run, "b", kind="hang", exit_code=-SIGKILL)
    assert run.record.restarts == 1


def test_a_run_whose_first_round_has_completed_no_step_has_no_newcomers() -> None:
    run = Run("1:2")
    run.hello("a")
    run.advance(2.1)
    run.report("a", m.NodeReady(1, step=0))
    joins(run, "b")
    fails(run, "b", **CRASH)
    assert run.record.restarts == 1


def test_a_script_that_reports_no_steps_trains_once_it_has_run_for_long() -> None:
    def plain() -> Run:
        run = Run("1:2")
        run.hello("a")
        run.advance(2.1)
        run.join("a")
        run.hello("b")
        run.advance(1.1)
        run.report("a", m.Stopped(1, 7000, trained=True))
        assert run.members == "ab"
        return run

    run = plain()
    fails(run, "b", **STARTUP)
    assert (run.code, run.members) == (None, "a")
    run = plain()
    fails(run, "b", ran=61.0)
    assert run.record.restarts == 1


def test_a_restarted_agent_of_a_node_is_a_newcomer() -> None:
    run = trains("1:3", "ab")
    run.close("b")
    run.report("a", m.Stopped(1, 7000))
    joins(run, "b", incarnation="b2")
    fails(run, "b", **STARTUP)
    assert (run.code, run.members) == (None, "a")


def restarted_host() -> Run:
    """A c10d run whose agent at the endpoint, node a, was started again; node b has trained under the one before."""
    run = Run("1:2", hosted=True)
    run.hello("a")
    run.hello("b", trained=True, seen_run="before", seen_term=1, seen_round=5)
    run.advance(2.1)
    assert (run.number, run.members) == (6, "ab")
    run.join("a", "b")
    run.report("b", m.NodeReady(6, step=50))
    return run


def test_the_only_node_that_can_lead_is_never_left_out() -> None:
    """The run would end with it. So what it cannot do is charged like any other failure."""
    run = restarted_host()
    fails(run, "a", ran=5.0)
    assert not run.orders("a", m.LeftOut)
    assert (run.code, run.number, run.record.restarts) == (None, 7, 1)

    run = restarted_host()
    fails(run, "b", kind="fatal", alike=(0, 1), alive=True, symptom="x")
    assert not run.orders("a", m.LeftOut)
    assert run.code == 93

    run = restarted_host()
    run.done("a")
    fails(run, "b", **SYMPTOM)
    assert not run.orders("a", m.LeftOut)


def test_the_only_node_that_can_lead_is_not_left_out_ahead_of_a_place_either() -> None:
    for report in (m.Unfit(hello_failure("a")), m.Imported('{"seed": "2"}')):
        run = Run("1:2", hosted=True)
        run.hello("b", trained=True, seen_run="before", seen_term=1, seen_round=5)
        run.advance(2.1)
        run.report("b", m.NodeReady(6, step=50, arguments='{"seed": "1"}'))
        run.hello("a", importing=True)
        run.report("a", report)
        assert not run.orders("a", m.LeftOut)


# Which failure counts.


def test_the_symptom_of_the_others_is_not_charged_before_the_newcomer_has_reported() -> None:
    run = trains()
    joins(run, "b")
    run.fail("a", round=2, **SYMPTOM)
    run.report("a", m.Stopped(2, 7000))
    run.advance(3.0)
    assert not run.told(RestartCharged)
    run.fail("b", round=2, **STARTUP)
    run.report("b", m.Stopped(2, 7000))
    assert (run.number, run.members, run.record.restarts) == (3, "a", 0)
    assert left_out(run, "b").code == 90


def test_a_symptom_that_no_newcomer_explains_is_charged_once_it_has_stopped() -> None:
    run = trains()
    joins(run, "b")
    fails(run, "a", **SYMPTOM)
    assert (run.number, run.members, run.record.restarts) == (3, "ab", 1)


def test_a_final_failure_that_a_newcomer_reports_late_ends_no_run() -> None:
    run = trains("1:3")
    joins(run, "b")
    run.fail("b", round=2, **(CRASH | {"supposed": True}))
    run.report("a", m.Stopped(2, 7000))
    run.advance(0.5)
    run.report("b", replace(hello_failure("b"), kind="startup", ran=0.1, round=2))
    run.report("b", m.Stopped(2, 7000))
    run.advance(5.0)
    assert (run.code, run.members) == (None, "a")
    assert left_out(run, "b").code == 90


def hello_failure(node_id: str) -> Failure:
    return Failure(node_id, "crash", 1, 0, 42, 1, "ValueError: boom")


@pytest.mark.parametrize("reporter", ["a", "b", "c"])
def test_ranks_that_differ_are_the_newcomers_if_the_others_agree(reporter: str) -> None:
    run = trains("1:4", "ab")
    joins(run, "c")
    fails(run, reporter, kind="fatal", alike=(0, 0, 2), alive=reporter != "c", symptom="x" * (reporter != "c"))
    assert (run.number, run.members, run.record.restarts) == (3, "ab", 0)
    assert left_out(run, "c").code == 93


def test_ranks_of_nodes_that_have_trained_and_differ_end_the_run() -> None:
    run = trains("1:4", "ab")
    joins(run, "c")
    fails(run, "c", kind="fatal", alike=(0, 1, 1))
    assert run.code == 93


# How long a host is left out.


def test_a_host_that_comes_again_backs_off_and_others_do_not() -> None:
    run = trains()
    joins(run, "b")
    fails(run, "b", **STARTUP)
    run.close("b")
    train(run, "a")
    run.hello("b", incarnation="b2")
    (notice,) = run.orders("b", m.UserMessage)[-1:]
    assert notice.text.startswith(
        "nodes of this host could not do what the others do: the run leaves them out for 10 s"
    )
    run.advance(HOST_SECONDS - 0.5)
    assert run.number == 3
    assert len(run.told(RoundDraining)) == 1
    run.hello("c")
    run.advance(1.1)
    assert run.told(RoundDraining)[-1].cause.startswith("resize: node b, c waits to join")
    for node_id in "a":
        run.report(node_id, m.Stopped(3, 7000, 9))
    fails(run, "b", **STARTUP)
    assert run.told(NewcomerLeftOut)[-1].seconds == 2 * HOST_SECONDS
    assert "b" not in run.members


def test_a_node_that_has_trained_on_the_same_host_is_not_left_out() -> None:
    run = Run("1:3")
    run.hello("a", host="one")
    run.advance(2.1)
    train(run, "a")
    joins(run, "b", host="one")
    fails(run, "b", **STARTUP)
    assert (run.number, run.members) == (3, "a")


def test_a_host_in_its_time_takes_no_part_even_if_nodes_are_lacking() -> None:
    """Else it could break rounds without end, at no cost."""
    run = trains("2:3", "ab")
    run.close("b")
    run.report("a", m.Stopped(1, 7000))
    run.hello("c")
    assert run.members == "ac"
    fails(run, "c", **STARTUP)
    run.close("c")
    run.hello("c", incarnation="c2")
    run.advance(HOST_SECONDS - 1.0)
    assert run.number == 2
    run.advance(2.0)
    assert (run.number, run.members) == (3, "ac")


def test_a_killed_newcomer_stays_and_comes_back_after_its_time() -> None:
    run = trains()
    joins(run, "b")
    fails(run, "b", exit_code=-SIGKILL, error="", ran=1.0)
    assert (run.number, run.members, run.record.restarts) == (3, "a", 0)
    assert not run.orders("b", m.LeftOut)
    train(run, "a")
    run.advance(HOST_SECONDS + 0.5)
    run.report("a", m.Stopped(3, 7000, 9))
    assert run.members == "ab"


def test_each_time_is_twice_as_long_and_a_step_ends_it() -> None:
    refusals = Refusals()
    times = [refusals.refuse("b", None, 0.0) for _ in range(12)]
    assert times[:3] == [HOST_SECONDS, 2 * HOST_SECONDS, 4 * HOST_SECONDS]
    assert times[-1] == HOST_LONGEST
    assert not refusals.closed, "other arguments say nothing about a restart"
    assert refusals.bars("b", HOST_LONGEST - 1)
    refusals.put_off(5.0)
    assert refusals.bars("b", HOST_LONGEST + 4)
    assert not refusals.bars("a", 0.0)
    refusals.trains("b")
    assert not refusals.bars("b", 0.0)
    assert refusals.refuse("b", None, 0.0) == HOST_SECONDS


def test_a_host_has_a_name_across_starts_of_its_agent() -> None:
    assert host_of(default_node_id()) == host_of(default_node_id()) != default_node_id()
    assert host_of("worker-0123ab") == "worker-0123ab"


# When no newcomers are admitted.


@pytest.mark.parametrize("exited", [True, False], ids=["both exited", "one was stopped"])
def test_the_same_failure_of_two_hosts_stops_admission_with_a_line(exited: bool) -> None:
    run = trains("1:4")
    for node_id, number, stopped in (("b", 1, False), ("c", 27, not exited)):
        joins(run, node_id)
        fails(run, node_id, ran=1.0, error=f"KeyError: 'rank {number}'", stopped=stopped)
        run.close(node_id)
        train(run, "a")
    (closed,) = run.told(AdmissionClosed)
    assert sentence(closed).startswith(
        "no further nodes take part, as long as there are enough: a worker has failed in the"
    )
    assert (run.record.closed_by, closed.cause) == (ClosedBy("b"), why(ClosedBy("b")))
    run.hello("d")
    assert run.orders("d", m.UserMessage)[-1].text == sentence(closed)
    run.advance(60.0)
    assert (run.number, run.members) == (5, "a")


def test_other_failures_of_two_hosts_do_not() -> None:
    run = trains("1:4")
    for node_id, message in (("b", "KeyError: 'x'"), ("c", "KeyError: 'y'")):
        joins(run, node_id)
        fails(run, node_id, ran=1.0, error=message)
        train(run, "a")
    assert not run.told(AdmissionClosed)


def test_neither_do_workers_that_are_killed_from_outside() -> None:
    run = trains("1:4")
    for node_id in "bc":
        joins(run, node_id)
        fails(run, node_id, exit_code=-SIGKILL, error="", ran=1.0)
        train(run, "a")
    assert len(run.told(NewcomerLeftOut)) == 2
    assert not run.told(AdmissionClosed)


def test_a_failure_to_restore_stops_admission_at_once_until_a_newcomer_trains() -> None:
    run = trains("1:4")
    joins(run, "b")
    fails(run, "b", kind="fatal", ran=1.0, restoring=True)
    assert run.record.closed_by == ClosedBy()
    run.close("b")
    train(run, "a")
    run.hello("c")
    run.close("a")  # a round lacks nodes
    assert run.members == "c"
    train(run, "c")
    run.hello("d")
    run.advance(1.1)
    assert run.told(RoundDraining)[-1].cause == "resize: node d waits to join"


# Before a newcomer has a place.


def test_a_newcomer_that_fails_ahead_of_a_place_does_not_disturb_the_round() -> None:
    run = trains(live=True)
    run.hello("b")
    run.advance(0.1)
    assert run.orders("b", m.StartAhead)
    found = Failure("b", "startup", None, 0, 42, 1, "ModuleNotFoundError: No module named x")
    run.report("b", m.Unfit(found))
    run.advance(5.0)
    assert run.number == 1
    assert not run.told(RoundDraining)
    order = left_out(run, "b")
    assert (order.code, order.failure) == (90, found)
    assert order.cause.startswith("local rank 0 on node b, started ahead of a round: exit code 1: ModuleNotFound")


def test_without_a_node_that_has_trained_its_place_decides() -> None:
    run = Run("1:2")
    run.hello("a")
    run.advance(2.1)
    run.report("a", m.NodeReady(1, step=0, live=True))
    run.hello("b")
    run.report("b", m.Unfit(Failure("b", "startup", 0, 0, 42, 1, "ModuleNotFoundError")))
    run.advance(1.1)
    assert run.told(RoundDraining)


def test_a_newcomer_with_other_arguments_is_left_out_before_the_round_drains() -> None:
    run = trains(live=True)
    run.report("a", m.NodeReady(1, step=100, live=True, arguments='{"seed": "7"}'))
    run.hello("b", "c")
    run.advance(0.1)
    run.report("b", m.Imported('{"seed": "8"}'))
    order = left_out(run, "b")
    assert (order.code, order.cause) == (
        93,
        "node b has other arguments than the run: it has seed 8, the run has seed 7",
    )
    run.report("c", m.Imported('{"seed": "7"}'))
    run.advance(2.0)
    assert run.told(RoundDraining)[-1].cause == "resize: node c waits to join"


def test_arguments_that_are_not_known_or_not_valid() -> None:
    assert [difference("n", *of) for of in (("", "x"), ("x", ""), ("x", "x"))] == [None] * 3
    assert difference("n", "[1]", '{"a": 1}') == difference("n", "a", "b") == WorkerArguments("n")
    assert why(WorkerArguments("n")).endswith(": its script has other arguments than the run's nodes")
    found = difference("n", '{"a": 1}', '{"a": 1, "b": 2}')
    assert found is not None
    assert why(found).endswith(": it has b none, the run has b 2")


# What another leader knows.


def test_another_leader_knows_who_has_trained_and_who_is_left_out() -> None:
    members = tuple(Member(node_id, f"{node_id}1", 1, f"host-{node_id}", 7000) for node_id in "ab")
    record = ControlRecord("run", "digest", 5, Leader("z", "z1", "10.0.0.9", 1), Round(4, members), best=9)
    record = replace(record, refused=(RefusedHost("c", 2, 30.0, "f"),)).renewed()
    run = Run("1:3", record=record)
    held: dict[str, Any] = {"holding": 4, "seen_term": 4, "seen_round": 4}
    run.hello("a", trained=True, **held)
    run.hello("b", **held)
    run.hello("c")
    fails(run, "b", **STARTUP)
    assert (run.number, run.members, run.code) == (5, "a", None)
    assert [(x.host, x.times) for x in run.record.refused] == [("c", 2), ("b", 1)]
    train(run, "a")
    run.advance(25.0)
    assert run.members == "a"
    run.advance(6.0)
    assert "node c waits to join" in run.told(RoundDraining)[-1].cause


def test_a_node_says_whether_it_has_trained_before_the_round_that_it_holds() -> None:
    node = NodeMachine()
    node.begin(hello_of("a"))
    form = m.Form(1, Round(1, (Member("a", "a1", 1, "host", 7000),)), 0, "first")
    node.obey(form, 0.0)
    node.say(m.NodeReady(1, step=3), 1.0)
    node.beats(m.ProgressBeat(1, 4))
    node.greet(2.0)
    assert not node.hello.trained
    node.say(m.Stopped(1, 7000), 3.0)
    assert [report.trained for report in node.take() if isinstance(report, m.Stopped)] == [True]
    assert node.hello.trained
    node.obey(replace(form, round=replace(form.round, number=2)), 4.0)
    node.say(m.Stopped(2, 7000), 5.0)
    assert node.hello.trained, "in an earlier round"


@pytest.mark.parametrize(("seconds", "trained"), [(9.0, False), (10.0, True)])
def test_a_round_without_reports_of_steps_counts_if_it_lasts(seconds: float, trained: bool) -> None:
    node = NodeMachine()
    node.begin(hello_of("a"))
    node.obey(m.Form(1, Round(1, (Member("a", "a1", 1, "host", 7000),)), 0, "first"), 0.0)
    node.say(m.Stopped(1, 7000), seconds)
    assert node.hello.trained is trained


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_newcomer_that_ends_with_0_before_its_first_step_costs_the_run_nothing(first: str) -> None:
    """Its worker is done, and those of the others lose their connection to it."""
    run = trains(node_ids="a" if first == "a" else "ac")
    joins(run, "b")
    number, members = run.number, run.members
    run.report("b", m.Done(number))
    run.fail("a", round=number, **SYMPTOM)
    run.advance(0.3)
    for member in members:
        run.report(member, m.Stopped(number, 7000))
    run.advance(30.0)
    assert run.code is None
    assert (run.number, run.members, run.record.restarts) == (number + 1, members.replace("b", ""), 0)
    assert not run.told(RestartCharged)
    order = left_out(run, "b")
    assert order.code == 93
    assert "ended with exit code 0 before their first step" in order.cause


def test_a_node_that_has_trained_may_end_with_0_before_the_others() -> None:
    run = trains("2:3", "ab")
    run.report("b", m.Done(1))
    run.fail("a", round=1, **SYMPTOM)
    run.advance(0.3)
    for member in "ab":
        run.report(member, m.Stopped(1, 7000))
    assert not run.told(NewcomerLeftOut)
