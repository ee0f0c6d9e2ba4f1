"""What a leader knows in every phase of its run, and what it is about to say."""

from __future__ import annotations

from dataclasses import replace

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.events.types import Event, RunEnded
from elastic_launch.rendezvous.leader.leavers import no_longer_needed
from elastic_launch.rendezvous.leader.resizing import Resizing
from elastic_launch.rendezvous.leader.restart_budget import RestartBudget
from elastic_launch.rendezvous.leader.types import Close, Commit, Emit, Instruction, Node, Send
from elastic_launch.rendezvous.record import ControlRecord, End
from elastic_launch.rendezvous.wire import messages as m

__all__ = ["LeaderState"]


class LeaderState:
    """What the leader's parts share. What follows from a decision waits until :meth:`flush`.

    Attributes:
        record: with what is about to be committed.
        nodes: that the leader has a link to, by node id.
        began: when this leader's term began.
        turned: when the last turn of the clock was.
        last_arrival: when a node last came.
        owed: members of another leader's round: they may train until they come here, or are silent for long.
        floor: rounds up to this number may have been formed.
        departing: this leader's own node leaves.
    """

    def __init__(self, record: ControlRecord, timing: Timing, now: float, dead: frozenset[str]) -> None:
        self.record = record
        self.timing = timing
        self.nodes: dict[str, Node] = {}
        self.budget = RestartBudget(record.restarts, record.limits.max_restarts, record.idle, record.last_step)
        self.resizing = Resizing(self.nodes)
        self.began = self.turned = self.last_arrival = now
        self.owed = {member.node_id for member in record.round.members if member.incarnation not in dead}
        self.floor = max(record.round.number, record.floor)
        if record.repaired:
            self.owed.add("")  # members that nobody here knows of may come, for as long as any that is owed
        self.departing = False
        self._out: list[Instruction] = []

    @property
    def limits(self) -> Limits:
        """The run's limits as they are now."""
        return self.record.limits

    def members(self) -> list[Node]:
        """The nodes that have, or may have, workers of the present round."""
        return [node for node in self.nodes.values() if node.active]

    def release(self) -> None:
        """Let nodes go that have left, and stayed for what others may need of them."""
        for node in no_longer_needed(self.nodes):
            node.released = True
            self.send(node.link, m.Released(self.record.term))

    def end(self, code: int, cause: str, failure: m.Failure | None, now: float) -> None:
        """Record the run's end, and tell all nodes."""
        spent = self.budget.spent
        self.commit(replace(self.record, restarts=spent, end=End(int(code), cause)))
        for node in self.nodes.values():
            self.send(node.link, self.end_order(failure))
        self.emit(RunEnded(int(code), cause, spent, self.record.round.number, now - self.began))

    def end_order(self, failure: m.Failure | None) -> m.RunEnd:
        """What nodes are told of the run's end, which is recorded."""
        end = self.record.end
        assert end is not None
        return m.RunEnd(self.record.term, end.code, end.cause, self.budget.spent, failure if end.code else None)

    def commit(self, record: ControlRecord) -> None:
        self.record = record.renewed()
        self._out.append(Commit(self.record))

    def send(self, link: int, order: m.Order) -> None:
        self._out.append(Send(link, order))

    def close(self, link: int) -> None:
        self._out.append(Close(link))

    def emit(self, event: Event) -> None:
        self._out.append(Emit(event))

    def flush(self) -> list[Instruction]:
        """Return what is to be done since the last call."""
        out, self._out = self._out, []
        return out
