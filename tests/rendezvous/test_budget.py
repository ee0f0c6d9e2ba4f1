"""What a broken round costs, which restarts are free and for how long, and which code ends the run."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from leader_run import Run
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic_launch.config.launch_config import Limits
from elastic_launch.events.facts import RestartsSpent
from elastic_launch.events.sentences import why
from elastic_launch.failure import Failure, Mistake
from elastic_launch.rendezvous.leader.phases import Broken
from elastic_launch.rendezvous.leader.restart_budget import FREE as MORE
from elastic_launch.rendezvous.leader.restart_budget import JITTER, LONG, LONGEST_DELAY, BudgetDecision, RestartBudget
from elastic_launch.rendezvous.leader.verdict import Kind
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.torch_handler import TorchrunHandler

FREE = MORE + 1
"""Of one node."""

CRASH = Failure("a", "crash", 0, 0, 42, 1, "ValueError: boom", ran=60.0)
SOON = replace(CRASH, ran=1.0)
PREEMPTED = replace(CRASH, kind="preemption", exit_code=-15, error="")


def budget_with(limits: Limits, **recorded: Any) -> RestartBudget:
    return RestartBudget(ControlRecord("run", "digest", 1, Leader("a", "a1", "host", 1), limits=limits, **recorded))


def rule(
    budget: RestartBudget,
    failure: Failure | None,
    imposed: Kind | None = None,
    nodes: int = 1,
    *,
    alone: bool = False,
    **known: object,
) -> BudgetDecision:
    broken = Broken(10.0, imposed, "the cause", [] if failure is None else [(10.0, failure)])
    broken = replace(broken, **{"lasted": 5.0, **known})  # type: ignore[arg-type]
    return budget.rule(broken, nodes, alone=alone)


def verdict(budget: RestartBudget, failure: Failure, ruling: BudgetDecision) -> tuple[int, str]:
    code, cause = budget.verdict(ruling, Broken(10.0, None, "the cause", [(10.0, failure)]))
    return code, why(cause)


def test_a_failure_costs_a_restart_until_they_are_spent() -> None:
    budget = budget_with(Limits(max_restarts=2))
    assert [rule(budget, CRASH).charged for _ in range(3)] == [True, True, False]
    assert budget.spent == 2
    ruling = rule(budget, CRASH)
    assert verdict(budget, CRASH, ruling) == (91, "all restarts spent (--max-restarts 2): the cause")


@pytest.mark.parametrize("kind", ["fatal", "startup"])
def test_what_a_restart_would_not_change_ends_the_run_at_once(kind: str) -> None:
    budget = budget_with(Limits(max_restarts=3))
    failure = replace(CRASH, kind=kind)
    code, cause = verdict(budget, failure, rule(budget, failure))
    assert code == {"fatal": 93, "startup": 90}[kind]
    assert cause.startswith("a restart would fail again (")
    assert cause.endswith(": the cause")
    assert budget.spent == 0


def test_without_restarts_a_script_that_cannot_run_ends_with_its_own_code() -> None:
    budget, failure = budget_with(Limits(max_restarts=0)), replace(CRASH, kind="startup")
    assert verdict(budget, failure, rule(budget, failure))[0] == 1
    fatal = replace(CRASH, kind="fatal", exit_code=93)
    assert verdict(budget, fatal, rule(budget, fatal))[0] == 93


NAN = replace(CRASH, repeats="The loss is nan in step 4, micro-batch 1.", trained=3)


def test_a_failure_that_a_restart_repeats_has_one() -> None:
    """The first may have been caused by a flipped bit; other events before the same step do not matter."""
    budget = budget_with(Limits(max_restarts=3))
    assert rule(budget, NAN, begun=0).charged
    assert rule(budget, CRASH, begun=2).charged
    again = replace(NAN, rank=1, trained=1)
    code, cause = verdict(budget, again, rule(budget, again, begun=2))
    assert (code, cause) == (
        93,
        "a restart would fail again (the same step has failed in the same way twice): the cause",
    )
    assert budget.spent == 2


@pytest.mark.parametrize(
    "between",
    [
        (NAN, Kind.NODE_LOSS, 0),
        (replace(NAN, repeats="The loss is inf"), None, 0),
        (replace(CRASH, trained=4), None, 0),
    ],
    ids=["node lost", "another failure", "step done"],
)
def test_a_failure_after_something_new_is_not_repeated(between: tuple[Failure, Kind | None, int]) -> None:
    budget = budget_with(Limits(max_restarts=9))
    failure, imposed, begun = between
    if imposed is None:
        rule(budget, NAN, begun=0)
    rule(budget, failure, imposed, begun=begun)
    assert rule(budget, NAN, begun=0).charged


MISTAKE = Mistake("KeyError", "train.py:4 in main")
BAD = replace(SOON, mistake=MISTAKE)


@pytest.mark.parametrize("known", [{}, {"begun": 0}, {"begun": 500, "reached": 500, "lasted": 3 * LONG}])
def test_a_mistake_before_the_first_step_gets_one_restart(known: dict[str, Any]) -> None:
    """Also if the run resumes a training; a script that reports steps may take any time before the first one."""
    budget = budget_with(Limits(max_restarts=3))
    bad = replace(BAD, ran=2 * LONG, trained=0) if known else BAD
    assert rule(budget, bad, **known).charged
    again = replace(bad, rank=1)
    assert verdict(budget, again, rule(budget, again, **known)) == (
        93,
        "a restart would fail again (KeyError at train.py:4 in main ended both rounds as they began: "
        "fix it, and run the same command again): the cause",
    )
    assert budget.spent == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"mistake": None}),
        ({}, {"mistake": replace(MISTAKE, exception="TypeError")}),
        ({}, {"mistake": replace(MISTAKE, frame="train.py:5 in main")}),
        ({}, {"ran": LONG}),
        ({"ran": LONG}, {}),
        ({"trained": 1}, {"trained": 0}),
        ({"trained": 0}, {"trained": 1}),
    ],
    ids=["no exception", "another type", "another line", "late", "late at first", "step done", "new step"],
)
def test_another_failure_than_the_first_is_no_repeated_mistake(first: dict[str, Any], second: dict[str, Any]) -> None:
    budget = budget_with(Limits(max_restarts=9))
    assert rule(budget, replace(BAD, **first)).charged
    assert rule(budget, replace(BAD, **second)).charged
    assert rule(budget, replace(BAD, **second)).charged, "nor is any later one"


@pytest.mark.parametrize("known", [{"begun": 0, "reached": 3}, {"reached": 3}])
def test_a_mistake_in_a_round_in_which_another_node_has_done_steps_is_not_the_scripts_alone(
    known: dict[str, int],
) -> None:
    budget = budget_with(Limits(max_restarts=9))
    assert all(rule(budget, BAD, **known).charged for _ in range(3))


@pytest.mark.parametrize("imposed", [None, Kind.NODE_LOSS], ids=["another failure", "node lost"])
@pytest.mark.parametrize("at", [0, 1])
def test_only_a_runs_first_two_faults_may_be_a_repeated_mistake(imposed: Kind | None, at: int) -> None:
    budget = budget_with(Limits(max_restarts=9))
    for number in range(4):
        if number == at:
            rule(budget, SOON, imposed)
        assert rule(budget, BAD).charged


def test_a_resize_between_two_rounds_with_the_same_mistake_changes_nothing() -> None:
    budget = budget_with(Limits(max_restarts=9))
    rule(budget, BAD)
    rule(budget, None, Kind.MEMBERSHIP)
    assert rule(budget, BAD).kind is Kind.FATAL


def test_a_mistake_of_one_node_that_the_run_can_spare_is_charged() -> None:
    budget = budget_with(Limits(max_restarts=9))
    assert all(rule(budget, BAD, alone=True).charged for _ in range(3))
    budget = budget_with(Limits(max_restarts=9))
    rule(budget, BAD, alone=True)
    assert rule(budget, BAD).kind is Kind.FATAL, "another node's, too"


def test_without_restarts_a_mistake_ends_the_run_with_the_scripts_own_code() -> None:
    budget = budget_with(Limits(max_restarts=0))
    assert verdict(budget, BAD, rule(budget, BAD))[0] == 1


def test_a_repeated_mistake_that_spends_the_budget_ends_the_run_as_any_fault_does() -> None:
    budget = budget_with(Limits(max_restarts=1))
    assert rule(budget, BAD).charged
    assert verdict(budget, BAD, rule(budget, BAD)) == (91, "all restarts spent (--max-restarts 1): the cause")


def test_a_new_leader_knows_the_first_mistake() -> None:
    limits = Limits(max_restarts=9)
    budget = budget_with(limits)
    rule(budget, BAD)
    assert rule(budget_of_another_leader(budget, limits), BAD).kind is Kind.FATAL


# Restarts that are free.


@pytest.mark.parametrize("imposed", [None, Kind.NODE_LOSS, Kind.PREEMPTION])
def test_restarts_without_progress_are_charged_from_some_number_on(imposed: Kind | None) -> None:
    """Whatever sent the signal, and whatever was lost: free restarts are limited."""
    budget = budget_with(Limits(max_restarts=2))
    rulings = [rule(budget, PREEMPTED, imposed) for _ in range(FREE + 3)]
    assert [ruling.charged for ruling in rulings] == [False] * FREE + [True, True, False]
    assert verdict(budget, PREEMPTED, rulings[-1]) == (
        92,
        f"no progress in {FREE + 3} rounds, all restarts spent (--max-restarts 2): the cause",
    )


def test_without_a_budget_too() -> None:
    budget = budget_with(Limits(max_restarts=0))
    rulings = [rule(budget, PREEMPTED) for _ in range(FREE + 1)]
    assert [bool(ruling.ends) for ruling in rulings] == [False] * FREE + [True]
    assert verdict(budget, PREEMPTED, rulings[-1])[0] == 92


def test_more_are_free_the_more_nodes_there_may_be() -> None:
    budget = budget_with(Limits(max_restarts=0))
    assert not any(rule(budget, None, Kind.NODE_LOSS, nodes=64).ends for _ in range(MORE + 64))
    assert rule(budget, None, Kind.NODE_LOSS, nodes=64).ends


def test_preemptions_are_free_while_the_training_advances() -> None:
    budget = budget_with(Limits(max_restarts=0))
    for step in range(100):
        assert rule(budget, PREEMPTED, begun=step) == BudgetDecision(Kind.PREEMPTION)


def test_a_round_that_begins_where_another_has_begun_makes_no_progress() -> None:
    """However many steps it did: the next one does them again."""
    budget = budget_with(Limits(max_restarts=0))
    rulings = [rule(budget, PREEMPTED, begun=10, lasted=1000.0) for _ in range(FREE + 2)]
    assert rulings[-1].ends


def test_going_back_and_forth_makes_no_progress() -> None:
    budget = budget_with(Limits(max_restarts=0))
    assert not rule(budget, PREEMPTED, begun=10).ends
    rulings = [rule(budget, PREEMPTED, begun=begun) for begun in (5, 10, 5, 10, 5)]
    assert rulings[-1].ends


def test_a_script_that_reports_no_steps_advances_by_running() -> None:
    budget = budget_with(Limits(max_restarts=0))
    for _ in range(100):
        assert not rule(budget, PREEMPTED, lasted=LONG).ends
    assert any(rule(budget, PREEMPTED, lasted=LONG - 1).ends for _ in range(FREE + 1))


def test_a_round_that_never_trained_makes_no_progress_if_others_did() -> None:
    budget = budget_with(Limits(max_restarts=0))
    rule(budget, PREEMPTED, begun=10)
    assert any(rule(budget, PREEMPTED, lasted=LONG).ends for _ in range(FREE + 1))


def test_progress_makes_restarts_free_again() -> None:
    budget = budget_with(Limits(max_restarts=0))
    steps = count()
    for _ in range(5):
        begun = next(steps)
        assert not any(rule(budget, PREEMPTED, begun=begun).ends for _ in range(FREE))


def test_a_resize_is_free_and_counts_for_nothing() -> None:
    """Each needs a new node or a person; and nodes may arrive one after the other before a step is done."""
    budget = budget_with(Limits(max_restarts=0))
    assert not any(rule(budget, None, Kind.MEMBERSHIP).ends for _ in range(100))
    assert not any(rule(budget, PREEMPTED).ends for _ in range(FREE))


def test_a_new_leader_continues_the_count() -> None:
    budget = budget_with(Limits(max_restarts=0), idle=FREE, last_step=10)
    assert rule(budget, PREEMPTED, begun=10).ends
    assert not rule(budget_with(Limits(max_restarts=0), idle=FREE, last_step=10), PREEMPTED, begun=11).ends


def budget_of_another_leader(budget: RestartBudget, limits: Limits) -> RestartBudget:
    record = ControlRecord("run", "digest", 1, Leader("a", "a1", "host", 1), limits=limits)
    return RestartBudget(ControlRecord.parse(replace(record, **budget.recorded).encode()))


def test_a_new_leader_knows_which_failure_a_restart_may_repeat() -> None:
    limits = Limits(max_restarts=9)
    budget = budget_with(limits)
    rule(budget, NAN, begun=0)
    assert len(budget.recorded["repeats"]) == 16, "the record contains it, and texts may be long"
    budget = budget_of_another_leader(budget, limits)
    assert rule(budget, CRASH, begun=3).charged
    budget = budget_of_another_leader(budget, limits)
    assert rule(budget_of_another_leader(budget, limits), NAN, begun=3).kind is Kind.FATAL
    assert rule(budget, replace(NAN, repeats="The loss is inf"), begun=3).charged
    assert rule(budget_of_another_leader(budget, limits), NAN, begun=3).charged
    rule(budget, replace(CRASH, trained=4), begun=3)
    assert rule(budget_of_another_leader(budget, limits), replace(NAN, repeats="The loss is inf"), begun=5).charged


# The delay between failures soon after the start.


def delays(*failures: Failure) -> list[float]:
    budget = budget_with(Limits(max_restarts=100))
    return [rule(budget, failure).delay for failure in failures]


def test_failures_soon_after_the_start_are_tried_again_less_and_less_often() -> None:
    even = [0, 1, 2, 4, 8, 16, LONGEST_DELAY, LONGEST_DELAY]
    assert delays(*[SOON] * 8) == [pytest.approx(delay, rel=JITTER, abs=0) for delay in even]


def test_runs_that_fail_together_do_not_try_again_together() -> None:
    def second(run: str) -> float:
        budget = budget_with(Limits(max_restarts=9), run=run)
        return [rule(budget, SOON).delay for _ in range(2)][-1]

    runs = [second(f"run {number}") for number in range(50)]
    assert len(set(runs)) > 40
    assert max(runs) - min(runs) > JITTER
    assert second("run 7") == second("run 7")


@pytest.mark.parametrize(
    "other",
    [CRASH, replace(SOON, trained=1), replace(SOON, exit_code=-9)],
    ids=["ran longer", "has trained", "was killed"],
)
def test_other_failures_are_tried_again_at_once(other: Failure) -> None:
    assert delays(SOON, other, other, SOON, SOON) == [0, 0, 0, 0, pytest.approx(1, rel=JITTER)]


def test_the_budget_decides_how_often() -> None:
    """What is missing, such as a mount or a licence, may exist at the next attempt."""
    budget = budget_with(Limits(max_restarts=100))
    assert all(rule(budget, SOON).charged for _ in range(100))


# Restarts that are given back, and those without a new step.


def crash_at(budget: RestartBudget, begun: int, reached: int, lasted: float) -> BudgetDecision:
    return budget.rule(Broken(10.0, None, "the cause", [(10.0, CRASH)], lasted=lasted, begun=begun, reached=reached))


def test_time_with_new_steps_gives_restarts_back() -> None:
    budget = budget_with(Limits(max_restarts=1, restart_refill=100.0))
    assert crash_at(budget, 0, 50, 60.0).charged
    assert crash_at(budget, 50, 80, 99.0).ends  # not before a restart was charged
    budget = budget_with(Limits(max_restarts=1, restart_refill=100.0))
    assert crash_at(budget, 0, 50, 60.0).charged
    assert crash_at(budget, 50, 90, 101.0).charged
    assert (budget.spent, budget.refilled, budget.allowed) == (2, 1, 2)


def test_a_new_leader_counts_on_the_time_with_new_steps() -> None:
    limits = Limits(max_restarts=2, restart_refill=100.0)
    budget = budget_with(limits)
    crash_at(budget, 0, 50, 60.0)
    crash_at(budget, 50, 80, 60.0)
    budget = budget_of_another_leader(budget, limits)
    assert (budget.spent, budget.refilled) == (2, 0)
    crash_at(budget, 80, 90, 41.0)
    assert (budget.spent, budget.refilled) == (3, 1)
    assert budget.recorded["healthy"] == pytest.approx(1.0)


def test_no_more_is_given_back_than_was_charged() -> None:
    budget = budget_with(Limits(max_restarts=2, restart_refill=10.0))
    assert crash_at(budget, 0, 10, 1e6).charged
    for number in range(1, 4):
        crash_at(budget, 10 * number, 10 * number + 10, 1e6)
        assert budget.allowed - budget.spent in (1, 2)


def test_the_present_round_gives_restarts_back_before_it_ends() -> None:
    budget = budget_with(Limits(max_restarts=2, restart_refill=10.0))
    for begun in (0, 10):
        assert crash_at(budget, begun, begun + 10, 4.0).charged

    def allowed(reached: int, lasted: float) -> int:
        return budget.allowed_after(Broken(10.0, None, "", lasted=lasted, begun=20, reached=reached))

    assert allowed(20, 1000.0) == 2, "there is no new step"
    assert [allowed(30, lasted) for lasted in (5.0, 7.0, 17.0, 1000.0)] == [2, 3, 4, 4]
    assert budget.allowed == 2
    crash_at(budget, 20, 30, 17.0)
    assert budget.allowed == 4


def test_a_script_without_steps_gets_restarts_back_if_it_runs_for_long() -> None:
    budget = budget_with(Limits(max_restarts=2, restart_refill=100.0))
    assert budget.rule(Broken(10.0, None, "the cause", [(10.0, CRASH)], lasted=5.0)).charged
    assert [budget.allowed_after(Broken(10.0, None, "", lasted=lasted)) for lasted in (50.0, 101.0)] == [2, 3]


def test_time_without_new_steps_gives_nothing_back() -> None:
    budget = budget_with(Limits(max_restarts=2, restart_refill=10.0))
    assert [crash_at(budget, 0, 50, 1000.0).charged for _ in range(3)] == [True, True, False]
    assert budget.refilled == 0


def test_no_restart_is_given_back_where_none_is_allowed() -> None:
    budget = budget_with(Limits(max_restarts=0, restart_refill=10.0))
    assert crash_at(budget, 0, 50, 1000.0).ends == RestartsSpent(0, 0, 0)


def test_a_leader_that_learns_of_more_restarts_knows_that_they_were_given_back() -> None:
    budget = budget_with(Limits(max_restarts=2, restart_refill=10.0))
    budget.learn(5)
    assert (budget.spent, budget.refilled) == (5, 3)
    budget.learn(1)
    assert (budget.spent, budget.refilled) == (5, 3)
    without = budget_with(Limits(max_restarts=2))
    without.learn(5)
    assert rule(without, CRASH).ends == RestartsSpent(2, 0, 0)


def test_restarts_without_a_new_step_end_the_run() -> None:
    budget = budget_with(Limits(max_restarts=100, max_idle_restarts=3))
    rulings = [crash_at(budget, 40, 40, 5.0) for _ in range(4)]
    assert [bool(ruling.ends) for ruling in rulings] == [False, False, False, True]
    assert verdict(budget, CRASH, rulings[-1]) == (92, "no new step in 3 restarts (--max-idle-restarts 3): the cause")


def test_free_restarts_count_as_restarts_without_a_new_step() -> None:
    budget = budget_with(Limits(max_restarts=100, max_idle_restarts=2))
    assert not rule(budget, PREEMPTED, begun=7).ends
    assert not rule(budget, None, Kind.NODE_LOSS, begun=7).ends
    assert rule(budget, CRASH, begun=7).ends


def test_resizes_do_not_count_as_restarts_and_do_not_hide_them() -> None:
    budget = budget_with(Limits(max_restarts=100, max_idle_restarts=2))
    for _ in range(5):
        assert not rule(budget, None, Kind.MEMBERSHIP, begun=7).ends
    assert not rule(budget, CRASH, begun=7).ends, "no restart has come before it"
    for _ in range(5):
        assert not rule(budget, None, Kind.MEMBERSHIP, begun=7).ends
    assert not rule(budget, CRASH, begun=7).ends, "one has"
    assert rule(budget, CRASH, begun=7).ends


def test_a_new_step_begins_the_count_again() -> None:
    budget = budget_with(Limits(max_restarts=100, max_idle_restarts=2))
    for step in range(5):
        assert not crash_at(budget, step, step, 5.0).ends
        assert not crash_at(budget, step, step + 1, 5.0).ends


def test_torchruns_agents_count_the_restarts_of_their_nodes() -> None:
    """The run must not end before the agents are out of restarts, which they do not tell."""
    limits = TorchrunHandler(RendezvousParameters("elastic-c10d", "127.0.0.1:29400", "x", 1, 1), "c10d").config.limits
    run = Run("1", max_restarts=limits.max_restarts)
    run.hello("a")
    run.advance(2.1)
    for _ in range(20):
        run.join("a")
        run.advance(LONG / 4)
        run.stop("a")  # all that the handler reports of a worker that has failed
        run.advance(0.5)
        assert run.end is None
    assert run.number == 21
