"""How a leader's rounds are formed, drained, broken and ended: the part of its machine that decides on the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elastic_launch.config import LONGEST_WAIT, Limits, Timing
from elastic_launch.errors import ExitCode
from elastic_launch.events import (
    CauseFound,
    Event,
    NodeLost,
    Parked,
    RestartCharged,
    RoundBroken,
    RoundDrained,
    RoundDraining,
    RoundFormed,
    RunEnded,
    counted,
)
from elastic_launch.rendezvous import messages as m
from elastic_launch.rendezvous.budget import Budget, Ruling
from elastic_launch.rendezvous.instructions import Broken, Close, Commit, Draining, Emit, Instruction, Node, Send
from elastic_launch.rendezvous.leavers import is_needed, no_longer_needed, sources
from elastic_launch.rendezvous.outlook import Outlook
from elastic_launch.rendezvous.ranks import choose
from elastic_launch.rendezvous.record import ControlRecord, End, Member, Round
from elastic_launch.rendezvous.resizing import Resizing, prepared, waiting
from elastic_launch.rendezvous.verdict import Kind, judge, kind_of, root_cause, words

__all__ = ["COLLECT", "LATE", "MOST_SECONDS", "Rounds"]

COLLECT = 0.2
"""Seconds for which reports about a broken round are collected before it is judged, unless all are in before."""

LATE = 3.0
"""Seconds for which a run that ends by a failure waits for nodes that still stop their workers, and what these say.

Their agents wait for these anyway, and no round waits for it.
"""

MOST_SECONDS = 86400.0
"""A drain's limit of so much, or more, is none."""


class Rounds:
    """A leader's rounds; see :class:`elastic_launch.rendezvous.leader.LeaderMachine`.

    What follows from a decision waits in ``_out`` until :meth:`_flush`.
    """

    def __init__(
        self,
        record: ControlRecord,
        timing: Timing,
        command: str,
        now: float,
        dead: frozenset[str] = frozenset(),
    ) -> None:
        self.record = record
        self.nodes: dict[str, Node] = {}
        self._owners: dict[int, str] = {}
        self._budget = Budget(record.restarts, record.limits.max_restarts, record.idle, record.last_step)
        self._resizing = Resizing(self.nodes)
        self._limits = record.limits
        self._timing = timing
        self._command = command
        self._began = now
        self._turned = self._awake = now
        self._running = bool(record.round.members)
        # Members of a round that another leader formed: they may train until they come here, or are silent for long.
        self._owed = {member.node_id for member in record.round.members if member.incarnation not in dead}
        self._formed_at = now
        self._taken_over = self._running
        self._drain: Draining | None = None
        self._broken: Broken | None = None
        self._floor = max(record.round.number, record.floor)
        if record.repaired:
            self._owed.add("")  # members that nobody here knows of may come, for as long as any that is owed
        self._arrivals = 0
        self._last_arrival = now
        self._parked_at: float | None = None
        self._failure: m.Failure | None = None
        self._ruling: Ruling | None = None  # by which the run ends, once it is known what happened
        self._not_before = now  # the next round is not formed earlier
        self._begun: int | None = None  # the step at which the present round has begun to train
        self._departing = False
        self._fetching = self._running  # whether members of the round may still need what leavers serve
        self._ending = ""  # why the run ends as soon as no worker is left
        self._incarnations: dict[str, list[str]] = {}
        self._compared: set[tuple[tuple[str, ...], str]] = set()  # in what nodes were found to differ
        self._out: list[Instruction] = []

    @property
    def ended(self) -> bool:
        """Whether the run's end is recorded."""
        return self.record.end is not None

    @property
    def restarts(self) -> int:
        """Restarts charged so far."""
        return self._budget.spent

    @property
    def limits(self) -> Limits:
        """The run's limits as they are now."""
        return self._limits

    @property
    def timing(self) -> Timing:
        """The run's deadlines."""
        return self._timing

    @property
    def running(self) -> bool:
        """Whether a round trains; it may be draining."""
        return self._running

    @property
    def draining(self) -> bool:
        """Whether the present round is being drained."""
        return self._drain is not None

    @property
    def outlook(self) -> str:
        """What comes next, in words."""
        return self._outlook()

    def too_large(self, standing: ControlRecord, cause: str, now: float) -> list[Instruction]:
        """The store holds ``standing`` and will never take the last commit: the run ends, as every round would fail."""
        # The members are left out of the last record, which must fit.
        self.record = replace(standing, round=Round(standing.round.number))
        self._end(ExitCode.RENDEZVOUS, cause, now)
        return self._flush()

    def give_way(self, cause: str, now: float) -> list[Instruction]:
        """The run cannot go on beside another one: it ends."""
        if not self.ended:
            self._end(ExitCode.RENDEZVOUS, cause, now)
        return self._flush()

    def _lose(self, node: Node, cause: str, now: float, silence: float = 0.0) -> None:
        del self.nodes[node.hello.node_id]
        if node.leaving and not (self._running and node.active):
            return  # it has said so, and nobody waits for it
        text = f"node {node.hello.node_id} lost: {cause}"
        broke = self.record.round.number if self._running and node.active else 0
        if broke:
            self._break(Kind.NODE_LOSS, text, now)
        elif node.active:
            self._impose(Kind.NODE_LOSS, text)
        self._emit(NodeLost(node.hello.node_id, cause, silence, broke, self._outlook()))

    def _stop_round(self, kind: Kind, cause: str, seconds: float | None, now: float) -> None:
        """Drain the round if all can within the seconds (None: however long it takes), else break it."""
        in_time = seconds is None or seconds > 0  # and no NaN
        deadline = None if seconds is None or seconds >= MOST_SECONDS else now + seconds
        if self._drain is not None and in_time:
            if self._ending and not self._drain.final:
                self._drain.final = True
                for node in self.nodes.values():
                    if node.active:
                        self._send_drain(node, self._drain, now)
            self._drain.deadline = min((x for x in (self._drain.deadline, deadline) if x is not None), default=None)
        elif in_time and self._can_drain():
            self._order_drain(kind, cause, deadline, now)
        else:
            self._break(kind, cause, now)

    def _can_drain(self) -> bool:
        members = [node for node in self.nodes.values() if node.active]
        return len(members) == len(self.record.round.members) and all(node.ready and not node.done for node in members)

    def _order_drain(self, kind: Kind, cause: str, deadline: float | None, now: float) -> None:
        self._drain = Draining(now, kind, cause, deadline, final=bool(self._ending))
        for node in self.nodes.values():
            if node.active:
                self._send_drain(node, self._drain, now)
        seconds = None if deadline is None else round(deadline - now, 3)
        self._emit(RoundDraining(self.record.round.number, kind.text, cause, seconds))

    def _send_drain(self, node: Node, drain: Draining, now: float) -> None:
        seconds = None if drain.deadline is None else round(max(0.0, drain.deadline - now), 3)
        number = self.record.round.number
        order = m.Drain(self.record.term, number, drain.kind.text, drain.cause, seconds, drain.final)
        self._send(node.link, order)

    def _break(self, kind: Kind, cause: str, now: float) -> None:
        """End the round for what befell its nodes."""
        lasted, nodes = now - self._formed_at, self._limits.max_nodes
        free = self._budget.spares(kind, lasted=lasted, begun=self._begun, nodes=nodes)
        self._end_round(Broken(now, kind, cause), kind, self._outlook if free else lambda: "")

    def _break_for(self, failure: m.Failure, now: float) -> None:
        """End the round because a worker failed; what it costs, and so whether another one forms, is judged later."""
        broken = Broken(now, None, words(failure), [(now, failure)])
        self._end_round(broken, kind_of(failure), lambda: "")

    def _end_round(self, broken: Broken, kind: Kind, outlook: Callable[[], str]) -> None:
        self._running = False
        self._drain = None
        self._broken = broken
        for node in self.nodes.values():
            if node.active:
                self._send_break(node, broken, kind)
        number = self.record.round.number
        lasted = None if self._taken_over else broken.at - self._formed_at
        self._emit(RoundBroken(number, kind.text, broken.cause, lasted, outlook()))

    def _send_break(self, node: Node, broken: Broken, kind: Kind | None = None) -> None:
        number = self.record.round.number
        kind = judge(broken.imposed, broken.failures) if kind is None else kind
        self._send(node.link, m.Break(self.record.term, number, kind.text, broken.cause))

    def _impose(self, kind: Kind, cause: str) -> None:
        """Something befell a node of the broken round: that is what made workers elsewhere fail."""
        broken = self._broken
        if broken is None or broken.judged or (broken.imposed is not None and broken.imposed <= kind):
            return
        broken.imposed = kind
        self._found(broken, kind, cause)

    def _also_failed(self, broken: Broken, failure: m.Failure, now: float) -> None:
        """A further worker of the broken round had failed; it may be the root cause."""
        broken.failures.append((now, failure))
        if broken.imposed is not None:
            return
        first = root_cause(broken.failures)
        if first is failure:
            self._found(broken, kind_of(failure), words(failure))
            if self._failure is not None:
                self._failure = failure
            if broken.judged and kind_of(failure).is_final and self._ruling is None:
                self._ruling, self._failure, broken.judged_at = self._budget.end(kind_of(failure)), failure, now

    def _found(self, broken: Broken, kind: Kind, cause: str) -> None:
        if cause != broken.cause:
            broken.cause = cause
            event = CauseFound(self.record.round.number, kind.text, cause)
            self._emit(event)
            for node in self.nodes.values():
                if node.hello.incarnation != self.record.leader.incarnation:  # which tells the event
                    self._send(node.link, m.Notice(self.record.term, event.line()))

    def _consider(self, now: float) -> None:
        """Do what has become possible or due."""
        if self.ended:
            return
        if now - self._began >= self._timing.dead_after:
            self._owed.discard("")
        if self._running:
            if self._drain is not None:
                self._consider_draining(self._drain, now)
            else:
                self._consider_running(now)
            return
        broken = self._broken
        active = [node for node in self.nodes.values() if node.active]
        if now - self._began >= self._timing.dead_after:
            if self._owed:
                self._impose(Kind.NODE_LOSS, f"node {', '.join(sorted(self._owed))} did not come to the new leader")
            self._owed.clear()
        # A member that died with the leader before makes the others crash: who is missing must be known first.
        if broken and not broken.judged and not self._owed and (not active or now - broken.at >= COLLECT):
            self._judge(broken, now)
        if broken and self._ruling is not None:
            if not active or now - broken.judged_at >= LATE:
                self._end(*self._budget.verdict(self._ruling, broken), now)
            return
        if broken:
            for node in [node for node in active if now >= self._due_back(node, broken)]:
                limit = self._due_back(node, broken) - broken.at
                reason = f"its workers were not stopped within {limit:g} s, its shutdown timeout and return_after"
                self._send(node.link, m.Evicted(self.record.term, reason))
                self._out.append(Close(node.link))
                self._lose(node, reason, now)
                active.remove(node)
        if not active and not self._owed and (broken is None or broken.judged):
            if now >= self._not_before or self._ending:
                self._gather(now)
            if not self._running:
                self._release()

    def _due_back(self, node: Node, broken: Broken) -> float:
        """When a member must have stopped its workers: it may give them all of its shutdown timeout."""
        grace = node.hello.shutdown_timeout
        # What a node says may be anything.
        return broken.at + self._timing.return_after + (grace if 0 <= grace <= LONGEST_WAIT else 0.0)

    def _consider_running(self, now: float) -> None:
        members = [node for node in self.nodes.values() if node.active]
        size = len(self.record.round.members)
        if len(members) == size and all(node.ready or node.done for node in members):
            self._fetching = False
        if not self._fetching:
            self._release()
        if len(members) < size and (lost := self._lost(now)):
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
        elif len(members) == size > self._limits.max_nodes and not any(node.done for node in members):
            self._stop_round(Kind.MEMBERSHIP, f"resize: at most {counted(self._limits.max_nodes, 'node')}", None, now)
            self._consider(now)
        elif self._room() and now - self._last_arrival >= self._timing.resize_delay:
            if not self._resizing.pays(self._limits.max_nodes, now):
                self._skip_resize(now)
                return
            names = ", ".join(node.hello.node_id for node in prepared(self.nodes))
            self._stop_round(Kind.MEMBERSHIP, f"resize: node {names} waits to join", None, now)
            self._consider(now)

    def _release(self) -> None:
        """Let nodes go that have left, and stayed for what others may need of them."""
        for node in no_longer_needed(self.nodes):
            node.released = True
            self._send(node.link, m.Released(self.record.term))

    def _lost(self, now: float) -> list[Member]:
        """Members of the running round that are not here, and need not be waited for."""
        due = now - self._formed_at >= self._timing.dead_after
        here = {node.hello.node_id for node in self.nodes.values() if node.active}
        return [x for x in self.record.round.members if x.node_id not in here and (due or x.node_id not in self._owed)]

    def _consider_draining(self, drain: Draining, now: float) -> None:
        left = [node for node in self.nodes.values() if node.active]
        number, everybody = self.record.round.number, len(self.record.round.members)
        if not left:
            self._running, self._drain = False, None
            self._broken = Broken(drain.at, drain.kind, drain.cause)
            took = round(now - drain.at, 6)
            if self._ending:
                self._ending += f" after step {drain.step}, {drain.kept}"
            self._emit(RoundDrained(number, drain.step, drain.kind.text, drain.cause, took, self._outlook()))
            self._consider(now)
        elif len(left) == everybody and all(node.done for node in left):
            self._end(ExitCode.DONE, "all workers finished", now)
        elif all(node.done for node in left):
            self._break(drain.kind, f"{drain.cause}; some had finished, others had not", now)
        elif drain.deadline is not None and now >= drain.deadline:
            late = ", ".join(node.hello.node_id for node in left)
            self._break(drain.kind, f"{drain.cause}; node {late} did not stop in time", now)

    def _room(self) -> bool:
        return self._resizing.has_room(len(self.record.round.members), self._limits.max_nodes)

    def _skip_resize(self, now: float) -> None:
        """Say to the user, and to those who wait, that they wait in vain."""
        event = self._resizing.skip(self._limits.max_nodes, now)
        if event is not None:
            self._emit(event)
            for node in prepared(self.nodes):
                self._send(node.link, m.Notice(self.record.term, event.line()))

    def _candidates(self) -> list[Node]:
        """Who waits for the next round. After the first one nobody waits for imports if enough others are there."""
        ready = prepared(self.nodes)
        later = self._broken is not None and len(ready) >= self._limits.min_nodes
        return ready if later else waiting(self.nodes)

    def _judge(self, broken: Broken, now: float) -> None:
        broken.judged, broken.judged_at = True, now
        if self._ending:
            return  # no further round is wanted
        lasted, nodes = broken.at - self._formed_at, self._limits.max_nodes
        ruling = self._budget.rule(broken, lasted=lasted, begun=self._begun, nodes=nodes)
        if broken.imposed is None and (ruling.kind.is_fault or ruling.ends):
            self._failure = root_cause(broken.failures)
        if ruling.ends:
            self._ruling = ruling
        elif ruling.charged:
            self._not_before = now + ruling.delay
            number, kind = self.record.round.number, ruling.kind.text
            spent, most, idle = self._budget.spent, self._limits.max_restarts, ruling.idle
            self._emit(RestartCharged(number, kind, spent, most, self._outlook(), idle, ruling.delay))

    def _gather(self, now: float) -> None:
        """Form the next round as soon as everybody it may expect is there."""
        if self._ending:
            self._end(ExitCode.TERMINATED, self._ending, now)
            return
        there = waiting(self.nodes)
        limits, first = self._limits, self._broken is None
        if self._departing and not (
            len(there) >= limits.min_nodes
            and is_needed(self.nodes, self.record.leader.incarnation)
            and sources(self.nodes, there)
        ):
            return
        full = len(there) >= limits.max_nodes
        settled = now - self._last_arrival >= self._timing.join_settle
        if full or (len(there) >= limits.min_nodes and (not first or settled)):
            self._form(now)
        elif len(there) < limits.min_nodes and not (first and self._parked_at is None and not there):
            if self._parked_at is None:
                self._parked_at = now
                event = Parked(len(there), limits.min_nodes, self._timing.min_wait)
                if self.nodes:
                    self._emit(event)
                for node in there:
                    self._send(node.link, m.Notice(self.record.term, event.line()))
            elif now - self._parked_at >= self._timing.min_wait:
                waited = f"--min-wait {self._timing.min_wait:g} s"
                cause = f"{len(there)} of at least {limits.min_nodes} nodes (--nnodes) after {waited}"
                self._end(ExitCode.TOO_FEW_NODES, cause, now)

    def _form(self, now: float) -> None:
        chosen = choose(self._candidates(), self.record.round, self._limits.max_nodes)
        members = tuple(
            Member(x.hello.node_id, x.hello.incarnation, x.hello.workers, x.hello.address, x.store_port, x.hello.role)
            for x in chosen
        )
        formed = Round(max(self._floor, self.record.round.number) + 1, members)
        cause = self._broken.cause if self._broken else "first"
        since = self._broken.at if self._broken else self._began
        budget = self._budget
        self._commit(replace(self.record, round=formed, restarts=budget.spent, idle=budget.idle, last_step=budget.mark))
        served = sources(self.nodes, chosen)
        self._fetching = bool(served)
        # One for all: it is encoded once.
        order = m.Form(self.record.term, formed, self.restarts, cause, served, self._limits.max_restarts)
        for node in chosen:
            node.active, node.joined, node.ready, node.done = True, False, False, False
            self._send(node.link, order)
        names = tuple(member.node_id for member in members)
        term = self.record.term
        self._emit(RoundFormed(formed.number, term, names, formed.world_size, self._budget.spent, cause, now - since))
        resized = self._broken is not None and self._broken.imposed is Kind.MEMBERSHIP
        self._resizing.formed(since if resized else None)
        self._running, self._formed_at, self._broken, self._parked_at = True, now, None, None
        self._taken_over = False
        self._failure, self._begun = None, None

    def _end(self, code: int, cause: str, now: float) -> None:
        self._running = False
        self._commit(replace(self.record, restarts=self._budget.spent, end=End(int(code), cause)))
        for node in self.nodes.values():
            self._send(node.link, self.end_order())
        self._emit(RunEnded(int(code), cause, self._budget.spent, self.record.round.number, now - self._began))

    def end_order(self) -> m.RunEnd:
        """What nodes are told of the run's end, which is recorded."""
        assert self.record.end is not None
        failure = self._failure if self.record.end.code else None
        return m.RunEnd(self.record.term, self.record.end.code, self.record.end.cause, self._budget.spent, failure)

    def _outlook(self) -> str:
        if (self._ending or self._ruling is not None) and not self.ended:
            return "the run ends"
        nodes = self.nodes.values()
        outlook = Outlook(
            self._limits,
            self._timing.join_settle,
            waiting=sum(not node.leaving and not (self._running and node.active) for node in nodes),
            members=sum(node.active for node in nodes),
            ended=self.ended,
            running=self._running,
            broken=self._broken is not None,
            draining=self._drain is not None,
            pays=self._resizing.pays(self._limits.max_nodes, self._turned),
        )
        return str(outlook)

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
