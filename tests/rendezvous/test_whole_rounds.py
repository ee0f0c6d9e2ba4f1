"""A cut that leaves all nodes of a round on one side: their workers are killed before the others train."""

from __future__ import annotations

import pytest
from simulation.cluster import Cluster
from simulation.voters import VOTERS


def _trains(seed: int, *, live: bool = False, voters: bool = True) -> tuple[Cluster, tuple[str, ...]]:
    """Start five nodes, of which two train; return these, too."""
    cluster = Cluster("2:2", seed=seed, live=live, voters=voters)
    cluster.start(*"abcde")
    cluster.run(12.0)
    assert cluster.trains
    assert cluster.record is not None
    return cluster, tuple(member.node_id for member in cluster.record.round.members)


@pytest.mark.parametrize("live", [False, True])
def test_the_others_do_not_train_beside_a_whole_round_without_a_majority(live: bool) -> None:
    leads = set()
    for seed in range(40):
        cluster, members = _trains(seed, live=live)
        if len(VOTERS & {*members}) > 1:
            continue
        assert cluster.leader is not None
        number, led = cluster.checks.record.round.number, cluster.leader.node_id in members
        cluster.partition(*members)
        cluster.run(5 * cluster.timing.dead_after)
        assert cluster.record.round.number > number
        assert not {member.node_id for member in cluster.record.round.members} & {*members}
        assert not any(cluster[name].workers.training for name in members)
        cluster.recover()
        leads.add(led)
    assert leads == {True, False}


@pytest.mark.parametrize("live", [False, True])
def test_on_etcd_the_leader_does_not_train_beside_a_round_without_it(live: bool) -> None:
    cut = 0
    for seed in range(20):
        cluster, members = _trains(seed, live=live, voters=False)
        assert cluster.leader is not None
        if cluster.leader.node_id in members:
            continue
        cluster.partition(*members)
        cluster.run(5 * cluster.timing.dead_after)
        cluster.recover()
        cut += 1
    assert cut
