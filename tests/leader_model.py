"""A leader under test with simulated nodes that obey it as agents do, and invariants that must hold at every step.

Messages from the leader wait until a node reads them, so orders and reports cross.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.errors import ExitCode
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import Event, NodeLost, RestartCharged, RoundBroken
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.leader.restart_budget import FREE
from elastic_launch.rendezvous.leader.types import Close, CommitRecord, Emit, Instruction, Send
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.testing import FakeClock

__all__ = ["TIMING", "LeaderModel", "SimNode"]

TIMING = {"return_after": 10.0, "join_timeout": 15.0, "min_wait": 300.0}

WORKERS = 2
"""Workers of each node."""

START = 3.0
"""Seconds that prompt nodes take to start workers ahead of a place."""


@dataclass(eq=False)
class SimNode:
    """An agent and its workers.

    Attributes:
        link: its link to the leader, as far as it knows; None: it has to connect.
        unread: orders that the leader has sent over the link; None stands for its end.
        holding: the round that it was ordered to form and has not reported as stopped.
        training: whether workers train; suspended ones do not.
        starting: whether it still has to report them as started.
        ready: whether it has reported that they train.
        stopping: whether it is ending or suspending them.
        drained: whether its workers stop after the same step as all others.
        lost: which workers were killed, so that their replacements start ahead: "", "one" or "all".
        slots: the local ranks that it offers; empty for all.
        told: those that the leader knows.
        ahead: whether its workers start ahead of a place, or have started.
        importing: whether they could not begin at once.
        trained: whether it has completed a step.
        back_at: when workers that start ahead are there, if it is prompt.
        spoke: when the leader last heard from it.
    """

    node_id: str
    incarnation: str
    spoke: float
    link: int | None = None
    unread: deque[m.Order | None] = field(default_factory=deque)
    holding: int = 0
    training: bool = False
    starting: bool = False
    ready: bool = False
    stopping: bool = False
    drained: bool = False
    lost: str = ""
    slots: tuple[int, ...] = ()
    told: tuple[int, ...] = ()
    ahead: bool = False
    importing: bool = False
    trained: bool = False
    back_at: float = 0.0
    done: bool = False
    finished: int = 0  # the last round in which its leader knows all its workers to have finished
    leaving: bool = False
    frozen: bool = False
    gone: bool = False
    seen_term: int = 0
    seen_round: int = 0
    seen_restarts: int = 0

    def forget_workers(self) -> None:
        self.holding, self.training, self.starting, self.stopping, self.done = 0, False, False, False, False
        self.drained = self.ready = False

    @property
    def incomplete(self) -> bool:
        """Whether workers start ahead of a place."""
        return self.importing or bool(self.slots)


class LeaderModel:
    """One leader, or several in succession, with the nodes' ends of the links."""

    def prepare(self, limits: Limits, timing: Timing, *, live: bool = False) -> None:
        self.limits = limits
        self.timing = timing
        self.live = live  # whether workers that train can be suspended
        self.clock = FakeClock(1000.0)
        self.nodes: list[SimNode] = []
        self.owners: dict[int, SimNode] = {}
        self.half_open: list[int] = []
        self.nonces: set[str] = set()
        self.begun = 0  # the step at which rounds begin to train
        self._take_office()

    def _take_office(self) -> None:
        """A leader begins with an empty record, as the c10d host does."""
        leader = Leader("host", "h", "10.0.0.1", 1)
        self.record = ControlRecord("run", "digest", 1, leader, limits=self.limits).renewed()
        self.machine = LeaderMachine(self.record, self.timing, "train.py", self.clock.now())
        self.accepted: dict[int, SimNode] = {}  # links known to the leader, with the nodes at their ends
        self.greeted: list[SimNode] = []  # nodes that said hello to this leader, in order of the first time
        self.released: set[SimNode] = set()  # nodes whose live workers of an older round the leader need not wait for
        self.floor = 0
        self.charged: set[int] = set()
        self.free: set[int] = set()  # rounds broken for a reason that costs nothing
        self.failed: set[int] = set()  # rounds in which a worker failed by itself
        self.preempted: set[int] = set()  # rounds in which one was ended by a signal

    # Helpers.

    @property
    def now(self) -> float:
        return self.clock.now()

    def _where(self, condition: Callable[[SimNode], bool]) -> list[SimNode]:
        return [node for node in self.nodes if not node.gone and condition(node)]

    def _pick(self, index: int, condition: Callable[[SimNode], bool]) -> SimNode | None:
        found = self._where(condition)
        return found[index % len(found)] if found else None

    def _newest(self, node: SimNode) -> bool:
        return [other for other in self.greeted if other.node_id == node.node_id][-1] is node

    # Nodes talk to the leader.

    def _say(self, node: SimNode, report: m.Report) -> None:
        """Send a report, if there is a link; otherwise the next hello contains what matters."""
        if node.link is None:
            return
        if node.link in self.accepted:
            node.spoke = self.now
            current = self.record.round.number
            if isinstance(report, m.Stopped | m.RankOffer):
                node.told = report.slots
            if isinstance(report, m.Done):
                node.finished = report.round
            if isinstance(report, m.Leaving) and node.holding == current != node.finished:
                self.free.add(current)
            if isinstance(report, Failure) and report.round == current:
                if report.kind == "preemption":
                    self.preempted.add(current)
                elif not report.symptom:
                    self.failed.add(current)
        self._apply(self.machine.report(node.link, report, self.now))

    def _hang_up(self, link: int) -> None:
        """The leader sees the end of a link."""
        node = self.accepted.pop(link, None)
        if node is not None:
            self.released.add(node)
            if node.holding == self.record.round.number != node.finished:
                self.free.add(node.holding)
        self._apply(self.machine.closed(link, self.now))

    def _connect(self, node: SimNode) -> None:
        if self.machine.ended:
            node.forget_workers()  # it finds the end in the record, before it says hello
            node.gone = True
            return
        link = len(self.owners) + 1
        node.link, self.owners[link] = link, node
        node.unread.clear()
        node.spoke, node.told = self.now, node.slots
        if node not in self.greeted:
            self.greeted.append(node)
        self.floor = max(self.floor, node.seen_round)
        hello = m.NodeHello(
            version=m.PROTOCOL_VERSION,
            run_id="run",
            digest="digest",
            command="train.py",
            limits=str(self.limits),
            node_id=node.node_id,
            incarnation=node.incarnation,
            workers=WORKERS,
            address="host",
            store_port=7000,
            holding=node.holding,
            done=node.done,
            joined=node.training and not node.starting,
            ready=node.ready,
            live=node.ready and self.live,
            importing=node.importing,
            slots=node.slots,
            trained=node.trained,
            seen_term=node.seen_term,
            seen_round=node.seen_round,
            seen_restarts=node.seen_restarts,
        )
        self._apply(self.machine.hello(link, hello, self.now))

    def _read(self, node: SimNode) -> None:
        """A node obeys the orders that have arrived."""
        while node.unread and not node.gone and not node.frozen:
            order = node.unread.popleft()
            if order is None:
                link, node.link = node.link, None
                assert link is not None
                self._apply(self.machine.closed(link, self.now))
                return
            if order.term < node.seen_term:
                continue
            node.seen_term = order.term
            match order:
                case m.Form(round=formed, restarts=restarts):
                    assert formed.number > node.seen_round
                    assert formed.index(node.node_id, node.incarnation) is not None
                    assert restarts >= node.seen_restarts
                    assert not node.training
                    if not node.leaving:
                        node.holding = node.seen_round = formed.number
                        node.seen_restarts = restarts
                        node.training = node.starting = True
                        node.importing = node.ahead = False
                case m.Break(round=number) if number == node.holding:
                    if node.training:
                        node.stopping = True
                    else:
                        self._stopped(node)
                case m.DrainRound(round=number) if number == node.holding and node.training:
                    node.stopping = node.drained = True
                case m.Reach(round=number):
                    assert not node.training
                    self._say(node, m.Reached(number, ""))
                case m.StartAhead():
                    assert not node.training
                    assert not node.holding
                    if node.ahead and not node.importing:
                        self._say(node, m.Imported())
                    elif not node.ahead:
                        self._start_ahead(node)
                        node.importing = True
                case m.Evicted(final=final):
                    node.gone = final
                    node.ahead = node.importing = False
                    self._stopped(node)
                case m.LeftOut():
                    assert not node.trained, "a node that has trained is left out"
                    node.leaving = True
                    if node.training:
                        node.stopping = True
                    else:
                        self._stopped(node)
                case m.RunEnd():
                    node.forget_workers()
                    node.gone = True
                    if node.link is not None:
                        self._hang_up(node.link)

    def _started(self, node: SimNode) -> None:
        node.starting = False
        self._say(node, m.Joined(node.holding))

    def _stopped(self, node: SimNode) -> None:
        """All workers of a node are reaped or suspended."""
        number, drained = node.holding, node.drained
        if number:
            lost = node.lost if node.ready and self.live else ""
            node.slots = (0,) if lost == "one" else ()
            node.importing = lost == "all"
            if lost:
                self._start_ahead(node)
        node.lost = ""
        node.forget_workers()
        if node.leaving:
            node.gone = True
            if node.link is not None:
                self._hang_up(node.link)
        elif number:
            step = self.begun if drained else -1
            how = {"importing": node.importing, "slots": node.slots, "trained": node.trained}
            self._say(node, m.Stopped(number, 7000, step, **how))

    def _start_ahead(self, node: SimNode) -> None:
        node.ahead, node.back_at = True, self.now + START

    def _complete(self, node: SimNode) -> None:
        """Workers that started ahead are there."""
        if node.importing:
            node.importing = False
            self._say(node, m.Imported())
        if node.slots:
            node.slots = ()
            self._say(node, m.RankOffer(()))

    def _train(self, node: SimNode) -> None:
        node.ready = True
        self._say(node, m.NodeReady(node.holding, step=self.begun, live=self.live))

    def _complete_step(self, node: SimNode) -> None:
        node.trained = True
        self._say(node, m.ProgressBeat(node.holding, self.begun + 1))

    # The leader decides.

    def _apply(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case CommitRecord(record=record):
                    self._committed(record)
                case Send(link=link, order=order):
                    self._sent(link, order)
                case Close(link=link):
                    node = self.accepted.pop(link, None)
                    if node is not None:
                        self.released.add(node)
                    if self.owners[link].link == link:
                        self.owners[link].unread.append(None)
                case Emit(event=event):
                    self._emitted(event)

    def _committed(self, record: ControlRecord) -> None:
        before, self.record = self.record, record
        assert record.nonce not in self.nonces
        self.nonces.add(record.nonce)
        assert before.end is None, "a change after the end"
        assert record.term >= before.term
        assert before.restarts <= record.restarts <= self.limits.max_restarts
        if record.round != before.round:
            self._formed(before, record)
        if record.end is not None:
            self._ended(record)

    def _formed(self, before: ControlRecord, record: ControlRecord) -> None:
        assert record.end is None
        assert record.round.number > max(before.round.number, self.floor)
        members = record.round.members
        assert self.limits.min_nodes <= len(members) <= self.limits.max_nodes
        assert len({member.node_id for member in members}) == len(members)
        chosen = [node for node in self.nodes if record.round.index(node.node_id, node.incarnation) is not None]
        assert len(chosen) == len(members)
        for node in chosen:
            index = record.round.index(node.node_id, node.incarnation)
            assert index is not None
            assert members[index].local_ranks == (node.told or tuple(range(WORKERS))), "workers that it does not offer"
            assert node in self.accepted.values(), "a member without a link"
            assert not node.training, "a member that has workers still"
        ranks = [worker.rank for index in range(len(members)) for worker in record.round.ranks_of(index)]
        assert ranks == list(range(record.round.world_size)), "the ranks must be a permutation"
        for node in self.nodes:
            if before.round.index(node.node_id, node.incarnation) is not None and node.training:
                assert node in self.released, "workers of two rounds train"

    def _ended(self, record: ControlRecord) -> None:
        assert record.end is not None
        if record.end.code == ExitCode.DONE:
            for node in self.nodes:
                if record.round.index(node.node_id, node.incarnation) is not None:
                    assert node.finished == record.round.number
        elif record.end.code == ExitCode.DO_NOT_RETRY:
            assert record.restarts == 1, "a mistake that was not tried again, or more than once"
        elif record.end.code != ExitCode.TOO_FEW_NODES:
            assert record.restarts == self.limits.max_restarts

    def _sent(self, link: int, order: m.Order) -> None:
        assert order.term == self.record.term, "an order of a term that the record does not hold"
        node = self.owners[link]
        match order:
            case m.Welcome():
                self.accepted[link] = node
                if node.done:
                    node.finished = node.holding
                if node.holding != self.record.round.number:
                    self.released.discard(node)
            case m.Form(round=formed):
                assert formed == self.record.round, "a round that the record does not hold"
                assert self.record.end is None
                self.released.discard(node)
            case m.Break(round=number):
                assert number == self.record.round.number
            case m.StartAhead(round=number):
                assert self.live
                assert number == self.record.round.number
                assert self.record.round.index(node.node_id, node.incarnation) is None, "a member has workers"
            case m.Evicted(final=True):
                assert not self._newest(node), "the newest agent of a node id is sent away"
            case m.RunEnd():
                assert self.record.end is not None
            case m.Refused():
                raise AssertionError("a fitting node was refused")
        if node.link == link:
            assert order.term >= node.seen_term, "the node would not obey"
            node.unread.append(order)

    def _emitted(self, event: Event) -> None:
        sentence(event)
        match event:
            case RoundBroken(round=number, kind=kind):
                if kind in ("membership", "node loss"):
                    self.free.add(number)
            case RestartCharged(round=number, idle=idle):
                assert number not in self.charged, "charged twice"
                free = number in self.free or (number in self.preempted and number not in self.failed)
                assert not free or idle > FREE + self.limits.max_nodes, "charged for what is free"
                self.charged.add(number)
            case NodeLost(node=node_id, detect_s=detect_s) if detect_s > 0:
                lost = [node for node in self.greeted if node.node_id == node_id][-1]
                assert self.now - lost.spoke >= self.timing.dead_after - 1e-6, "lost before it was silent for so long"

    def _start(self, node_id: str) -> None:
        node = SimNode(node_id, f"{node_id}{len(self.nodes)}", self.now)
        self.nodes.append(node)
        self._connect(node)

    def _finish(self, node: SimNode) -> None:
        node.training, node.done = False, True
        self._say(node, m.Done(node.holding))

    def _leave(self, node: SimNode) -> None:
        self._say(node, m.Leaving("SIGTERM"))
        node.leaving = True
        if node.training:
            node.stopping = True
        else:
            self._stopped(node)

    def _die(self, node: SimNode) -> None:
        """A host or an agent dies; its guard kills the workers."""
        node.gone = True
        if node.link is not None:
            self._hang_up(node.link)
        node.forget_workers()

    def _lose_the_leader(self) -> None:
        """The host of the run dies with all that only it knew; another agent takes over at the endpoint."""
        for node in self.nodes:
            node.link = None
            node.unread.clear()
            if node.training:
                node.stopping = True
        self.half_open.clear()
        self._take_office()

    def _beat(self) -> None:
        for node in self._where(lambda node: node.link is not None and not node.frozen):
            self._say(node, m.Beat())

    def _advance(self, seconds: float, *, prompt: bool) -> None:
        end = self.now + seconds
        while self.now < end and not self.machine.ended:
            self.clock.advance(min(self.machine.wait(self.now), end - self.now))
            self._beat()
            if prompt:
                self._do_all()
            self._apply(self.machine.turn(self.now))

    def _do_all(self) -> None:
        for node in list(self.nodes):
            if node.gone or node.frozen:
                continue
            self._read(node)
            if node.starting and not node.gone:
                self._started(node)
            if node.stopping and not node.gone:
                self._stopped(node)
            if self.live and node.training and not (node.starting or node.ready or node.gone):
                self._train(node)
            if node.incomplete and self.now >= node.back_at and not node.gone:
                self._complete(node)
            if not node.gone and node.link is None:
                self._connect(node)

    def _assert_trains(self) -> None:
        number = self.record.round.number
        formed = [node for node in self.nodes if self.record.round.index(node.node_id, node.incarnation) is not None]
        members = [node for node in formed if not node.gone]
        assert number
        assert all(node.finished == number for node in formed if node.gone), "it goes on without workers that train"
        assert len(formed) == len(self.record.round.members)
        for node in members:
            assert node.holding == number
            assert node.training or node.done
            assert not node.stopping
        finishing = any(node.finished == number for node in formed)
        world = WORKERS * len(formed)
        assert self.record.round.world_size == world or finishing, "not all workers take part"
        left_out = {name for name, node in self.machine.nodes.items() if node.barred or node.excluded}
        there = len({node.node_id for node in self._where(lambda node: node.node_id not in left_out)})
        assert len(formed) >= min(there, self.limits.max_nodes) or finishing, "not all take part"
