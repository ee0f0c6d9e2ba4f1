"""Which nodes are left out of rounds because their workers fail again and again."""

from __future__ import annotations

from elastic_launch.rendezvous.leader.exclusion import FAULTS, LONGEST, MOST, SECONDS, WINDOW, Exclusion
from elastic_launch.rendezvous.record import FaultyNode


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


# What another leader knows.


def test_another_leader_leaves_a_node_out_for_the_rest_of_its_time() -> None:
    """Its clock has nothing in common with that of the one before."""
    first = Exclusion()
    for at in range(FAULTS):
        first.fault("b", float(at))
    recorded = first.recorded(now=102.0)
    assert recorded == (FaultyNode("b", 1, SECONDS - 100.0),)
    second = Exclusion(recorded, now=9000.0)
    second.stood(50.0)
    second.stood(30.0)  # a node that was ordered later to form the round
    assert second.excludes("b", 9000.0 + SECONDS - 151.0)
    assert not second.excludes("b", 9000.0 + SECONDS - 149.0)
    again = [second.fault("b", 9500.0) for _ in range(FAULTS)][-1]
    assert again == 2 * SECONDS


def test_another_leader_counts_a_nodes_faults_on() -> None:
    first = Exclusion()
    first.fault("a", 0.0)
    first.fault("b", 10.0)
    first.fault("b", 20.0)
    recorded = first.recorded(now=25.0)
    assert recorded == (FaultyNode("b", faults=(15.0, 5.0)),)
    assert Exclusion(recorded, now=9000.0).fault("b", 9001.0) == SECONDS
    assert not Exclusion(recorded, now=9000.0).fault("a", 9001.0)
    late = Exclusion(recorded, now=9000.0)
    late.stood(WINDOW - 10.0)
    assert not late.fault("b", 9001.0), "the first one is too long ago"
    assert late.recorded(now=9002.0) == (FaultyNode("b", faults=(WINDOW - 3.0, 1.0)),)


def test_the_record_names_the_nodes_that_were_left_out_last() -> None:
    exclusion = Exclusion()
    nodes = [f"node-{number}" for number in range(MOST + 1)]
    for node_id in [*nodes, nodes[0]]:
        for _ in range(FAULTS):
            exclusion.fault(node_id, 0.0)
    recorded = exclusion.recorded(now=0.0)
    assert [node.node_id for node in recorded] == [*nodes[2:], nodes[0]]
    assert recorded[-1] == FaultyNode(nodes[0], 2, 2 * SECONDS)


def test_a_count_that_anyone_may_have_written_is_only_a_count() -> None:
    exclusion = Exclusion([FaultyNode("b", 10**9)])
    assert [exclusion.fault("b", 0.0) for _ in range(FAULTS)][-1] == LONGEST


def test_the_record_has_no_fault_of_the_future() -> None:
    """A leader that has slept shifts all times, also of a fault that it has counted since."""
    exclusion = Exclusion()
    exclusion.fault("b", 10.0)
    exclusion.put_off(10.0)
    assert exclusion.recorded(12.0) == (FaultyNode("b", 0, 0.0, (0.0,)),)
