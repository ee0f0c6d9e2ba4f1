"""An agent's process in an explored world: the real policy and the real node's side of the link.

``connect``, ``ended`` and ``look`` follow ``Membership`` and ``ElectedBackend``, as the simulation's nodes do, but each
of their steps is a move of the world.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_agents import policy_types as v
from elastic_agents.policy import decide
from elastic_launch.errors import StoreError
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.backends.succession import Succession, Takeover
from elastic_launch.rendezvous.leader import types as to_do
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.node.failure_detector import FailureDetector
from elastic_launch.rendezvous.node.machine import NEXT_ATTEMPT, NodeMachine, Search
from elastic_launch.rendezvous.node.membership import RETRY
from elastic_launch.rendezvous.node.membership_events import LinkDown, RendezvousLost
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from explore.workers import ExploredWorkers, order_of

if TYPE_CHECKING:
    from explore.run_world import RunWorld

__all__ = ["COMMAND", "END", "Agent", "Link", "Office"]

COMMAND = "train.py"

END = None
"""What is read from a link that the other side has closed."""

GRACE, SUSPENSION = 3.0, 2.0
"""Seconds that workers have after SIGTERM, and to leave a round."""


class Link:
    """A connection: what is under way in both directions, and which of its ends are open."""

    __slots__ = ("agent", "down", "node_open", "number", "office", "office_open", "up")

    def __init__(self, agent: Agent, office: Office, number: int) -> None:
        self.agent, self.office, self.number = agent, office, number
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.node_open = self.office_open = True

    @property
    def through(self) -> bool:
        """Whether anything arrives; what is sent while it does not arrives later."""
        return self.office.world.joins(self.agent, self.office.node)

    def close(self, side: str) -> None:
        """Close one end; what was sent before still arrives, incoming messages are lost."""
        if side == "node" and self.node_open:
            self.node_open = False
            self.down.clear()
            if self.office_open:
                self.up.append(END)
        elif side == "office" and self.office_open:
            self.office_open = False
            self.up.clear()
            if self.node_open:
                self.down.append(END)

    def reset(self) -> None:
        """A device in between ends it: both sides see that, and messages under way are lost."""
        self.up.clear()
        self.down.clear()
        if self.office_open:
            self.up.append(END)
        if self.node_open:
            self.down.append(END)


class Agent:
    """One agent with its workers.

    Attributes:
        alive: its process runs, or is frozen.
        frozen: its process and its workers are stopped.
        hangs_until: until then only its process is stopped, and its workers run on; then its guard stops these.
        unheard: what its workers have done since it was stopped.
        cut: its host and the others do not reach each other; all of them reach the store.
        silent: its host is off, so that it sends no answers.
        due: the times at which events reach the policy.
        retry_at: when it tries to connect, while it has no link.
        dialed: the record whose leader does not answer until then.
        code: its exit code, or None.
    """

    def __init__(self, world: RunWorld, node_id: str, incarnation: str) -> None:
        self.world = world
        self.name = self.node_id = node_id
        self.incarnation = incarnation
        self.alive, self.frozen, self.silent, self.cut = True, False, False, False
        self.hangs_until: float | None = None
        self.unheard: list[v.Event] = []
        self.code: int | None = None
        self.view = v.View(ahead=v.AheadWorkers(slow=world.slow))
        self.workers = ExploredWorkers(self)
        self.side = NodeMachine()
        timing = world.timing
        self.succession = Succession(incarnation, timing.dead_after)
        self.detector = FailureDetector(timing.dead_after, timing.beat)
        self.search = Search(timing, world.now)
        self.due: list[tuple[float, v.Event]] = []
        self.link: Link | None = None
        self.former: list[Link] = []
        self.retry_at: float | None = world.now
        self.dialed: ControlRecord | None = None
        self.record: ControlRecord | None = None
        self.office: Office | None = None
        self.led_by = ""
        self.sure: float | None = None
        self.answered = self.closing = False
        self.asked = 0
        limits = str(world.limits)
        self.side.begin(
            m.NodeHello(
                m.PROTOCOL_VERSION,
                "run",
                "digest",
                COMMAND,
                limits,
                node_id,
                incarnation,
                world.nproc,
                f"host-{node_id}",
                1,
                replica_size=world.replica_size,
            )
        )

    def describe(self) -> str:
        return f"{self.incarnation}: {self.view} {self.side.hello}"

    # Its process.

    def die(self, *, silent: bool = False) -> None:
        """Kill its process, upon which the guard kills the workers; or switch its host off without a trace."""
        self.alive, self.silent, self.frozen = False, silent, False
        self.hangs_until, self.unheard = None, []
        self.workers.die()
        if self.office is not None:
            self.office.over = True
            for link in list(self.office.links.values()):
                if silent:
                    link.office_open = False
                    link.up.clear()
                else:
                    link.close("office")
            self.office.links.clear()
        for link in [self.link, *self.former]:
            if link is not None and silent:
                link.node_open = False
                link.down.clear()
            elif link is not None:
                link.close("node")
        self.link, self.former, self.retry_at, self.dialed, self.due = None, [], None, None, []

    @property
    def idle(self) -> bool:
        """Whether its process is stopped."""
        return self.frozen or self.hangs_until is not None

    def thaw(self) -> None:
        self.frozen, self.hangs_until = False, None
        if self.link is not None:
            self.judge(self.detector.turn(self.world.now))
        else:
            self.judge()
        unheard, self.unheard = self.unheard, []
        for event in unheard:
            self.hear(event)

    def guard(self) -> bool:
        """Let its guard stop the workers of an agent that is stopped, in time; return whether it did."""
        if self.hangs_until is None or self.world.now < self.hangs_until:
            return False
        self.frozen, self.hangs_until = True, None
        return True

    # Its policy.

    def hear(self, event: v.Event) -> None:
        """An event reaches the policy, and its actions are carried out."""
        if self.code is not None or not self.alive:
            return
        if self.idle:
            self.unheard.append(event)
            return
        world = self.world
        world.met(f"policy {self.view.phase.value}", event)
        world.checks.obeyed(self, event)
        facts = v.NodeFacts(world.nproc, self.node_id, replica_size=world.replica_size)
        self.view, actions = decide(self.view, event, facts)
        for action in actions:
            self._carry_out(action)

    def _later(self, seconds: float, event: v.Event) -> None:
        self.due.append((self.world.now + seconds, event))
        self.due.sort(key=lambda item: item[0])

    def _carry_out(self, action: v.Action) -> None:
        number, workers = self.view.round, self.workers
        if order := order_of(action):
            workers.tell(order, getattr(action, "local_ranks", None))
        match action:
            case v.StartWorkers(form=form):
                self.world.checks.starts(self, form)
                self.asked = 0
                workers.start(action, self.view.slots)
                self._say(m.Joined(form.round.number))
            case v.StartWorkersAhead(local_ranks=ranks):
                workers.start_ahead(ranks)
            case v.KillAhead(local_ranks=ranks):
                workers.kill_ahead(ranks)
            case v.GivePlace(local_rank=rank):
                workers.give_place(rank)
            case v.Terminate():
                self._later(GRACE, v.GraceOver(number))
            case v.SuspendWorkers():
                self._later(SUSPENSION, v.SuspendOver(number))
            case v.AskStop(seconds=seconds):
                self.asked = number
                if seconds is not None:
                    self._later(seconds, v.DrainOver(number))
            case v.Later(seconds=seconds, event=event):
                self._later(seconds, event)
            case v.ReportFailure(local_rank=rank) | v.ReportDisconnected(local_rank=rank):
                self._say(self._failure(rank, alive=isinstance(action, v.ReportDisconnected)))
            case v.ReportUnfit(local_rank=rank):
                self._say(m.Unfit(replace(self._failure(rank, alive=False), rank=None)))
            case v.ReportReady(round=ready):
                lives = self.view.live == self.view.alive
                self._say(m.NodeReady(ready, step=self.world.steps, live=self.world.live and lives))
            case v.ReportStopped(round=stopped, drained=step, importing=importing, slots=slots):
                self._say(m.Stopped(stopped, 1, step, importing=importing, slots=slots))
            case m.RankOffer() | m.Imported() | m.Done() | m.Leaving():
                self._say(action)
            case v.AwaitCopies():
                self.due.insert(0, (self.world.now, v.CopiesDone()))  # nothing is in memory here
            case v.Finish(code=code):
                self.code = code
                self.world.checks.finished(self, code)
                self.world.leaves(self)

    def _failure(self, rank: int, *, alive: bool) -> Failure:
        code = 0 if alive else self.workers.codes.get(rank, 1)
        kind = "preemption" if code in (-15, -2) else "crash"
        symptom = "broken connection" if alive or rank in self.workers.symptoms else ""
        number = self.view.round
        first = next((x for x in self.world.rounds_of(number) if x.node_id == self.node_id), None)
        place = None if first is None else self.world.rank_of(number, self.node_id, rank)
        return Failure(self.node_id, kind, place, rank, 42, code, ran=60.0, round=number, symptom=symptom, alive=alive)

    def _say(self, report: m.Report) -> None:
        self.side.say(report, self.world.now)
        self.flush()

    def flush(self) -> None:
        if self.link is not None:
            for report in self.side.take():
                self.link.up.append(report)

    # Its membership.

    def judge(self, gap: float = 0.0) -> bool:
        """Find out whether others may consider this node lost; return whether that is news."""
        if self.record is None or self.code is not None:
            return False
        leads = self.record.leader.incarnation == self.incarnation
        sure = -math.inf if self.sure is None else self.sure
        found = self.detector.judge(self.world.now, gap, self.world.now - sure if leads else None)
        if found is None:
            return False
        self.hear(replace(found, leader=self.led_by))
        return True

    def connect(self) -> None:
        """Look for the leader, perhaps take over from it, and connect to it."""
        world, now = self.world, self.world.now
        self.retry_at = None
        self.judge()
        if self.dialed is not None:
            record, self.dialed = self.dialed, None
            self._failed(record, refused=False)
            return
        record = world.record
        self.succession.looked(0.0, failed=False)
        me = Leader(self.node_id, self.incarnation, f"host-{self.node_id}", 1)
        if record is None:
            record = ControlRecord("run", "digest", 1, me, limits=world.limits, run="01")
            self._take_over(record.renewed(), Takeover("first"))
        elif record.end is not None:
            self.closing = True
            self.hear(m.RunEnd(record.term, record.end.code, record.end.cause, record.restarts))
            return
        else:
            leading = self.office is not None and self.office.alive
            takeover = self.succession.decide(record, now, leading=leading)
            if takeover is not None:
                record = replace(record, term=record.term + 1, leader=me)
                self._take_over(record.renewed(), takeover)
        self._dial(world.record)

    def _take_over(self, record: ControlRecord, takeover: Takeover) -> None:
        if self.office is not None:
            self.office.end()
        self.succession.tries(record.term, takeover)
        self.world.write(record, self)
        self.succession.reached()
        self.office = Office(self, record, takeover)
        self.world.leaders.append(self.office)
        self.sure = self.world.now

    def _dial(self, record: ControlRecord | None) -> None:
        assert record is not None
        self.record = record
        host = self.world.incarnation(record.leader.incarnation)
        office = None if host is None else host.office
        if host is None or host.silent or not self.world.joins(self, host):
            self.dialed, self.retry_at = record, self.world.now + NEXT_ATTEMPT
            return
        if not host.alive or office is None or office.over or office.machine.record.term < record.term:
            self._failed(record, refused=True)
            return
        self.link = office.accept(self)
        self.answered = False
        self.detector.linked(self.world.now)
        self.side.greet(self.world.now, record.term)
        self.flush()

    def _failed(self, record: ControlRecord, *, refused: bool) -> None:
        now = self.world.now
        self.succession.unreachable(record, now, refused=refused)
        self.judge()
        if self.search.failed(now):
            self.hear(LinkDown("refused" if refused else "timed out", gone=self.search.gone))
        if self.search.over(now):
            self.hear(RendezvousLost(StoreError("given up.")))
        elif self.code is None and self.alive:
            self.retry_at = now + RETRY

    def ended(self, *, silent: bool = False) -> None:
        """Its link has ended, or was silent for dead_after."""
        link, self.link = self.link, None
        assert link is not None
        assert self.record is not None
        now = self.world.now
        if silent:
            self.former.append(link)
        else:
            link.close("node")
        self.retry_at = now
        if self.answered:
            self.search.linked()
            self.search.lost(now)
        if silent:
            self.search.fell_silent()
            seen = self.side.hello.seen_round
            silence = self.world.timing.dead_after
            self.succession.unreachable(self.record, now, refused=False, silent_for=silence, seen_round=seen)
            if self.answered:
                self.hear(LinkDown("silent", gone=False))
        if not self.answered:
            self._failed(self.record, refused=False)

    def read(self) -> None:
        """Read a message of the leader."""
        link = self.link
        assert link is not None
        order = link.down.popleft()
        if order is END:
            self.ended()
            return
        self.answered = True
        now = self.world.now
        if self.side.obey(order, now):
            self.succession.reached()
            self._notice(order)
        self.detector.heard(now)

    def _notice(self, order: m.Order) -> None:
        match order:
            case m.Welcome(leader=leader):
                self.led_by = leader
                while self.former:
                    self.former.pop().close("node")
            case m.Refused(reason=reason):
                raise AssertionError(f"a fitting node is refused: {reason}")
            case m.Reach(round=number):
                self._say(m.Reached(number, ""))
            case m.Form():
                self.detector.formed()
                self.hear(order)
            case m.StartAhead() | m.DrainRound() | m.Break() | m.Evicted() | m.RunEnd() | m.Released() | m.LeftOut():
                self.closing = self.closing or isinstance(order, m.RunEnd)
                self.hear(order)

    def may_connect(self) -> bool:
        """Whether it is time to connect."""
        at = self.retry_at
        return self.link is None and at is not None and at <= self.world.now + 1e-9 and self.side.may_return()


class Office:
    """One term of an agent as leader, with the service's input and output.

    Attributes:
        heard: when a node's incarnation was last heard from on a link.
        closed: incarnations whose last link was seen to end, or was closed here.
        ended: those whose link was seen to end.
        silent: see :class:`LeaderMachine`.
        news: whether something was received since the machine's last turn.
    """

    def __init__(self, agent: Agent, record: ControlRecord, takeover: Takeover) -> None:
        world = agent.world
        self.node, self.kernel, self.world = agent, world, world
        self.began = world.now
        dead = frozenset({takeover.dead} - {""})
        self.silent: frozenset[str] = frozenset()
        self.machine = LeaderMachine(record, world.timing, COMMAND, world.now, dead, self.silent)
        self.stored = record
        self.links: dict[int, Link] = {}
        self.greeted: dict[int, str] = {}
        self.heard: dict[str, float] = {}
        self.closed: set[str] = set()
        self.ended: set[str] = set()
        self.deposed = self.over = self.news = False

    @property
    def sure(self) -> float:
        """When its term was last seen in the record."""
        return -math.inf if self.node.sure is None else self.node.sure

    @property
    def alive(self) -> bool:
        """Whether it is the leader, as far as its node knows."""
        return not self.over and not self.deposed

    @property
    def succeeded(self) -> bool:
        """Whether the store shows that another term has begun."""
        return self.world.record is not None and self.world.record.term > self.stored.term

    def accept(self, agent: Agent) -> Link:
        number = next(number for number in range(1, 100) if number not in self.links and number not in self.greeted)
        link = self.links[number] = Link(agent, self, number)
        return link

    def end(self) -> None:
        """Close all links, and lead no longer."""
        self.over = True
        for link in self.links.values():
            link.close("office")
        self.links.clear()

    def depose(self) -> None:
        """It has seen that it was succeeded."""
        self.deposed = True
        self.end()

    def read(self, number: int) -> None:
        """Receive a node's message, and turn unless there is more to receive."""
        link = self.links[number]
        message = link.up.popleft()
        machine, now, world = self.machine, self.world.now, self.world
        phase = f"leader {type(machine._rounds.phase).__name__}"
        if message is END:
            link.close("office")
            del self.links[number]
            if number in self.greeted:
                world.met(phase, "closed")
                incarnation = self.greeted.pop(number)
                self.closed.add(incarnation)
                self.ended.add(incarnation)
                self.carry_out(machine.closed(number, now))
        elif isinstance(message, m.NodeHello):
            world.met(phase, message)
            self.greeted[number] = message.incarnation
            self.heard[message.incarnation] = now
            self.closed.discard(message.incarnation)
            if not message.holding:
                self.ended.discard(message.incarnation)
            self.carry_out(machine.hello(number, message, now))
        else:
            world.met(phase, message)
            self.heard[self.greeted[number]] = now
            self.carry_out(machine.report(number, message, now))
        self.news = True
        if not any(link.up for link in self.links.values()):
            self.turn()

    def turn(self) -> bool:
        """Let the machine handle timers; return whether something followed."""
        self.news = False
        if not self.alive:
            return False
        phase = type(self.machine._rounds.phase)
        followed = self.carry_out(self.machine.turn(self.world.now))
        return followed or type(self.machine._rounds.phase) is not phase

    def carry_out(self, instructions: list[to_do.Instruction]) -> bool:
        for instruction in instructions:
            if not self.alive or not self.node.alive:
                break
            match instruction:
                case to_do.CommitRecord(record=record):
                    if self.world.record is not self.stored:
                        self.depose()
                        break
                    self.stored = record
                    self.world.write(record, self.node)
                    self.node.sure = self.world.now
                    if self.world.dies_after_write:
                        self.node.die()
                        self.world.dies_after_write = False
                case to_do.Send(link=number, order=order):
                    link = self.links.get(number)
                    if link is not None:
                        self.world.checks.ordered(self, order)
                        if not isinstance(order, m.UserMessage | m.PeerDone):  # no machine of a node reads these
                            link.down.append(order)
                case to_do.Close(link=number):
                    link = self.links.pop(number, None)
                    if link is not None:
                        self.closed.add(self.greeted.pop(number))
                        link.close("office")
                case to_do.Emit(event=event):
                    self.world.checks.emitted(self, event)
        return bool(instructions)
