"""Several leaders, one after the other: the invariants under any order of faults, and progress once they stop.

Real agents' policies, leaders' machines, links' and elections' decisions on simulated hosts; see ``simulation``. The
examples are the same in every run; HYPOTHESIS_EXAMPLES=2000 looks at so many random ones instead.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from simulation.cluster import RECOVERY, Cluster
from simulation.node import SimNode
from simulation.voters import VOTERS

EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")

INDEX = st.integers(0, 4)

NODE_IDS = "abcd"


class TakeoverRun(RuleBasedStateMachine):
    """A run on up to four hosts and an etcd elsewhere."""

    voters = False
    """Whether three of the hosts keep the record instead."""

    @initialize(
        seed=st.integers(0, 1000),
        nodes=st.sampled_from(["1:3", "2:3", "1:2", "2:4"]),
        max_restarts=st.sampled_from([2, 100]),
        start=st.integers(2, 4),
        seconds=st.sampled_from([0.0, 0.5, 6.0]),
        live=st.sampled_from([True, False]),
    )
    def begin(self, seed: int, nodes: str, max_restarts: int, start: int, seconds: float, live: bool) -> None:
        self.cluster = Cluster(nodes, seed=seed, max_restarts=max_restarts, live=live, voters=self.voters)
        self.cluster.start(*NODE_IDS[:start])
        self.cluster.run(seconds)

    def _pick(self, index: int, *, leader: bool = False) -> SimNode | None:
        nodes = self.cluster.nodes
        if leader and self.cluster.leader is not None:
            return self.cluster.leader
        return nodes[index % len(nodes)] if nodes else None

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 7.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(events=st.integers(1, 30))
    def let_happen(self, events: int) -> None:
        for _ in range(events):
            self.cluster.kernel.step(self.cluster.kernel.now + 0.1)

    @precondition(lambda self: len(self.cluster.nodes) < len(NODE_IDS))
    @rule()
    def arrive(self) -> None:
        taken = {node.node_id for node in self.cluster.nodes}
        self.cluster.start(next(node_id for node_id in NODE_IDS if node_id not in taken))

    @rule(
        index=INDEX,
        leader=st.booleans(),
        what=st.sampled_from(["dies", "loses power", "freezes", "thaws", "loses its links"]),
    )
    def host(self, index: int, leader: bool, what: str) -> None:
        """Something befalls a host, often that of the leader."""
        node = self._pick(index, leader=leader)
        match what:
            case _ if node is None:
                return
            case "dies" | "loses power":
                node.die(power=what == "loses power")
            case "freezes":
                self.cluster.freeze(node)
            case "thaws":
                self.cluster.thaw(node)
            case "loses its links":
                node.drop_links()

    @rule(index=INDEX, what=st.sampled_from(["crash", "finish", "leave", "deaf"]))
    def workers(self, index: int, what: str) -> None:
        """Something befalls a node's workers."""
        node = self._pick(index)
        if node is None or node.frozen:
            return
        match what:
            case "crash" if node.workers.training:
                node.workers.crash()
            case "finish" if node.workers.training:
                node.workers.finish()
            case "leave":
                node.leave()
            case "deaf":
                node.workers.deaf = True

    @rule(index=INDEX, leader=st.booleans(), what=st.sampled_from(["partition", "split", "no store", "slow", "heal"]))
    def network(self, index: int, leader: bool, what: str) -> None:
        """Something befalls the network."""
        node, network = self._pick(index, leader=leader), self.cluster.network
        match what:
            case _ if node is None:
                return
            case "partition":
                self.cluster.partition(node.node_id)
            case "split":
                other = self._pick(index + 1)
                self.cluster.partition(node.node_id, *([other.node_id] if other is not None else []))
            case "no store":
                network.cut_off.add(node.node_id)
            case "slow":
                self.cluster.slow_down(0.3)
            case "heal":
                network.groups, network.slow = {}, 0.0
                network.cut_off.clear()
                network.change()

    @rule(index=INDEX, leader=st.booleans(), what=st.sampled_from(["down", "up", "mute", "late", "spoil"]))
    def store(self, index: int, leader: bool, what: str) -> None:
        """Something befalls the store: none answers, or one node's writes go through without an answer, or too late."""
        node, store = self._pick(index, leader=leader), self.cluster.store
        match what:
            case "down" | "up":
                store.down = what == "down"
            case "mute" if node is not None:
                store.mute.add(node.node_id)
            case "late" if node is not None:
                store.late.add(node.node_id)
            case "spoil":
                store.spoil()

    def teardown(self) -> None:
        """Without further faults the run trains, or has ended."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.heal()
        cluster.run(cluster.timing.dead_after)
        staying = {node.node_id for node in cluster.nodes if node.view.leaving is None}
        missing = cluster.limits.min_nodes - len(staying)
        cluster.start(*[node_id for node_id in NODE_IDS if node_id not in staying][: max(0, missing)])
        if self.voters:
            end = cluster.kernel.now + RECOVERY
            # The run begins only once all voters are there, and one that leaves may have to give up a connection first.
            while cluster.kernel.now < end and any(node.view.leaving is not None for node in cluster.nodes):
                cluster.run(1.0)
            cluster.start(*sorted(VOTERS - {node.node_id for node in cluster.nodes}))
        cluster.recover()


class VotingRun(TakeoverRun):
    """A run on up to four hosts, of which three keep the record by majority."""

    voters = True

    @rule(node_id=st.sampled_from(sorted(VOTERS)))
    def lose_file(self, node_id: str) -> None:
        assert self.cluster.voters is not None
        self.cluster.voters.lose_file(node_id)


def _profile(examples: int, *, random: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=25,
        derandomize=not random,
        report_multiple_bugs=False,
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if random else [])],  # to shrink takes minutes
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_under_random_faults_rounds_have_one_number_each_and_the_run_continues() -> None:
    run_state_machine_as_test(TakeoverRun, settings=_profile(int(EXAMPLES or 40), random=EXAMPLES is not None))


def test_the_same_holds_if_hosts_of_the_run_keep_the_record() -> None:
    run_state_machine_as_test(VotingRun, settings=_profile(int(EXAMPLES or 15), random=EXAMPLES is not None))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_same_under_many_random_faults_if_hosts_of_the_run_keep_the_record() -> None:
    run_state_machine_as_test(VotingRun, settings=_profile(1500, random=False))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_faults() -> None:
    run_state_machine_as_test(TakeoverRun, settings=_profile(1500, random=False))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_other_random_faults_in_every_run() -> None:
    run_state_machine_as_test(TakeoverRun, settings=_profile(6000, random=True))


@pytest.mark.parametrize("seed", range(10))
def test_a_leader_that_was_succeeded_does_not_repair_what_is_spoiled_right_after(seed: int) -> None:
    """Its term would be lower than that of the node that took over."""
    cluster = Cluster("1:3", seed=seed)
    cluster.start("a", "b", "c")
    cluster.run(3.0)
    leader, record = cluster.leader, cluster.record
    assert leader is not None
    assert record is not None
    cluster.partition(leader.node_id)
    while cluster.record == record:
        cluster.kernel.step(cluster.kernel.now + 0.1)
    assert cluster.record is not None
    assert cluster.record.term == record.term + 1
    cluster.store.spoil()
    cluster.run(10.0)
    cluster.recover()


def test_a_node_that_repairs_the_record_charges_nothing_for_a_round_that_others_have_left_behind() -> None:
    """Its worker had crashed in round 1 when it was cut off; another leader has judged that, and formed two rounds."""
    cluster = Cluster("2:4", seed=1, max_restarts=2)
    cluster.start("a", "b", "c", "d")
    cluster.run(3.0)
    assert cluster.leader is cluster["c"]
    cluster.partition("c")
    cluster.network.cut_off.add("b")
    cluster.run(27.0)
    cluster.network.cut_off.add("a")
    cluster.run(3.0)
    cluster.store.spoil()
    cluster.heal()
    cluster.recover()
    assert cluster.leader is cluster["b"]
    assert cluster.record is not None
    assert cluster.record.restarts == 0


@pytest.mark.parametrize("what", ["dies", "loses power", "freezes", "is cut off"])
def test_a_leader_among_voters_is_waited_for_only_once(what: str) -> None:
    """Also by a candidate that has got no answer to its write, and finds later that it has succeeded."""
    for seed in range(40):
        cluster = Cluster("1:3", seed=seed, voters=True)
        cluster.start("a", "b", "c")
        cluster.run(10.0)
        leader, record = cluster.leader, cluster.record
        assert leader is not None
        assert record is not None
        match what:
            case "freezes":
                cluster.freeze(leader)
            case "is cut off":
                cluster.partition(leader.node_id)
            case _:
                leader.die(power=what == "loses power")
        cluster.run(cluster.timing.dead_after + 3.0)  # workers may take a second to end; candidates may collide
        assert cluster.record is not None
        assert cluster.record.round.number > record.round.number, seed


@pytest.mark.parametrize("seconds", [3.0, 12.0, 40.0])
def test_a_voter_that_has_lost_only_its_way_to_the_leader_joins_once_it_is_back(seconds: float) -> None:
    """The other voters hear that leader, so a takeover cannot succeed, however often it is tried."""
    for seed in range(8):
        cluster = Cluster("1:3", seed=seed, voters=True)
        cluster.start("a", "b", "c")
        cluster.run(10.0)
        leader = cluster.leader
        assert leader is not None
        node = next(node for node in cluster.nodes if node is not leader)
        cluster.network.unlinked.add(node.node_id)
        node.drop_links()
        cluster.run(seconds)
        cluster.network.unlinked.clear()
        cluster.run(5.0)
        assert cluster.trains, seed
        assert cluster.leader is leader


def test_an_end_that_is_spoiled_before_any_node_has_seen_it_comes_again() -> None:
    """The leader got no answer to its write, so it repairs the record without the end; all workers are done."""
    cluster = Cluster("1:2", seed=143, max_restarts=2, live=True)
    cluster.start("a", "b", "c", "d")
    cluster.run(6.0)
    assert cluster.leader is cluster["a"]
    cluster.store.mute.add("a")
    for node_id in "ad":
        cluster[node_id].workers.finish()
    cluster.run(0.3)
    assert cluster.record is not None
    assert cluster.record.end is not None
    cluster.store.spoil()
    cluster.run(20.0)
    cluster.recover()
    cluster.run(20.0)
    assert cluster.record.end is not None
    assert (cluster.record.end.code, cluster.record.restarts) == (0, 0)


def test_a_leader_that_trains_alone_and_is_succeeded_stops_before_its_successor_forms_a_round() -> None:
    """It learns late that it is succeeded, and does not reach the other; the store answers slowly."""
    run = TakeoverRun()
    run.begin(seed=797, nodes="1:3", max_restarts=2, start=3, seconds=6.0, live=False)
    run.let_happen(events=10)
    run.workers(index=0, what="finish")
    run.network(index=0, leader=True, what="no store")
    run.workers(index=2, what="deaf")
    run.network(index=0, leader=False, what="partition")
    run.wait(seconds=20.0)
    run.network(index=0, leader=False, what="slow")
    run.wait(seconds=7.0)
    run.teardown()


def test_an_end_that_is_spoiled_once_those_that_have_seen_it_are_gone_is_lost() -> None:
    """The other node was cut off. It knows of no end, and goes on from the newest record that it has seen."""
    cluster = Cluster("1:3", seed=2, max_restarts=2, live=True)
    cluster.start("a", "b")
    cluster.run(3.0)
    assert cluster.leader is cluster["a"]
    cluster.partition("b")
    cluster.network.cut_off.add("b")
    cluster.run(10.0)
    cluster["a"].workers.finish()
    cluster.run(1.0)
    assert cluster.record is not None
    assert cluster.record.end is not None
    assert not cluster["a"].alive
    cluster.store.spoil()
    cluster.recover()
    assert cluster.leader is cluster["b"]
    assert cluster.record.end is None


def test_an_end_that_only_one_voter_has_reaches_all_that_come_back() -> None:
    """The leader's write of the end had no majority. The first that reads it does not leave another one alone."""
    tried = 0
    for seed in range(40):
        cluster = Cluster("1:1", seed=seed, voters=True)
        cluster.start("a", "b", "c")
        cluster.run(10.0)
        leader = cluster.leader
        assert leader is not None
        assert cluster.record is not None
        if not leader.workers.training:
            continue
        tried += 1
        for node in cluster.nodes:
            if node is not leader:
                node.die(power=False)
        leader.workers.finish()
        cluster.run(cluster.timing.dead_after)
        cluster.start(*sorted(VOTERS - {leader.node_id}))
        cluster.run(cluster.timing.dead_after + 10.0)
        assert cluster.over, f"seed {seed}: {cluster.describe()}"
        assert cluster.record.end is not None
    assert tried > 10
