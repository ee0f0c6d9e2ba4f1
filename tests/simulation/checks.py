"""Invariants that must hold after every event, whatever happens to the hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_launch.errors import ExitCode
from elastic_launch.events.types import CauseFound, Event, RestartCharged, RoundBroken
from elastic_launch.rendezvous.continuity import UNSEEN
from elastic_launch.rendezvous.leader.restart_budget import FREE as NEVER_CHARGED
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.kernel import Host
    from simulation.leader import SimLeader
    from simulation.node import SimNode

__all__ = ["Checks"]

FREE = ("membership", "node loss", "preemption")


class Checks:
    """Observes every write, order, event and start of workers in a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.record: ControlRecord | None = None
        self.rounds: dict[int, tuple[str, ...]] = {}
        self.log: list[str] = []
        self._leaders: dict[int, str] = {}
        self._charged: set[tuple[int, int]] = set()
        self._free: set[tuple[int, int]] = set()
        self._taken_over: set[tuple[int, int]] = set()
        self._left_behind: set[tuple[str, int]] = set()
        self._obeyed: dict[str, int] = {}
        self._know_the_end: list[SimNode] = []
        self._was_repaired = False
        self._charged_ahead = False  # whether the record has the cost of the current round, which is broken
        self.spent = 0  # the most restarts that a record of this run, or of one whose nodes came over, has had

    # The record.

    def written(self, value: bytes, host: Host) -> None:
        record, before = ControlRecord.parse(value), self.record
        self._note(f"term {record.term} {record.leader.incarnation} writes round {record.round.number} {record.end}")
        self.record = record
        assert self._leaders.setdefault(record.term, record.leader.incarnation) == record.leader.incarnation, (
            "two leaders in one term"
        )
        if before is None or record == before:  # a retried write, after a stranger has spoiled the first one
            return
        # A node that repairs a spoiled record may not know the last rounds, their members and their cost; nor the end,
        # if no node knows it that still lives: the record was the only other place where it stood.
        repairs = record.repaired and record.floor != before.floor
        ended = before.end is not None and not (repairs and not any(node.alive for node in self._know_the_end))
        assert not ended or replace(record, nonce="") == replace(before, nonce=""), "a change after the end"
        assert record.nonce != before.nonce
        assert repairs or record.term > before.term or (record.term, record.leader) == (before.term, before.leader)
        assert repairs or before.restarts <= record.restarts
        assert record.restarts <= self.cluster.limits.max_restarts
        if repairs:
            assert record.round.number in {0, *self.rounds}
            # A node that was frozen through an earlier repair does not know the numbers after it. They must not be used
            # again, and nodes that know them find its record spoiled.
            last = max(self.rounds, default=0)
            assert record.floor > last or (self._was_repaired and last > record.floor + UNSEEN)
            self._was_repaired = True
        elif record.round != before.round:
            self._formed(before, record)
        else:
            # A leader whose write of the next round got no answer takes over from itself, and knows what it charged.
            itself = record.leader.incarnation == before.leader.incarnation and record.term > before.term
            assert record.restarts <= before.restarts + itself or record.end is not None, "charged without a new round"
            self._charged_ahead = self._charged_ahead or record.restarts > before.restarts
        if record.end is not None:
            self._ended(record)

    def _formed(self, before: ControlRecord, record: ControlRecord) -> None:
        number = record.round.number
        assert number not in self.rounds, "two rounds with one number"
        assert number > before.round.number
        # Nodes have told the leader of a record without rounds what the one before, which is lost, had spent.
        spent = before.restarts if before.round.number else max(before.restarts, self.spent)
        assert record.restarts <= spent + (not self._charged_ahead), "a broken round was charged twice"
        self._charged_ahead = False
        self.spent = max(self.spent, record.restarts)
        names = tuple(member.node_id for member in record.round.members)
        assert len(set(names)) == len(names), "ranks are no permutation"
        assert self.cluster.limits.min_nodes <= len(names) <= self.cluster.limits.max_nodes
        self.rounds[number] = names
        # Its process may be dead by now: the write was in progress.
        leader = [x for x in self.cluster.leaders if x.node.incarnation == record.leader.incarnation][-1]
        self._assert_others_stopped(leader, record, known=before.round.number > 0)

    def _assert_others_stopped(self, leader: SimLeader, record: ControlRecord, *, known: bool) -> None:
        """All members of earlier rounds are idle or dead, if the leader's record has any.

        If the record was lost with its host, nothing tells of a member that has not come yet. Its round lacks the
        host's workers, or else goes on, which is checked last.
        """
        now, dead_after = leader.kernel.now, self.cluster.timing.dead_after
        for node in self.cluster.nodes:
            if not node.workers.training or node.workers.training >= record.round.number:
                continue
            silent_for = now - max(leader.began, leader.heard.get(node.incarnation, 0.0))
            replaced = node is not self.cluster[node.node_id]  # a newer agent with its id shows that it is gone
            late = (node.incarnation, node.workers.training)  # an earlier round need not have waited for it
            excused = replaced or node.incarnation in leader.closed or silent_for >= dead_after - 1e-6
            excused = excused or not known or self._led_before(leader, node)
            assert excused or late in self._left_behind, (
                f"{node.name} still trains in round {node.workers.training}, {silent_for:.2f} s silent"
            )
            assert record.round.index(node.node_id, node.incarnation) is None, "a member that still trains"
            self._left_behind.add(late)
        for number, names in self.rounds.items():
            if number < record.round.number:
                self._assert_not_whole(leader, number, names)

    def _assert_not_whole(self, leader: SimLeader, number: int, names: tuple[str, ...]) -> None:
        """The workers of a past round that has lost one of them can do no step; if all are there, they train on."""
        there = [node for node in self.cluster.nodes if node.workers.training == number and not node.frozen]
        whole = len(there) == len(names) and all(self.cluster.network.joins(there[0], node) for node in there)
        # A leader counts a node whose link has closed as dead at once; the node finds out when it comes back.
        ends_soon = any(node.incarnation in leader.ended for node in there)
        # Known: the leader on etcd trains on in a round of several nodes, since all of etcd may be out of reach.
        led = [x for x in self.cluster.leaders if x.node in there and self.cluster.voters is None and len(there) > 1]
        assert not whole or ends_soon or led, f"{', '.join(names)} go on in round {number}, beside the next one"

    def _led_before(self, leader: SimLeader, node: SimNode) -> bool:
        """Whether a node that voters elected before need not be waited for: dead_after has passed for it, too.

        Until it thaws it cannot know that. Workers that can train without those of others must be dead.
        """
        terms = [x for x in self.cluster.leaders if x.node is node]
        if node.incarnation not in leader.silent or not terms:
            return False
        alone = len(self.rounds[node.workers.training]) == 1
        return leader.began - terms[-1].sure >= self.cluster.timing.dead_after - 1e-6 and (node.frozen or not alone)

    def _ended(self, record: ControlRecord) -> None:
        assert record.end is not None
        if record.end.code == ExitCode.DONE:
            for member in record.round.members:
                (node,) = (x for x in self.cluster.all if x.incarnation == member.incarnation)
                assert record.round.number in node.workers.done, "done, but not everywhere"
        elif record.end.code != ExitCode.TOO_FEW_NODES:
            assert record.restarts == self.cluster.limits.max_restarts, "ended with budget left"

    # Leaders.

    def ordered(self, leader: SimLeader, order: m.Order) -> None:
        self._acts_in_time(leader)
        assert self._leaders[order.term] == leader.node.incarnation, "an order of a term that it does not lead"
        if isinstance(order, m.Form):
            assert self.rounds.get(order.round.number) == tuple(x.node_id for x in order.round.members)
        if isinstance(order, m.RunEnd):
            assert self.record is not None
            assert self.record.end is not None

    def _acts_in_time(self, leader: SimLeader) -> None:
        unsure = self.cluster.kernel.now - leader.sure
        assert self.cluster.voters is None or unsure < self.cluster.timing.dead_after, "another node may lead"

    def emitted(self, leader: SimLeader, event: Event) -> None:
        self._acts_in_time(leader)
        self._note(f"{leader.node.incarnation} {event}")
        match event:
            case RoundBroken(round=number, kind=kind, lasted_s=lasted, exit_code=code) if kind in FREE:
                self._free.add((leader.machine.record.term, number))
                # A member may bring the cause later, if the round was taken over, or ended by a worker's SIGTERM.
                if lasted is None or code is not None:
                    self._taken_over.add((leader.machine.record.term, number))
            case CauseFound(round=number, kind=kind):
                key = (leader.machine.record.term, number)
                if kind in FREE:
                    self._free.add(key)
                elif key in self._taken_over:
                    self._free.discard(key)
            case RestartCharged(round=number, idle=idle):
                key = (leader.machine.record.term, number)
                assert key not in self._free or idle > NEVER_CHARGED + self.cluster.limits.max_nodes, (
                    "charged for what is free"
                )
                assert key not in self._charged, "charged twice"
                self._charged.add(key)

    # Nodes.

    def obeyed(self, node: SimNode, event: Any) -> None:
        """An order reached the agent itself."""
        if isinstance(event, m.RunEnd):
            self._know_the_end.append(node)
        self._note(f"to {node.incarnation}: {str(event)[:120]}")
        term = getattr(event, "term", None)
        if term is not None:
            assert term >= self._obeyed.get(node.incarnation, 0), "an order of a lower term was obeyed"
            self._obeyed[node.incarnation] = term

    def starts(self, node: SimNode, form: m.Form) -> None:
        number = form.round.number
        assert form.round.index(node.node_id, node.incarnation) is not None
        assert number in self.rounds, "workers of a round that was never recorded"
        assert self.record is not None
        if number < self.record.round.number:
            # The order waited in a stopped process, or on a link that both sides were giving up: it must end soon.
            assert node.incarnation in self.cluster.disturbed, "workers of a past round are started"
            self._left_behind.add((node.incarnation, number))

    def finished(self, node: SimNode, code: int) -> None:
        record = self.record
        if record is not None and record.end is not None and node.view.cause == record.end.cause:
            assert code == record.end.code
        if code == ExitCode.DONE:
            assert record is not None
            assert record.end is not None, "a node reports success before the run has ended"
            assert record.end.code == ExitCode.DONE

    def _note(self, text: str) -> None:
        self.log.append(f"{self.cluster.kernel.now:.3f} {text}")

    def always(self) -> None:
        """Check after every event."""
        live: dict[int, set[str]] = {}
        for node in self.cluster.nodes:
            if node.workers.training:
                live.setdefault(node.workers.training, set()).add(node.node_id)
                assert node.workers.training in self.rounds
        for number, names in live.items():
            assert names <= set(self.rounds[number])
