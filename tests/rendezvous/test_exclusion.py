"""Which nodes are left out of rounds because their workers fail again and again."""

from __future__ import annotations

from elastic_launch.rendezvous.leader.exclusion import FAULTS, LONGEST, SECONDS, WINDOW, Exclusion


def test_a_node_with_all_of_the_last_faults_is_left_out_for_a_while() -> None:
    exclusion = Exclusion()
    assert [exclusion.fault("b", float(at)) for at in range(FAULTS)] == [0.0] * (FAULTS - 1) + [SECONDS]
    assert exclusion.excludes("b", FAULTS + SECONDS - 2)
    assert not exclusion.excludes("b", FAULTS + SECONDS)
    assert not exclusion.excludes("a", float(FAULTS))
    assert exclusion.ends() == [FAULTS - 1 + SECONDS]


def test_a_fault_of_another_node_begins_the_count_again() -> None:
    exclusion = Exclusion()
    assert not any(exclusion.fault(node_id, 1.0) for node_id in "bbabbabb")


def test_old_faults_do_not_count() -> None:
    exclusion = Exclusion()
    assert not any(exclusion.fault("b", number * WINDOW / (FAULTS - 1)) for number in range(20))


def test_each_time_is_twice_as_long_up_to_a_limit() -> None:
    exclusion = Exclusion()
    times = [found for _ in range(8 * FAULTS) if (found := exclusion.fault("b", 1.0))]
    assert times[:4] == [SECONDS, 2 * SECONDS, 4 * SECONDS, 8 * SECONDS]
    assert times[-1] == LONGEST


def test_time_that_the_leader_slept_does_not_count() -> None:
    exclusion = Exclusion()
    for _ in range(FAULTS):
        exclusion.fault("b", 0.0)
    exclusion.put_off(1000.0)
    assert exclusion.excludes("b", SECONDS + 999.0)
    assert not exclusion.excludes("b", SECONDS + 1000.0)
