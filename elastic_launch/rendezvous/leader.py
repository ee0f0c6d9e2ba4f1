"""The leader: decides who trains together, as a pure state machine.

Reports, closed links and turns of the clock go in; instructions come out, to be carried out in order. If a ``Commit``
fails (somebody else's record stands there), the instructions behind it must be dropped and the leader with them.

Invariants, checked by the stateful tests after every event:

- a round number is committed once, and rounds are ordered by number;
- the members of a round are distinct, their ranks a permutation, their number within the limits;
- a round is formed only when every member of the one before has stopped or is dead;
- a broken round is charged once, and only for crash, hang and out of memory;
- nothing is ordered that the record does not hold yet.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_launch.config import Limits, Timing
from elastic_launch.errors import ExitCode
from elastic_launch.events import (
    Event,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    Parked,
    RestartCharged,
    RoundBroken,
    RoundFormed,
    RunEnded,
)
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.admission import refusal
from elastic_launch.rendezvous.budget import Budget
from elastic_launch.rendezvous.instructions import Broken, Close, Commit, Emit, Instruction, Node, Send
from elastic_launch.rendezvous.ranks import Candidate, rank_nodes
from elastic_launch.rendezvous.record import ControlRecord, End, Member, Round
from elastic_launch.rendezvous.verdict import Kind, kind_of

__all__ = ["COLLECT", "TURN_CAP", "LeaderMachine"]

COLLECT = 0.2
"""Seconds for which reports about a broken round are collected before it is judged, unless all are in before."""

TURN_CAP = 2.0
"""A gap between two of the leader's own turns counts as so much silence of a node at most: who slept evicts nobody."""


class LeaderMachine:
    """A leader's reign.

    Args:
        record: the record as committed when this leader took its term.
        limits, timing: the run's.
        command: the run's command in words, for refusals.
        now: the leader's monotonic clock, in seconds, here and in all methods.
        dead: incarnations of nodes whose process is known to be gone.
    """

    def __init__(
        self,
        record: ControlRecord,
        limits: Limits,
        timing: Timing,
        command: str,
        now: float,
        dead: frozenset[str] = frozenset(),
    ) -> None:
        self.record = record
        self.nodes: dict[str, Node] = {}
        self._budget = Budget(record.restarts, limits.max_restarts)
        self._limits = limits
        self._timing = timing
        self._command = command
        self._began = now
        self._turned = now
        self._running = bool(record.round.members)
        # Members of a round that another leader formed: they may train until they come here, or are silent for long.
        self._owed = {member.node_id for member in record.round.members if member.incarnation not in dead}
        self._formed_at = now
        self._broken: Broken | None = None
        self._floor = record.round.number
        self._arrivals = 0
        self._last_arrival = now
        self._parked_at: float | None = None
        self._failure: m.Failure | None = None
        self._departing = False
        self._incarnations: dict[str, list[str]] = {}
        self._out: list[Instruction] = []

    @property
    def ended(self) -> bool:
        """Whether the run's end is recorded."""
        return self.record.end is not None

    @property
    def restarts(self) -> int:
        """Restarts charged so far."""
        return self._budget.spent

    # What comes in.

    def hello(self, link: int, hello: m.Hello, now: float) -> list[Instruction]:
        """A node said hello on a new link."""
        reason = refusal(hello, self.record, self._limits, self._command)
        if reason is not None:
            self._send(link, m.Refused(self.record.term, *reason))
            self._out.append(Close(link))
            self._emit(NodeRefused(hello.node_id, reason[0]))
            return self._flush()
        if self.record.end is not None:
            self._send(link, self._end_order())
            return self._flush()
        if self._is_replaced(hello):
            self._evict_for_good(link, hello.node_id)
            return self._flush()
        self._learn(hello)
        known = self.nodes.get(hello.node_id)
        if known is not None and known.hello.incarnation == hello.incarnation:
            self._out.append(Close(known.link))
            self._relink(known, link, hello, now)
            return self._flush()
        if known is not None:
            self._lose(known, self._evict_for_good(known.link, hello.node_id), now)
        self._admit(link, hello, now)
        return self._flush()

    def report(self, link: int, report: m.Report, now: float) -> list[Instruction]:
        """A node reported; any report is a sign of life."""
        node = self._by_link(link)
        if node is None or self.ended:
            return []
        node.silence, node.heard = 0.0, now
        current = self.record.round.number
        match report:
            case m.Joined(round=number) if node.active and number == current:
                node.joined = True
            case m.Done(round=number) if node.active and number == current:
                node.joined = node.done = True
            case m.Failed(round=number, failure=failure) if number == current:
                self._failed(node, failure, now)
            case m.Stopped(store_port=port):
                node.store_port = port
                if report.round == current and (self._running or self._broken):
                    if self._running and node.active:
                        self._break(Kind.NODE_LOSS, f"node {node.hello.node_id} stopped its workers", now)
                    node.active = False
            case m.Leaving(reason=reason):
                self._leaving(node, reason, now)
        self._consider(now)
        return self._flush()

    def closed(self, link: int, now: float) -> list[Instruction]:
        """A link was closed by its node, or by the death of its process."""
        node = self._by_link(link)
        if node is None:
            return []
        if self.ended:
            del self.nodes[node.hello.node_id]
            return []
        self._lose(node, "its connection closed", now)
        self._consider(now)
        return self._flush()

    def turn(self, now: float) -> list[Instruction]:
        """Time passed; to be called after all that was received has been handled, at the latest after :meth:`wait`."""
        turned, self._turned = self._turned, now
        if self.ended:
            return []
        cap = min(TURN_CAP, self._timing.dead_after / 2)
        for node in list(self.nodes.values()):
            node.silence += min(now - max(turned, node.heard), cap)
            if node.silence >= self._timing.dead_after:
                self._out.append(Close(node.link))
                self._lose(node, f"silent for {node.silence:.1f} s", now, node.silence)
        self._consider(now)
        return self._flush()

    def wait(self, now: float) -> float:
        """Seconds until the next turn is due, 0 or more."""
        due = [now + self._timing.beat]
        timing = self._timing
        if self._broken and not self._broken.judged:
            due.append(self._broken.at + COLLECT)
        elif self._broken and any(node.active for node in self.nodes.values()):
            due.append(self._broken.at + timing.return_after)
        if not self._running:
            due.append(self._last_arrival + timing.join_settle)
            if self._parked_at is not None:
                due.append(self._parked_at + timing.min_wait)
        elif self._room():
            due.append(self._last_arrival + timing.resize_delay)
        if self._owed:
            due.append(self._began + timing.dead_after)
        return max(0.0, min([moment for moment in due if moment > now], default=now) - now)

    # Members come and go.

    def _learn(self, hello: m.Hello) -> None:
        """Take over what a member of an earlier reign knows: the record may have died with its host."""
        self._budget.spent = max(self._budget.spent, hello.seen_restarts)
        self._floor = max(self._floor, hello.seen_round)
        ahead = hello.seen_term == self.record.term and hello.seen_round > self.record.round.number
        if ahead or hello.seen_term > self.record.term:
            self._commit(replace(self.record, term=hello.seen_term + 1))

    def _is_replaced(self, hello: m.Hello) -> bool:
        """Whether a newer incarnation of the node id has been here."""
        seen = self._incarnations.setdefault(hello.node_id, [])
        if hello.incarnation not in seen:
            seen.append(hello.incarnation)
        return hello.incarnation != seen[-1]

    def _evict_for_good(self, link: int, node_id: str) -> str:
        reason = f"a newer agent with the node id {node_id} took its place"
        self._send(link, m.Evicted(self.record.term, reason, final=True))
        self._out.append(Close(link))
        return reason

    def _admit(self, link: int, hello: m.Hello, now: float) -> None:
        node = Node(hello, link, self._arrivals, now, hello.store_port, heard=now)
        self._arrivals += 1
        rank = self.record.round.index(hello.node_id, hello.incarnation)
        same_round = hello.holding == self.record.round.number and rank is not None
        # Who comes from the leader before has not heard that the round broke: it is told, and stops like the others.
        if hello.holding and not (same_round and (self._running or hello.node_id in self._owed)):
            self._send(link, m.Evicted(self.record.term, f"round {hello.holding} is over for it"))
            self._out.append(Close(link))
            return
        self._owed.discard(hello.node_id)
        if hello.holding:
            node.active = node.joined = True
            node.done = hello.done
        else:
            self._last_arrival = now
            if self._running and rank is not None:
                self._break(Kind.NODE_LOSS, f"node {hello.node_id} came to the new leader without its workers", now)
        self.nodes[hello.node_id] = node
        self._welcome(link, hello)
        if node.active and self._broken:
            self._send_break(node, self._broken)
        self._emit(NodeJoined(hello.node_id, hello.workers, hello.address, self._outlook()))
        self._consider(now)
        if not self._running and not self.ended and self._parked_at != now:
            self._send(link, m.Notice(self.record.term, self._outlook()))

    def _relink(self, node: Node, link: int, hello: m.Hello, now: float) -> None:
        """A known node comes back before its old link was seen to close; what it holds now is what counts."""
        node.link, node.silence, node.heard = link, 0.0, now
        node.store_port, node.hello = hello.store_port, hello
        if node.active and hello.holding != self.record.round.number:
            if self._running:
                self._break(Kind.NODE_LOSS, f"node {hello.node_id} came back without its workers", now)
            node.active = False
        elif node.active:
            node.joined, node.done = True, hello.done
        self._welcome(link, hello)
        if node.active and self._broken:
            self._send_break(node, self._broken)  # the first one may have been lost with the old link
        self._consider(now)

    def _welcome(self, link: int, hello: m.Hello) -> None:
        timing = self._timing
        self._send(link, m.Welcome(self.record.term, hello.node_id, timing.beat, timing.dead_after))

    def _failed(self, node: Node, failure: m.Failure, now: float) -> None:
        if self._running and node.active:
            where = f"rank {failure.rank} on node {failure.node_id}"
            self._break(kind_of(failure), f"{where}: {failure.message}", now)
        if self._broken and not self._broken.judged:
            self._broken.failures.append((now, failure))

    def _leaving(self, node: Node, reason: str, now: float) -> None:
        if node.leaving:
            return
        node.leaving = True
        # Whoever started its workers under a leader that goes would start them in vain.
        self._departing = self._departing or node.hello.incarnation == self.record.leader.incarnation
        broke = self.record.round.number if self._running and node.active else 0
        if broke:
            self._break(Kind.PREEMPTION, f"node {node.hello.node_id} leaves ({reason})", now)
        elif self._broken and not self._broken.judged and node.active:
            # Others crashed because its workers were ended before it could say so.
            self._broken.kind = min(self._broken.kind, Kind.PREEMPTION)
        self._emit(NodeLeft(node.hello.node_id, reason, broke, self._outlook()))

    def _lose(self, node: Node, cause: str, now: float, silence: float = 0.0) -> None:
        del self.nodes[node.hello.node_id]
        if node.leaving and not (self._running and node.active):
            return  # it has said so, and nobody waits for it
        text = f"node {node.hello.node_id} lost: {cause}"
        broke = self.record.round.number if self._running and node.active else 0
        if broke:
            self._break(Kind.NODE_LOSS, text, now)
        elif self._broken and not self._broken.judged and node.active:
            self._broken.kind = min(self._broken.kind, Kind.NODE_LOSS)
        self._emit(NodeLost(node.hello.node_id, cause, silence, broke, self._outlook()))

    # Rounds.

    def _break(self, kind: Kind, cause: str, now: float) -> None:
        self._running = False
        self._broken = Broken(now, kind, cause)
        number = self.record.round.number
        for node in self.nodes.values():
            if node.active:
                self._send_break(node, self._broken)
        self._emit(RoundBroken(number, kind.text, cause, now - self._formed_at, self._outlook()))

    def _send_break(self, node: Node, broken: Broken) -> None:
        number = self.record.round.number
        self._send(node.link, m.Break(self.record.term, number, broken.kind.text, broken.cause))

    def _consider(self, now: float) -> None:
        """Do what has become possible or due."""
        if self.ended:
            return
        if self._running:
            self._consider_running(now)
            return
        broken = self._broken
        active = [node for node in self.nodes.values() if node.active]
        if now - self._began >= self._timing.dead_after:
            self._owed.clear()
        if broken and not broken.judged and (not active or now - broken.at >= COLLECT):
            self._judge(broken, now)
            if self.ended:
                return
        if active and broken and now - broken.at >= self._timing.return_after:
            for node in active:
                reason = f"its workers were not stopped within return_after ({self._timing.return_after:g} s)"
                self._send(node.link, m.Evicted(self.record.term, reason))
                self._out.append(Close(node.link))
                self._lose(node, reason, now)
            active = []
        if not active and not self._owed and (broken is None or broken.judged):
            self._gather(now)

    def _consider_running(self, now: float) -> None:
        members = [node for node in self.nodes.values() if node.active]
        size = len(self.record.round.members)
        absent = [
            x for x in self.record.round.members if x.node_id not in self.nodes or not self.nodes[x.node_id].active
        ]
        lost = [x for x in absent if x.node_id not in self._owed or now - self._formed_at >= self._timing.dead_after]
        if lost:
            # Only a leader that took over a running round can miss members: these are dead, or never came to it.
            self._break(Kind.NODE_LOSS, f"node {lost[0].node_id} did not come to the new leader", now)
            self._consider(now)
        elif len(members) == size and all(node.done for node in members):
            self._end(ExitCode.DONE, "all workers finished", now)
        elif not all(node.joined for node in members):
            if now - self._formed_at >= self._timing.join_timeout:
                late = [node for node in members if not node.joined]
                names = ", ".join(node.hello.node_id for node in late)
                self._break(Kind.NODE_LOSS, f"node {names} did not start its workers within join_timeout", now)
        elif self._room() and now - self._last_arrival >= self._timing.resize_delay:
            names = ", ".join(node.hello.node_id for node in self._waiting())
            self._break(Kind.MEMBERSHIP, f"resize: node {names} waits to join", now)
            self._consider(now)

    def _room(self) -> bool:
        """Whether a running round should be resized for nodes that wait: not when some are done already."""
        members = [node for node in self.nodes.values() if node.active]
        finishing = any(node.done for node in members)
        return bool(self._waiting()) and len(members) < self._limits.max_nodes and not finishing

    def _waiting(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.active and not node.leaving]

    def _judge(self, broken: Broken, now: float) -> None:
        broken.judged = True
        spent = self._budget.spent
        ruling = self._budget.rule(broken)
        self._failure = ruling.failure
        if ruling.end is not None:
            self._end(*ruling.end, now)
        elif self._budget.spent > spent:
            charged = RestartCharged(
                self.record.round.number, ruling.kind.text, self._budget.spent, self._limits.max_restarts
            )
            self._emit(charged)

    def _gather(self, now: float) -> None:
        """Form the next round as soon as everybody it may expect is there."""
        if self._departing:
            return
        waiting = self._waiting()
        limits, first = self._limits, self._broken is None
        full = len(waiting) >= limits.max_nodes
        settled = now - self._last_arrival >= self._timing.join_settle
        if full or (len(waiting) >= limits.min_nodes and (not first or settled)):
            self._form(now)
        elif len(waiting) < limits.min_nodes and not (first and self._parked_at is None and not waiting):
            if self._parked_at is None:
                self._parked_at = now
                event = Parked(len(waiting), limits.min_nodes, self._timing.min_wait)
                if self.nodes:
                    self._emit(event)
                for node in waiting:
                    self._send(node.link, m.Notice(self.record.term, event.line()))
            elif now - self._parked_at >= self._timing.min_wait:
                cause = (
                    f"{len(waiting)} of at least {limits.min_nodes} nodes after min_wait ({self._timing.min_wait:g} s)"
                )
                self._end(ExitCode.TOO_FEW_NODES, cause, now)

    def _form(self, now: float) -> None:
        last = {member.node_id: (rank, member.incarnation) for rank, member in enumerate(self.record.round.members)}

        def last_rank(node: Node) -> int | None:
            rank, incarnation = last.get(node.hello.node_id, (None, ""))
            return rank if incarnation == node.hello.incarnation else None

        candidates = [
            Candidate(node.hello.node_id, last_rank(node), node.hello.wanted_rank, node.arrival)
            for node in self._waiting()
        ]
        chosen = [self.nodes[node_id] for node_id in rank_nodes(candidates, self._limits.max_nodes)]
        members = tuple(
            Member(x.hello.node_id, x.hello.incarnation, x.hello.workers, x.hello.address, x.store_port) for x in chosen
        )
        formed = Round(max(self._floor, self.record.round.number) + 1, members)
        cause = self._broken.cause if self._broken else "first"
        since = self._broken.at if self._broken else self._began
        self._commit(replace(self.record, round=formed, restarts=self._budget.spent))
        for node in chosen:
            node.active, node.joined, node.done = True, False, False
            self._send(node.link, m.Form(self.record.term, formed, self.restarts, cause))
        names = tuple(member.node_id for member in members)
        term = self.record.term
        self._emit(RoundFormed(formed.number, term, names, formed.world_size, self._budget.spent, cause, now - since))
        self._running, self._formed_at, self._broken, self._parked_at = True, now, None, None
        self._failure = None

    def _end(self, code: int, cause: str, now: float) -> None:
        self._running = False
        self._commit(replace(self.record, restarts=self._budget.spent, end=End(int(code), cause)))
        for node in self.nodes.values():
            self._send(node.link, self._end_order())
        self._emit(RunEnded(int(code), cause, self._budget.spent, self.record.round.number, now - self._began))

    def _end_order(self) -> m.RunEnd:
        assert self.record.end is not None
        failure = self._failure if self.record.end.code else None
        return m.RunEnd(self.record.term, self.record.end.code, self.record.end.cause, self._budget.spent, failure)

    def _outlook(self) -> str:
        """What is next, in words."""
        limits = self._limits
        # Whoever still stops its workers for a broken round will be there for the next one.
        waiting = sum(not node.leaving and not (self._running and node.active) for node in self.nodes.values())
        if self.ended:
            return "the run has ended"
        if self._running:
            members = sum(node.active for node in self.nodes.values())
            if not waiting:
                return "training goes on"
            return "training is resized" if members < limits.max_nodes else f"round is full, {waiting} spare"
        if waiting >= limits.max_nodes:
            return "a round forms"
        if waiting < limits.min_nodes:
            return f"waiting for nodes: {waiting} of at least {limits.min_nodes}"
        if self._broken:
            return "a new round forms"
        return f"the first round forms at {limits.max_nodes} nodes or {self._timing.join_settle:g} s without an arrival"

    # Output.

    def _commit(self, record: ControlRecord) -> None:
        self.record = record.renewed()
        self._out.append(Commit(self.record))

    def _send(self, link: int, order: m.Order) -> None:
        self._out.append(Send(link, order))

    def _emit(self, event: Event) -> None:
        self._out.append(Emit(event))

    def _flush(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _by_link(self, link: int) -> Node | None:
        return next((node for node in self.nodes.values() if node.link == link), None)
