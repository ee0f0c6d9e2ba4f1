"""The leader's state in every phase of its run, and its pending instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.events.facts import Cause, Outside, RunCause
from elastic_launch.events.sentences import sentence, why
from elastic_launch.events.types import AdmissionClosed, DrillEnded, Event, NewcomerLeftOut, NodeExcluded, RunEnded
from elastic_launch.failure import Failure
from elastic_launch.faults import MOST
from elastic_launch.rendezvous.leader.exclusion import FAULTS, Exclusion, Refusals
from elastic_launch.rendezvous.leader.nodes import (
    ACTIVE,
    BARRED,
    DONE,
    EXCLUDED,
    LEAVING,
    TRAINED,
    ConnectedNodes,
    Node,
    no_longer_needed,
    saver,
)
from elastic_launch.rendezvous.leader.resizing import Resizing
from elastic_launch.rendezvous.leader.restart_budget import RestartBudget
from elastic_launch.rendezvous.leader.types import Close, CommitRecord, Emit, Instruction, Send
from elastic_launch.rendezvous.record import ControlRecord, End
from elastic_launch.rendezvous.wire import messages as m

GRACE = 0.5
"""Seconds that a node which was silent for dead_after before this term has to come: it may only have lost the store."""


class RunDrill:
    """The faults of a drill: each happens once in the run, as its leader remembers it.

    Attributes:
        planned: number of faults in the plan; 0 without a drill.
    """

    def __init__(self) -> None:
        self.planned = 0
        self._landed: set[int] = set()

    def joined(self, hello: m.NodeHello) -> None:
        """Learn what a node knows, perhaps from another leader."""
        self.planned = max(self.planned, min(hello.planned, MOST))
        self._landed.update(hello.landed)

    def lands(self, fault: int) -> bool:
        """Whether a fault that is due happens now: it is in the plan and has not happened before."""
        if not 0 <= fault < self.planned or fault in self._landed:
            return False
        self._landed.add(fault)
        return True

    @property
    def missing(self) -> tuple[int, ...]:
        """The planned faults that have not happened."""
        return tuple(fault for fault in range(self.planned) if fault not in self._landed)


class LeaderState:
    """State shared by the leader's parts. Instructions are queued until :meth:`flush`.

    Attributes:
        record: the record, including what is about to be committed.
        nodes: the nodes that the leader has a link to.
        began: when this leader's term began.
        owed: members of a previous leader's round: they may be training until they connect, or are :meth:`overdue`.
        floor: rounds up to this number may have been formed.
        seen: the highest round that a node is known to have taken part in.
        continued: this run, and those that it goes on with: their nodes came before it had formed a round.
        first_round: the first that this leader has formed; 0: none yet.
        gone: members of the current round that have gone after all their workers had finished: incarnations by node id.
        departing: whether this leader's own node leaves.
        host: the node without which the run cannot go on, since no other one can lead; empty if there is none.
        exclusion: which nodes are left out because of their faults.
        refusals: which hosts are left out because their nodes could not do what the others do.
        arguments: those of the run's workers, as in :class:`elastic_launch.rendezvous.wire.messages.NodeReady`.
    """

    def __init__(
        self, record: ControlRecord, timing: Timing, now: float, dead: frozenset[str], silent: frozenset[str]
    ) -> None:
        self.record = record
        self.timing = timing
        self.nodes = ConnectedNodes()
        self.budget = RestartBudget(record)
        self.resizing = Resizing(self.nodes)
        self.began = self.turned = self.last_arrival = now
        self.owed = {member.node_id for member in record.round.members if member.incarnation not in dead}
        self._silent = {member.node_id for member in record.round.members if member.incarnation in silent}
        self.floor = max(record.round.number, record.floor)
        self.seen = record.round.number
        self.continued = {record.run}
        self.first_round = 0
        if record.repaired:
            self.owed.add("")  # unknown members may still connect, for as long as any other owed member
        self.gone: dict[str, str] = {}
        self.departing = False
        self.host = ""
        self.exclusion = Exclusion(record.faulty, now)
        self.refusals = Refusals(record.refused, record.closed_by, now)
        self.arguments = ""
        self.drill = RunDrill()
        self._reviews = self.refusals.some  # whether nodes may be marked because of refusals
        self._out: list[Instruction] = []

    @property
    def limits(self) -> Limits:
        """The run's current limits."""
        return self.record.limits

    @property
    def origin(self) -> str:
        """The number of the run that the workers' states belong to."""
        return self.record.origin or self.record.run

    @property
    def live(self) -> bool:
        """Whether the workers of the last round in which all trained could be suspended."""
        return self.resizing.prices.live

    def overdue(self, now: float) -> set[str]:
        """The owed members that count as dead, because they have not come to this leader in time."""
        waited = now - self.began
        if waited >= self.timing.dead_after:
            return set(self.owed)
        return self.owed & self._silent if waited >= self._grace else set()

    def owed_until(self) -> list[float]:
        """Times at which owed members may become overdue."""
        return [self.began + self._grace, self.began + self.timing.dead_after] if self.owed else []

    @property
    def _grace(self) -> float:
        """Seconds that nodes have that were silent before this term."""
        return min(GRACE, self.timing.dead_after)

    def members(self) -> list[Node]:
        """The nodes that have, or may have, workers of the current round."""
        return self.nodes.where(ACTIVE)

    @property
    def some_done(self) -> bool:
        """Whether all workers of some member of the current round have finished."""
        return bool(self.gone) or self.nodes.count(ACTIVE | DONE) > 0

    def release(self) -> None:
        """Release nodes that have left and stayed to serve their snapshot."""
        for node in no_longer_needed(self.nodes):
            node.released = True
            self.send(node.link, m.Released(self.record.term))

    def spares(self, node_id: str) -> bool:
        """Whether there are enough nodes without this one."""
        return len(self.nodes) - (node_id in self.nodes) >= self.limits.min_nodes

    def fault(self, node_id: str, now: float) -> None:
        """Count a fault on a node; one with too many is left out for a while if there are enough others."""
        if not self.spares(node_id):
            return
        if seconds := self.exclusion.fault(node_id, now):
            self.emit(NodeExcluded(node_id, FAULTS, seconds))
        self.review(now)

    def computed_wrong(self, node_id: str, now: float) -> None:
        """Leave out a node that has computed wrong, if there are enough others."""
        if self.spares(node_id) and not self.exclusion.excludes(node_id, now):
            self.emit(NodeExcluded(node_id, 0, self.exclusion.wrong(node_id, now)))
            self.review(now)

    def review(self, now: float) -> None:
        """Note which nodes are left out now."""
        for node_id in self.exclusion.node_ids:
            if (node := self.nodes.find(node_id)) is not None:
                node.excluded = self.exclusion.excludes(node_id, now)
        if self.refusals.some or self._reviews:
            self._reviews = self.refusals.some
            newcomers = self.nodes.where(lacks=TRAINED)
            marked = [*self.nodes.where(TRAINED | BARRED), *self.nodes.where(TRAINED | EXCLUDED)]
            for node in newcomers + marked:
                node.barred = not node.trained and self.refusals.bars(node.host, now)
                closed = bool(self.refusals.closed) and not node.trained
                node.excluded = closed or self.exclusion.excludes(node.hello.node_id, now)

    @property
    def has_trained(self) -> bool:
        """Whether a node that is there has completed a step in this run."""
        return self.nodes.count(TRAINED) > 0

    def trains(self, node: Node) -> None:
        """Note that a node has completed a step in this run."""
        if not node.trained:
            node.trained = True
            self.refusals.trains(node.host)

    def is_newcomer(self, node: Node) -> bool:
        """Whether a node has completed no step in this run, which can also go on without it."""
        return not node.trained and node.hello.node_id != self.host

    def waits_why(self, node: Node, now: float) -> Outside | AdmissionClosed | None:
        """Why a newcomer is left out for now; None if it is not."""
        if node.trained or node.active:
            return None
        if node.barred:
            return Outside("barred", self.refusals.left(node.host, now))
        return AdmissionClosed(why(self.refusals.closed)) if self.refusals.closed else None

    def refused(self, now: float) -> dict[str, Any]:
        """The fields of the record with the hosts that are left out."""
        return {"refused": self.refusals.recorded(now), "closed_by": self.refusals.closed}

    def leave_out(
        self, node: Node, code: int, cause: Cause, failure: Failure | None, now: float, *, stays: bool = False
    ) -> None:
        """Leave out a newcomer that cannot do what the others do, and its host for a while; the run goes on.

        Args:
            stays: it may stay connected, and take part again after that time.
        """
        was_closed = self.refusals.closed
        seconds = self.refusals.refuse(node.host, failure, now)
        self.commit(replace(self.record, **self.refused(now)))
        left_out = NewcomerLeftOut(node.hello.node_id, self.record.round.number, why(cause), seconds)
        self.emit(left_out)
        if not stays:
            node.leaving = True
            # Workers started under a leader that is about to leave would be started for nothing.
            self.departing = self.departing or node.hello.incarnation == self.record.leader.incarnation
            self.send(node.link, m.LeftOut(self.record.term, code, why(cause), failure))
        else:
            self.send(node.link, m.UserMessage(self.record.term, sentence(left_out)))
        if self.refusals.closed and not was_closed:
            event = AdmissionClosed(why(self.refusals.closed))
            self.emit(event)
            order = m.UserMessage(self.record.term, sentence(event))
            for other in self.nodes.where(lacks=TRAINED | LEAVING):
                self.send(other.link, order)
        self.review(now)

    def end(self, code: int, cause: RunCause, failure: Failure | None, now: float) -> None:
        """Record the run's end, and inform all nodes."""
        spent, text = self.budget.spent, why(cause)
        self.commit(replace(self.record, restarts=spent, refilled=self.budget.refilled, end=End(int(code), text)))
        order = self.end_order(failure)
        for node in self.nodes.values():
            self.send(node.link, order)
        if self.drill.planned:
            self.emit(DrillEnded(self.drill.planned, self.drill.missing))
        self.emit(RunEnded(int(code), text, spent, self.record.round.number, now - self.began))

    def end_order(self, failure: Failure | None) -> m.RunEnd:
        """The order that tells nodes of the run's recorded end."""
        end = self.record.end
        assert end is not None
        shown = failure if end.code else None
        saves = saver(self.nodes, self.record.round) if end.code else ""
        return m.RunEnd(self.record.term, end.code, end.cause, self.budget.spent, shown, saves)

    def commit(self, record: ControlRecord) -> None:
        self.record = record.renewed()
        self._out.append(CommitRecord(self.record))

    def send(self, link: int, order: m.Order) -> None:
        self._out.append(Send(link, order))

    def close(self, link: int) -> None:
        self._out.append(Close(link))

    def emit(self, event: Event) -> None:
        self._out.append(Emit(event))

    def flush(self) -> list[Instruction]:
        """Return the instructions queued since the last call."""
        out, self._out = self._out, []
        return out
