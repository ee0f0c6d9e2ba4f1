"""Which cause of a broken round counts, and which code ends the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_launch.events.sentences import worker_failed
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.verdict import Kind, exit_code, judge, kind_of, root_cause

STEADY = settings(max_examples=100)
"""The same examples in every run, however slow the machine."""

CRASH = Failure("a", "crash", 0, 0, 42, 1, "", ran=60.0)
BROKEN = replace(CRASH, rank=1, symptom="broken connection")
LATE = replace(CRASH, rank=2, symptom="time-out")
PREEMPTED = replace(CRASH, rank=3, kind="preemption", exit_code=-15)

FAILURES = st.lists(
    st.builds(
        lambda kind, symptom, ago: (10.0, replace(CRASH, kind=kind.text, symptom=symptom, ago=ago)),
        st.sampled_from(Kind),
        st.sampled_from(["", "broken connection", "time-out"]),
        st.integers(0, 1000).map(lambda n: n / 100),
    ),
    max_size=5,
    unique_by=lambda item: item[1].ago,
)


def test_kinds_that_cost_a_restart() -> None:
    assert {kind for kind in Kind if kind.costs} == {Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY}


def test_kinds_that_are_not_faults() -> None:
    assert {kind for kind in Kind if not kind.is_fault} == {Kind.MEMBERSHIP, Kind.PREEMPTION, Kind.NODE_LOSS}


def test_kinds_that_a_restart_would_not_change() -> None:
    assert {kind for kind in Kind if kind.is_final} == {Kind.FATAL, Kind.STARTUP}


def test_names() -> None:
    assert [kind.text for kind in Kind] == [
        "membership",
        "preemption",
        "node loss",
        "fatal",
        "startup",
        "out of memory",
        "hang",
        "crash",
    ]


@pytest.mark.parametrize("kind", Kind)
def test_a_failures_kind_is_found_by_its_name(kind: Kind) -> None:
    assert kind_of(replace(CRASH, kind=kind.text)) is kind


def test_an_unknown_kind_is_a_crash() -> None:
    assert kind_of(replace(CRASH, kind="of a later version")) is Kind.CRASH


# The root cause.


def test_no_failure_has_no_root_cause() -> None:
    assert root_cause([]) is None


def test_the_root_cause_is_the_first_by_the_nodes_own_clocks() -> None:
    first, second = replace(CRASH, node_id="b", ago=0.5), replace(CRASH, node_id="a", ago=0.1)
    assert root_cause([(10.0, second), (10.3, first)]) == first


@pytest.mark.parametrize("symptom", [BROKEN, LATE, PREEMPTED], ids=["broken connection", "time-out", "SIGTERM"])
@pytest.mark.parametrize("kind", ["crash", "out of memory", "hang"])
def test_what_follows_from_a_failure_is_never_the_root_cause(symptom: Failure, kind: str) -> None:
    """However much earlier it ended, and in any order of reports."""
    cause = replace(CRASH, kind=kind)
    assert root_cause([(1.0, symptom), (9.0, cause)]) == cause
    assert root_cause([(9.0, cause), (9.0, replace(symptom, ago=8.0))]) == cause


def test_a_worker_ended_by_a_signal_breaks_the_connections_of_others() -> None:
    assert root_cause([(1.0, BROKEN), (2.0, LATE), (3.0, PREEMPTED)]) == PREEMPTED


def test_possible_failures_rank_after_certain_ones_and_before_symptoms() -> None:
    supposed = replace(CRASH, rank=3, supposed=True)
    assert root_cause([(9.0, supposed), (1.0, BROKEN), (1.0, LATE)]) == supposed
    assert root_cause([(1.0, supposed), (9.0, CRASH)]) == CRASH
    assert root_cause([(1.0, supposed), (9.0, PREEMPTED)]) == PREEMPTED


def test_of_symptoms_the_first_is_the_root_cause() -> None:
    assert root_cause([(2.0, BROKEN), (1.0, LATE)]) == LATE


@pytest.mark.parametrize("kind", ["fatal", "startup"])
def test_what_a_restart_would_not_change_goes_before_all_others(kind: str) -> None:
    final = replace(CRASH, kind=kind)
    assert root_cause([(1.0, CRASH), (2.0, PREEMPTED), (3.0, final)]) == final


@STEADY
@given(FAILURES)
def test_the_order_of_reports_does_not_matter(failures: list[tuple[float, Failure]]) -> None:
    assert root_cause(failures) == root_cause(failures[::-1])


@STEADY
@given(FAILURES)
def test_a_symptom_is_the_root_cause_only_if_there_is_nothing_else(failures: list[tuple[float, Failure]]) -> None:
    cause = root_cause(failures)
    if cause is not None and cause.symptom and kind_of(cause) in (Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY):
        assert all(other.symptom and kind_of(other).is_fault for _, other in failures)
        assert all(other.ago <= cause.ago for _, other in failures)


# The kind.


def test_the_kind_is_that_of_the_root_cause() -> None:
    oom = replace(CRASH, kind="out of memory", ago=1.0)
    assert judge(None, [(1.0, CRASH), (1.0, oom)]) is Kind.OUT_OF_MEMORY
    assert judge(None, [(1.0, oom), (1.0, PREEMPTED)]) is Kind.OUT_OF_MEMORY
    assert judge(None, [(1.0, BROKEN), (1.0, PREEMPTED)]) is Kind.PREEMPTION
    assert judge(None, [(1.0, BROKEN)]) is Kind.CRASH


@STEADY
@given(st.sampled_from([Kind.PREEMPTION, Kind.NODE_LOSS, Kind.MEMBERSHIP]), FAILURES)
def test_losses_of_nodes_take_precedence_over_failures_of_workers(
    imposed: Kind, failures: list[tuple[float, Failure]]
) -> None:
    assert judge(imposed, failures) is imposed


def test_words() -> None:
    assert worker_failed(BROKEN) == "rank 1 on node a: exit code 1"


# Exit codes.


@pytest.mark.parametrize(
    ("code", "expected"),
    [(1, 1), (3, 3), (255, 255), (-9, 137), (-11, 139), (-15, 143), (2, 1), (90, 1), (91, 1), (99, 1), (0, 1)],
)
def test_code_without_a_budget(code: int, expected: int) -> None:
    assert exit_code(replace(CRASH, exit_code=code), 0) == expected


def test_code_of_a_spent_budget() -> None:
    assert exit_code(replace(CRASH, exit_code=7), 1) == 91
    assert exit_code(None, 1) == 91
