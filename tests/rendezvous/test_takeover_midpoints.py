"""The leader or its link is lost at each point of a run: the others continue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulation.cluster import Cluster

FAULTS: dict[str, Callable[[Cluster], None]] = {
    "killed": lambda cluster: _leader(cluster, lambda node: node.die(power=False)),
    "powered off": lambda cluster: _leader(cluster, lambda node: node.die(power=True)),
    "frozen for 20 s": lambda cluster: _leader(cluster, cluster.freeze),
    "cut off": lambda cluster: _leader(cluster, lambda node: cluster.partition(node.node_id)),
    "without its store": lambda cluster: _leader(cluster, lambda node: cluster.network.cut_off.add(node.node_id)),
    "killed, and its record spoiled": lambda cluster: _spoiled(cluster, die=True),
    "alive, and its record spoiled": lambda cluster: _spoiled(cluster, die=False),
    "unanswered": lambda cluster: _leader(cluster, lambda node: cluster.store.mute.add(node.node_id)),
}


def _leader(cluster: Cluster, befall: Callable[..., None]) -> None:
    if cluster.leader is not None:
        befall(cluster.leader)


def _spoiled(cluster: Cluster, *, die: bool) -> None:
    if die:
        _leader(cluster, lambda node: node.die(power=False))
    cluster.store.spoil()


def _scenario(cluster: Cluster) -> None:
    """Three nodes form a round, a worker crashes, the leader is killed, and comes back."""
    cluster.start("a", "b", "c")
    cluster.run(1.5)
    assert cluster.trains
    other = next(node for node in cluster.nodes if node is not cluster.leader)
    other.workers.crash()
    cluster.run(2.0)
    assert cluster.trains
    leader = cluster.leader
    assert leader is not None
    leader.die(power=False)
    cluster.run(2.5)
    cluster.start(leader.node_id)
    cluster.run(3.0)
    assert cluster.trains


def _live_scenario(cluster: Cluster) -> None:
    """A worker crashes, a node joins, and the leader is killed; all other workers keep their processes."""
    cluster.start("a", "b")
    cluster.run(4.0)
    assert cluster.trains
    other = next(node for node in cluster.nodes if node is not cluster.leader)
    other.workers.crash()
    cluster.run(4.0)
    assert cluster.trains
    assert cluster.leader is not None
    assert (cluster.leader.workers.kept, other.workers.kept) == (1, 0)
    cluster.start("c")
    cluster.run(8.0)
    assert cluster.trains
    assert (cluster.leader.workers.kept, other.workers.kept, cluster["c"].workers.kept) == (2, 1, 0)
    cluster.leader.die(power=False)
    cluster.run(6.0)
    assert cluster.trains
    assert sum(node.workers.kept for node in cluster.nodes) in (3, 4)


@pytest.mark.parametrize("fault", ["killed", "powered off", "frozen for 20 s", "cut off"])
def test_voters_wait_once_for_a_leader_and_hardly_longer_for_its_node(fault: str) -> None:
    for seed in range(4):
        cluster = Cluster("1:3", seed=seed, voters=True)
        cluster.start("a", "b", "c")
        cluster.run(8.0)
        assert cluster.trains
        before, lost = cluster.record, cluster.kernel.now
        assert before is not None
        FAULTS[fault](cluster)
        elected = 0.0
        while cluster.record is not None and cluster.record.round == before.round:
            cluster.kernel.step(cluster.kernel.now + 0.1)
            if cluster.record.term > before.term:
                elected = elected or cluster.kernel.now
        dead_after = cluster.timing.dead_after
        assert elected - lost < dead_after + 0.5
        assert cluster.kernel.now - elected < dead_after / 2  # in which workers stop
        cluster.run(20.0)
        cluster.recover()


class _Stopped(Exception):
    """The scenario has reached the point."""


def _length(*, live: bool = False) -> int:
    cluster = Cluster("1:3", seed=1, live=live)
    (_live_scenario if live else _scenario)(cluster)
    return cluster.kernel.events


def _interrupted(events: int, befall: Callable[[Cluster], None], *, live: bool = False) -> Cluster:
    cluster = Cluster("1:3", seed=1, live=live)

    def check() -> None:
        cluster.checks.always()
        if cluster.kernel.events == events:
            raise _Stopped

    cluster.kernel.check = check
    with pytest.raises(_Stopped):
        (_live_scenario if live else _scenario)(cluster)
    cluster.kernel.check = cluster.checks.always
    befall(cluster)
    cluster.run(20.0)
    return cluster


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_continues_from_every_point_at_which_its_leader_is(fault: str) -> None:
    terms = set()
    for events in range(1, _length(), 20):
        cluster = _interrupted(events, FAULTS[fault])
        cluster.recover()
        assert cluster.record is not None
        assert cluster.record.restarts <= 1
        terms.add(cluster.record.term)
    assert max(terms) >= 2


@pytest.mark.parametrize("fault", ["killed", "frozen for 20 s", "cut off"])
def test_a_live_run_continues_from_every_point_at_which_its_leader_is(fault: str) -> None:
    for events in range(1, _length(live=True), 40):
        _interrupted(events, FAULTS[fault], live=True).recover()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_continues_from_every_event_at_which_its_leader_is(fault: str) -> None:
    for live, step in ((False, 1), (True, 4)):
        for events in range(1, _length(live=live), step):
            _interrupted(events, FAULTS[fault], live=live).recover()


def test_a_node_that_cannot_know_whether_it_leads_does_not_count_as_dead() -> None:
    """Its term is in the record, but the answer was lost: it does not serve there, and its workers train."""
    spare = 0
    for seed in range(40):
        cluster = Cluster("1:2", seed=seed)
        cluster.start("a", "b", "c", "d")
        cluster.run(6.0)
        leader, record = cluster.leader, cluster.record
        assert leader is not None
        assert record is not None
        if record.round.index(leader.node_id, leader.incarnation) is None:
            spare += 1
            cluster.store.mute.add(record.round.members[0].node_id)
            cluster.freeze(leader)
            cluster.run(20.0)
            cluster.recover()
    assert spare >= 5
