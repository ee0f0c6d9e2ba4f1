"""The hosts of one run, the faults that hit them, and the required outcome."""

from __future__ import annotations

import itertools

from elastic_agents.policy_types import Phase
from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.rendezvous.record import ControlRecord, Leader
from simulation.checks import Checks
from simulation.kernel import Kernel
from simulation.leader import SimLeader
from simulation.network import Network, SimStore
from simulation.node import SimNode
from simulation.voters import SimVoters

__all__ = ["RECOVERY", "Cluster"]

TIMING = Timing(join_settle=1.0, min_wait=600.0, return_after=10.0, join_timeout=300.0, read_timeout=4.0)

RECOVERY = 60.0
"""Simulated seconds within which a run without further faults must train again."""


class Cluster:
    """Nodes that share a store.

    Attributes:
        nodes: those that are alive, including frozen ones.
        all: these and all earlier ones.
        disturbed: incarnations that existed when a process was frozen or the network was faulty.
        live: whether workers can be suspended.
        voters: the nodes that keep the record; None: it is in a store elsewhere.
    """

    def __init__(
        self,
        nodes: str = "1:3",
        *,
        seed: int = 0,
        max_restarts: int = 100,
        timing: Timing = TIMING,
        live: bool = False,
        voters: bool = False,
    ) -> None:
        self.live = live
        low, _, high = nodes.partition(":")
        self.limits = Limits(int(low), int(high or low), max_restarts)
        self.timing = timing
        self.grace = 3.0
        self.checks = Checks(self)
        self.kernel = Kernel(seed, self.checks.always)
        self.network = Network(self.kernel)
        self.voters = SimVoters(self, self.network, self.checks.written) if voters else None
        self.store = self.voters or SimStore(self.network, self.checks.written)
        self.all: list[SimNode] = []
        self.leaders: list[SimLeader] = []
        self.disturbed: set[str] = set()
        self._ports = itertools.count(1)

    @property
    def nodes(self) -> list[SimNode]:
        return [node for node in self.all if node.alive]

    @property
    def record(self) -> ControlRecord | None:
        return self.checks.record

    def __getitem__(self, node_id: str) -> SimNode:
        return [node for node in self.all if node.node_id == node_id][-1]

    def host(self, node_id: str) -> SimNode | None:
        found = [node for node in self.all if node.node_id == node_id]
        return found[-1] if found else None

    def next_port(self) -> int:
        return next(self._ports)

    def leader_at(self, leader: Leader) -> SimLeader | None:
        for leading in reversed(self.leaders):
            if leading.port == leader.port and leading.node.incarnation == leader.incarnation and leading.node.alive:
                return leading
        return None

    @property
    def leader(self) -> SimNode | None:
        """The leader according to the record, if it is alive."""
        record = self.record
        found = [node for node in self.nodes if record and node.incarnation == record.leader.incarnation]
        return found[0] if found else None

    def start(self, *node_ids: str) -> None:
        for node_id in node_ids:
            incarnation = f"{node_id}{sum(node.node_id == node_id for node in self.all) + 1}"
            self.all.append(SimNode(self, node_id, incarnation))

    def run(self, seconds: float) -> None:
        self.kernel.run(seconds)

    def drain(self, number: int) -> bool:
        """Have all workers of a round stop after the same step, if all of them train and reach each other."""
        there = [node for node in self.nodes if node.workers.training == number and not node.frozen]
        if len(there) < len(self.checks.rounds[number]) or not all(self.network.joins(there[0], x) for x in there):
            return False
        for node in there:
            node.workers.drain()
        return True

    # Faults.

    def lost_peer(self, lost: SimNode, number: int) -> None:
        for node in self.nodes:
            if node.workers.training == number and self.network.joins(lost, node):
                node.workers.miss_a_peer(number)

    def freeze(self, node: SimNode) -> None:
        node.frozen = True
        self.disturb()

    def thaw(self, node: SimNode) -> None:
        self.kernel.thaw(node)

    def partition(self, *node_ids: str) -> None:
        """Cut these hosts off from the others; the store stays reachable from both sides."""
        self.network.groups = dict.fromkeys(node_ids, 1)
        self.disturb()
        self.network.change()

    def slow_down(self, seconds: float) -> None:
        self.network.slow = seconds
        self.disturb()

    def disturb(self) -> None:
        self.disturbed.update(node.incarnation for node in self.nodes)

    def heal(self) -> None:
        """End all lasting faults."""
        self.network.groups, self.network.slow = {}, 0.0
        self.network.cut_off.clear()
        self.network.unlinked.clear()
        self.store.down = False
        self.store.mute.clear()
        self.store.late.clear()
        self.network.change()
        for node in self.nodes:
            node.workers.deaf = False
            self.thaw(node)

    # Required outcome.

    @property
    def trains(self) -> bool:
        """Whether all living nodes (up to the maximum) train in one round, or have finished there.

        Nodes do not count that the leader leaves out because of their workers' faults.
        """
        record, nodes = self.record, self.nodes
        if record is None or not nodes or any(node.view.leaving is not None for node in nodes):
            return False
        number = record.round.number
        members = [node for node in nodes if record.round.index(node.node_id, node.incarnation) is not None]
        finished = any(node.view.phase is Phase.FINISHED for node in members)
        # No step can be agreed on with workers that have finished: the others train on to their own end.
        works = {Phase.RUNNING, Phase.FINISHED, *([Phase.DRAINING] if finished else [])}
        well = all(
            number in (node.workers.training, *node.workers.done)
            and node.view.phase in works
            and node.view.round == number
            for node in members
        )
        complete = len(members) == len(record.round.members)
        wanted = [node for node in nodes if node in members or not self._leaves_out(node)]
        full = len(members) == min(len(wanted), self.limits.max_nodes) or finished
        others = all(not node.workers.training for node in nodes if node not in members)
        return bool(members) and well and complete and full and others

    def _leaves_out(self, node: SimNode) -> bool:
        leader = self.leader
        known = leader.leading.machine.nodes.get(node.node_id) if leader is not None and leader.leading else None
        return known is not None and known.excluded

    def recover(self) -> None:
        """Without further faults, the run trains or has ended.

        Raises:
            AssertionError: if that does not happen within RECOVERY seconds.
        """
        self.heal()
        end = self.kernel.now + self.timing.dead_after + RECOVERY
        while self.kernel.now < end and not self.over and not self.trains:
            self.run(1.0)
        assert self.over or self.trains, self.describe()

    @property
    def over(self) -> bool:
        """Whether the run and every node have ended, or no node is left."""
        return not self.nodes

    def describe(self) -> str:
        lines = [f"at {self.kernel.now:.2f} the record is {self.record}"]
        for node in self.nodes:
            leading = node.leading
            leads = f" leads term {leading.machine.record.term} alive={leading.alive}" if leading is not None else ""
            lines.append(f"{node.incarnation}: {node.view} trains {node.workers.training} {node.side.hello}{leads}")
        return "\n".join(lines)
