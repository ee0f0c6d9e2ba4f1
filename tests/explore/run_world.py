"""A run in which any event may come next: leaders, nodes and policies on links, with faults within bounds.

All that is under way arrives before time passes, in any order that the links allow; time passes up to the next moment
at which something is due. A move that lets time pass earlier counts as a fault (``late``).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

from simulation.checks import Checks

from elastic_agents import policy_types as v
from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.rendezvous.record import ControlRecord, Member, Round, whole_replicas
from elastic_launch.rendezvous.wire import messages as m
from explore.agents import Agent, Link, Office
from explore.bounds import FAULTS, Bounds
from explore.run_identity import identity
from explore.search import Label, Moves, QuietError, WorldState, meet
from explore.states import EPOCH

__all__ = ["NoPartition", "RunChecks", "RunWorld", "name_of"]

TIMING = Timing(
    join_settle=1.0, dead_after=5.0, beat=1.0, resize_delay=0.0, return_after=6.0, join_timeout=15.0, min_wait=20.0
)

GUARD = 0.8
"""A guard stops the workers of an agent that it has not heard for this many times ``dead_after``."""

HORIZON = 40.0
"""Seconds for which time passes at most until something happens."""

ACK = 5.0
"""Seconds for which the leader of an ended run waits for its nodes."""


class RunChecks(Checks):
    """The invariants of the simulation, without their log."""

    def _note(self, text: str) -> None:
        pass


class NoPartition:
    """All hosts reach each other."""

    def joins(self, one: object, other: object) -> bool:
        return True


class RunWorld(WorldState):
    """One state of a run; the simulation's checks see it as their cluster.

    Attributes:
        record: what is in the store.
        leaders: all terms, in order.
        all: all agents that were ever started.
        steps: optimizer steps done.
        stepped: the last round that has completed one.
        left: faults that may still happen.
        dies_after_write: whether the leader's process ends right after its next write.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        low, _, high = bounds.nodes.partition(":")
        self.limits = Limits(int(low), int(high or low), bounds.max_restarts)
        self.timing = TIMING
        self.live = self.slow = bounds.live
        self.nproc, self.replica_size = bounds.nproc, bounds.replica_size
        self.now = EPOCH
        self.record: ControlRecord | None = None
        self.formed: dict[int, Round] = {}
        self.leaders: list[Office] = []
        self.all: list[Agent] = []
        self.voters = None
        self.disturbed: set[str] = set()
        self.steps = self.stepped = 0
        self.left = bounds.faults
        self.backs = bounds.comes_back
        self.dies_after_write = False
        self.checks = RunChecks(self)  # type: ignore[arg-type]
        for node_id in bounds.start:
            self._start(node_id)
        if bounds.formed:
            self._form()

    def _form(self) -> None:
        """Go on by the fair schedule until the first round trains."""
        while not (self.record and self.record.round.number and self.steps):
            for label, fair in self.moves():
                if fair and label[0] != "finish":
                    try:
                        self.do(label)
                    except QuietError:
                        continue
                    break
            else:
                raise AssertionError("no round is formed")
        while any(label[0] in ("leader reads", "turns", "reads") for label, _ in self.moves()):
            self.do(self.moves()[0][0])

    # What the checks look at.

    @property
    def kernel(self) -> RunWorld:
        return self

    @property
    def network(self) -> RunWorld:
        return self

    def joins(self, one: Agent, other: Agent) -> bool:
        """Whether two hosts reach each other."""
        return one is other or not (one.cut or other.cut)

    @property
    def nodes(self) -> list[Agent]:
        return [agent for agent in self.all if agent.alive]

    def __getitem__(self, node_id: str) -> Agent:
        return [agent for agent in self.all if agent.node_id == node_id][-1]

    def incarnation(self, name: str) -> Agent | None:
        return next((agent for agent in self.all if agent.incarnation == name), None)

    def rounds_of(self, number: int) -> tuple[Member, ...]:
        return self.formed[number].members if number in self.formed else ()

    def rank_of(self, number: int, node_id: str, local_rank: int) -> int | None:
        formed = self.formed[number]
        for index, member in enumerate(formed.members):
            if member.node_id == node_id:
                return next((x.rank for x in formed.ranks_of(index) if x.local_rank == local_rank), None)
        return None

    # What agents do to the world.

    def write(self, record: ControlRecord, agent: Agent) -> None:
        self.checks.written(record.encode(), agent)  # type: ignore[arg-type]
        self.record = record
        formed = record.round
        if formed.members:
            ranks = [place.rank for index in range(len(formed.members)) for place in formed.ranks_of(index)]
            assert ranks == list(range(formed.world_size)), "the ranks must be a permutation"
            for local_ranks in (member.local_ranks for member in formed.members):
                assert whole_replicas(local_ranks, self.replica_size) == local_ranks, "a round has a broken replica"
            self.formed.setdefault(formed.number, formed)

    def lost_peer(self, number: int, agent: Agent, rank: int) -> None:
        for other in self.nodes:
            other.workers.lose_peer(number, rank if other is agent else -1)

    def leaves(self, agent: Agent) -> None:
        """An agent has an exit code: it says the rest and goes."""
        agent.due, agent.retry_at = [(self.now + ACK, v.StartsTake(False))], None
        if agent.link is not None:
            agent.flush()
            agent.link.close("node")
            agent.link = None

    # Moves.

    def moves(self) -> Moves:
        urgent = [(label, True) for label in self._urgent()]
        if not (self.left or self.backs or self.bounds.newcomers) and (alone := self._commutes(urgent)):
            return alone
        found: Moves = [(("thaws", x.incarnation), True) for x in self.nodes if x.idle]
        found += [(("is back", x.incarnation), True) for x in self.nodes if x.cut]
        found += urgent
        if not urgent:
            found.append((("time",), True))
        if not urgent or self.bounds.finishes:
            found += [(label, True) for label in self._finishes()]
        if self.left:
            found += [(label, False) for label in self._faults(bool(urgent))]
        if self.backs:
            gone = {x.node_id for x in self.all} - {x.node_id for x in self.nodes}
            found += [(("comes back", node_id), False) for node_id in sorted(gone)]
        coming = set(self.bounds.newcomers) - {x.node_id for x in self.all}
        found += [(("arrives", node_id), False) for node_id in sorted(coming)[:1]]
        return found

    def _urgent(self) -> Iterator[Label]:
        for office in self.leaders:
            node = office.node
            if office.over or node.idle or not node.alive:
                continue
            if office.succeeded:
                yield "sees its successor", node.incarnation, office.stored.term
            for number in sorted(office.links):
                if office.links[number].up and office.links[number].through:
                    yield "leader reads", node.incarnation, number
            if office.news:
                yield "turns", node.incarnation
        for agent in self.nodes:
            if agent.frozen:
                continue
            name = agent.incarnation
            if agent.idle:
                yield from (("worker", name, what, rank) for what, rank in agent.workers.acts())
                continue
            if agent.code is not None:
                if self._may_exit(agent):
                    yield "exits", name
                continue
            if agent.link is not None and agent.link.down and agent.link.through:
                yield "reads", name
            if agent.may_connect():
                yield "connects", name
            for place, (at, _) in enumerate(agent.due):
                if at <= self.now + 1e-9:
                    yield "timer", name, place
            for what, rank in agent.workers.acts():
                yield "worker", name, what, rank
        for number in self.formed:
            there = self._together(number)
            if there and any(agent.asked == number for agent in there) and not self._told(there, "drain"):
                yield "agree", number
            trains = there and all(x.state == "trains" for agent in there for x in agent.workers.by_rank.values())
            if trains and number > self.stepped and not self._told(there, "drain"):
                yield "step", number

    def _commutes(self, urgent: Moves) -> Moves:
        """Return a move that has the same result before and after all others, if there is one and no fault can follow.

        A node without workers reads an order.
        """
        for label, fair in urgent:
            agent = self.incarnation(label[1]) if label[0] == "reads" else None
            if agent is not None and not agent.workers.by_rank and agent.office is None:
                others = [move for move, _ in urgent if move[1] == agent.incarnation]
                if len(others) == 1:
                    return [(label, fair)]
        return []

    def _together(self, number: int) -> list[Agent]:
        """The members of a round if all of their workers take part in it, and reach each other; else none."""
        found = []
        for member in self.formed[number].members:
            agent = self.incarnation(member.incarnation)
            if agent is None or not agent.alive or agent.frozen:
                return []
            workers = agent.workers.by_rank
            for rank in member.local_ranks:
                worker = workers.get(rank)
                well = worker is not None and worker.round == number and worker.state in ("starts", "trains")
                if not well or worker.broken or worker.told & {"kill", "end", "exit"}:
                    return []
            found.append(agent)
        return found if all(self.joins(found[0], agent) for agent in found) else []

    def _told(self, agents: list[Agent], order: str) -> bool:
        return any(order in worker.told for agent in agents for worker in agent.workers.by_rank.values())

    def _may_exit(self, agent: Agent) -> bool:
        office = agent.office
        waits = office is not None and office.alive and office.machine.ended and bool(office.links)
        return not waits or agent.due[0][0] <= self.now

    def _finishes(self) -> Iterator[Label]:
        for agent in self.nodes:
            for rank, worker in sorted(agent.workers.by_rank.items()):
                idle = worker.state == "trains" and not worker.told and not worker.broken
                if idle and not agent.idle and self.stepped >= worker.round:
                    yield "finish", agent.incarnation, rank

    def _faults(self, urgent: bool) -> Iterator[Label]:
        kinds = self.bounds.kinds
        for agent in self.nodes:
            name = agent.incarnation
            if agent.idle or agent.code is not None:
                continue
            for rank, worker in sorted(agent.workers.by_rank.items()):
                if worker.state in ("starts", "trains"):
                    yield from ((kind, name, rank) for kind in ("crash", "ends by SIGTERM") if kind in kinds)
                if "is lost ahead" in kinds and worker.state in ("suspended", "ahead", "waits"):
                    yield "crash", name, rank
            yield from ((kind, name) for kind in ("dies", "loses power", "freezes", "hangs") if kind in kinds)
            if "is cut off" in kinds and not agent.cut:
                yield "is cut off", name
            if "leaves" in kinds and agent.view.leaving is None:
                yield "leaves", name
            if "loses its link" in kinds and agent.link is not None and agent.link.office_open:
                yield "loses its link", name
        for office in self.leaders:
            if "dies after its write" in kinds and office.alive and office.node.alive and not office.node.idle:
                for number in sorted(office.links):
                    if office.links[number].up:
                        yield "dies after its write", office.node.incarnation, number
                if office.news:
                    yield "dies after its write", office.node.incarnation, 0
        if urgent and "late" in kinds:
            yield ("late",)

    def do(self, label: Label) -> None:
        what, *rest = label
        if what in (*FAULTS, "arrives"):
            self.left -= what in FAULTS
            self._befall(what, rest)
        elif what == "time":
            self._pass_time(late=False)
        elif what == "comes back":
            self.backs -= 1
            self._start(rest[0])
        elif what == "agree":
            for agent in self._together(rest[0]):
                for worker in agent.workers.by_rank.values():
                    if worker.round == rest[0]:
                        worker.told.add("drain")
        elif what == "step":
            self._step(rest[0])
        else:
            self._act(what, *rest)
        self.checks.always()

    def _act(self, what: str, name: str, *rest: Any) -> None:
        agent = self.incarnation(name)
        assert agent is not None
        match what:
            case "leader reads":
                self._office(agent).read(rest[0])
            case "turns":
                self._office(agent).turn()
            case "sees its successor":
                next(x for x in self.leaders if x.node is agent and x.stored.term == rest[0] and not x.over).depose()
            case "exits":
                if agent.office is not None and not agent.office.over:
                    agent.office.end()
                agent.die()
            case "reads":
                agent.read()
            case "connects":
                agent.connect()
            case "timer":
                _, event = agent.due.pop(rest[0])
                agent.hear(event)
            case "worker":
                agent.workers.act(*rest)
            case "finish":
                agent.workers.finish(rest[0])
            case "thaws":
                agent.thaw()
            case "is back":
                agent.cut = False
            case _:
                raise AssertionError(what)

    def _befall(self, what: str, rest: list[Any]) -> None:
        if what == "late":
            self.disturbed.update(agent.incarnation for agent in self.nodes)
            self._pass_time(late=True)
            return
        if what == "arrives":
            self._start(rest[0])
            return
        agent = self.incarnation(rest[0])
        assert agent is not None
        match what:
            case "crash" | "ends by SIGTERM":
                agent.workers.crash(rest[1], 1 if what == "crash" else -signal.SIGTERM)
            case "dies" | "loses power":
                agent.die(silent=what == "loses power")
            case "loses its link":
                assert agent.link is not None
                self.disturbed.update(agent.incarnation for agent in self.nodes)
                agent.link.reset()
            case "freezes" | "hangs" | "is cut off":
                self.disturbed.update(agent.incarnation for agent in self.nodes)
                agent.frozen, agent.cut = what == "freezes", agent.cut or what == "is cut off"
                if what == "hangs":
                    agent.hangs_until = self.now + GUARD * self.timing.dead_after
            case "leaves":
                agent.hear(v.Leave("SIGTERM", 143, seconds=10.0))
            case "dies after its write":
                self.dies_after_write = True
                office = self._office(agent)
                office.read(rest[1]) if rest[1] else office.turn()
                if self.dies_after_write:
                    raise QuietError

    def _office(self, agent: Agent) -> Office:
        assert agent.office is not None
        return agent.office

    def _start(self, node_id: str) -> None:
        number = sum(agent.node_id == node_id for agent in self.all) + 1
        self.all.append(Agent(self, node_id, f"{node_id}{number}"))

    def _step(self, number: int) -> None:
        self.steps += 1
        self.stepped = number
        for agent in self._together(number):
            report = m.ProgressBeat(number, self.steps)
            agent.side.beats(report)
            if agent.link is not None:
                agent.link.up.append(report)

    # Time.

    def _pass_time(self, *, late: bool) -> None:
        """Let time pass until something follows from it.

        Raises:
            QuietError: if nothing does.
        """
        end = self.now + HORIZON
        before = set(self._urgent())
        while self.now < end:
            moments = [at for at in self._due() if at > self.now + 1e-9]
            unwell = self._unwell()
            if not moments and not unwell:
                break
            self.now = round(min([self.now + 1.0, *moments]), 6)
            if self._tick() or set(self._urgent()) - before:
                return
        raise QuietError

    def _due(self) -> Iterator[float]:
        for office in self.leaders:
            if office.alive and office.node.alive and not office.node.idle and not office.machine.ended:
                yield from office.machine._rounds.due()
                yield from office.machine._state.owed_until()
        for agent in self.nodes:
            if agent.hangs_until is not None:
                yield agent.hangs_until
            if agent.idle:
                yield agent.detector._turned + 4.1 if agent.detector._turned is not None else self.now
                continue
            yield from (at for at, _ in agent.due)
            if agent.retry_at is not None:
                yield agent.retry_at

    def _unwell(self) -> bool:
        """Whether some silence is counted."""
        links = [agent.link for agent in self.nodes if agent.link is not None]
        theirs = [link for office in self.leaders if office.alive for link in office.links.values()]
        lead = any(x.alive and x.node.alive and x.node.idle for x in self.leaders)
        return lead or not all(self._beats(link) and self._pulses(link) for link in [*links, *theirs])

    def _beats(self, link: Link) -> bool:
        """Whether the leader gets the node's beats."""
        agent, office = link.agent, link.office
        there = agent.alive and not agent.idle and agent.link is link and not link.up and link.through
        return there and link.node_open and link.office_open and office.alive and not office.node.idle

    def _pulses(self, link: Link) -> bool:
        """Whether the node gets the leader's pulses."""
        office = link.office
        there = office.alive and office.node.alive and not office.node.idle and link.number in office.greeted
        there = there and link.through
        return there and link.node_open and link.office_open and not link.down

    def _tick(self) -> bool:
        """Let beats, pulses and timers of the leader come at this time; return whether anything followed."""
        changed = False
        for office in self.leaders:
            if not office.alive or office.node.idle or not office.node.alive:
                continue
            if not office.succeeded:
                office.node.sure = self.now
            for number, link in office.links.items():
                if self._beats(link) and number in office.greeted:
                    office.heard[office.greeted[number]] = self.now
                    office.machine.report(number, m.Beat(), self.now)
            changed = office.turn() or changed
        for agent in self.nodes:
            changed = agent.guard() or changed
            if agent.idle or agent.code is not None:
                continue
            agent.detector.turn(self.now)
            changed = agent.judge() or changed
            if agent.link is not None and self._pulses(agent.link):
                agent.detector.heard(self.now)
            if agent.link is not None and agent.detector.leader_lost and not (agent.link.down and agent.link.through):
                agent.ended(silent=True)
                changed = True
        return changed

    # Identity.

    def identity(self) -> int:
        return identity(self)

    def goal(self) -> bool:
        """Whether no agent is left."""
        return not self.nodes

    def describe(self) -> str:
        lines = [f"{self.record}", *(agent.describe() for agent in self.nodes)]
        return "\n".join(lines)

    # Coverage.

    def met(self, phase: str, event: Any) -> None:
        meet(phase, event if isinstance(event, str) else name_of(event))


def name_of(event: Any) -> str:
    """What kind of event it is; of a worker's report, which."""
    return f"Reported {type(event.report).__name__}" if isinstance(event, v.Reported) else type(event).__name__
