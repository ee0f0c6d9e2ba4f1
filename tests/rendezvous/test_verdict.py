"""Which cause of a broken round counts, what it costs, and which code ends the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_launch.rendezvous.messages import Failure
from elastic_launch.rendezvous.verdict import EARLY, Kind, exit_code, is_early, judge, kind_of, root_cause

STEADY = settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The same examples in every run, however slow the machine."""

CRASH = Failure("a", "crash", 0, 0, 42, 1, "exit code 1", ran=60.0, signature="s")

KINDS = st.sampled_from(Kind)
FAILURES = st.lists(st.sampled_from(Kind).map(lambda kind: replace(CRASH, kind=kind.text)), max_size=5)


def test_precedence() -> None:
    order = [Kind.PREEMPTION, Kind.NODE_LOSS, Kind.FATAL, Kind.OUT_OF_MEMORY, Kind.HANG, Kind.CRASH]
    assert sorted(order) == order


def test_what_costs() -> None:
    assert {kind for kind in Kind if kind.costs} == {Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY}


def test_what_a_workers_failure_lies_behind() -> None:
    assert {kind for kind in Kind if kind.is_fault} == {Kind.FATAL, Kind.CRASH, Kind.HANG, Kind.OUT_OF_MEMORY}


def test_names() -> None:
    assert [kind.text for kind in Kind] == [
        "membership",
        "preemption",
        "node loss",
        "fatal",
        "out of memory",
        "hang",
        "crash",
    ]


@pytest.mark.parametrize("kind", Kind)
def test_a_failures_kind_is_found_by_its_name(kind: Kind) -> None:
    assert kind_of(replace(CRASH, kind=kind.text)) is kind


def test_an_unknown_kind_is_a_crash() -> None:
    assert kind_of(replace(CRASH, kind="of a later version")) is Kind.CRASH


def test_the_most_significant_cause_counts() -> None:
    oom, preempted = replace(CRASH, kind="out of memory"), replace(CRASH, kind="preemption")
    assert judge(Kind.CRASH, []) is Kind.CRASH
    assert judge(Kind.CRASH, [CRASH, oom]) is Kind.OUT_OF_MEMORY
    assert judge(Kind.CRASH, [oom, preempted]) is Kind.PREEMPTION
    assert judge(Kind.NODE_LOSS, [CRASH, oom]) is Kind.NODE_LOSS


@STEADY
@given(KINDS, FAILURES)
def test_the_order_of_reports_does_not_matter(broken: Kind, failures: list[Failure]) -> None:
    assert judge(broken, failures) is judge(broken, reversed(failures))


@STEADY
@given(st.sampled_from([Kind.PREEMPTION, Kind.NODE_LOSS, Kind.MEMBERSHIP]), FAILURES)
def test_failures_in_the_wake_of_what_is_free_are_free(broken: Kind, failures: list[Failure]) -> None:
    assert not judge(broken, failures).costs


def test_no_failure_has_no_root_cause() -> None:
    assert root_cause([]) is None


def test_the_root_cause_is_the_first_by_the_nodes_own_clocks() -> None:
    first, second = replace(CRASH, node_id="b", ago=0.5), replace(CRASH, node_id="a", ago=0.1)
    assert root_cause([(10.0, second), (10.3, first)]) == first


def test_the_root_cause_is_of_the_most_significant_kind() -> None:
    oom = replace(CRASH, kind="out of memory")
    assert root_cause([(1.0, CRASH), (2.0, oom), (3.0, oom)]) == oom


@pytest.mark.parametrize(
    ("code", "expected"),
    [(1, 1), (3, 3), (255, 255), (-9, 137), (-11, 139), (-15, 143), (2, 1), (90, 1), (91, 1), (99, 1), (0, 1)],
)
def test_code_without_a_budget(code: int, expected: int) -> None:
    assert exit_code(replace(CRASH, exit_code=code), 0) == expected


def test_code_of_a_spent_budget() -> None:
    assert exit_code(replace(CRASH, exit_code=7), 1) == 91
    assert exit_code(None, 1) == 91


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (replace(CRASH, ran=0.5), True),
        (replace(CRASH, ran=EARLY), True),
        (replace(CRASH, ran=EARLY + 0.1), False),
        (replace(CRASH, ran=0.5, exit_code=-9), False),
        (replace(CRASH, ran=0.5, exit_code=0), False),
        (replace(CRASH, ran=0.5, signature=""), False),
    ],
)
def test_what_may_be_a_failure_at_the_start(failure: Failure, expected: bool) -> None:
    assert is_early(failure) is expected
