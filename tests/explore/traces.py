"""Replays what real agents have recorded into the machines and the explorer's invariants.

The machines are given the same input, and must return what they returned in the agents: they decide by nothing else.
What an agent got over a link must be what its leader sent, in that order, and the other way round, as the explored
links deliver it. The invariants are those of the explored worlds, at the times of the real run.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.checks import Checks

from elastic_agents import policy_types as v
from elastic_agents.policy import decide
from elastic_launch import contract as c
from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.errors import ExitCode
from elastic_launch.rendezvous.leader import types as to_do
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.node.machine import NodeMachine
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m
from explore.recorder import Line
from explore.run_world import NoPartition, RunChecks, name_of

__all__ = ["Drift", "TracedRun", "replay"]

FOR_POLICY = m.Form | m.DrainRound | m.Break | m.Released | m.Evicted | m.LeftOut | m.StartAhead

UNQUEUED = m.Beat | m.ProgressBeat | m.Pulse
"""Messages that no machine has queued."""

STILL = 0.8
"""A process that has recorded nothing for this many times ``dead_after`` counts as frozen: its beats are recorded."""


class Drift(AssertionError):
    """The processes have not done what the machines do, or have broken an invariant."""


class TracedChecks(RunChecks):
    """The invariants of the explored worlds, in which runs end by a used-up budget only."""

    def _ended(self, record: ControlRecord) -> None:
        end = record.end
        if end is not None and end.code in (ExitCode.DONE, ExitCode.TOO_FEW_NODES):
            super()._ended(record)


@dataclass
class TracedWorkers:
    """What an agent knows of its workers.

    Attributes:
        training: number of the round that they are in, 0 for none.
        left: local ranks that have said that they have left it; their processes may stay.
        done: numbers of the rounds in which they have finished.
    """

    training: int = 0
    left: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


@dataclass
class Talk:
    """What went over a link, as its one end has it: the hello and the reports after it, and the orders."""

    at: float
    reports: list[Any] = field(default_factory=list)
    orders: list[Any] = field(default_factory=list)


class TracedNode:
    """An agent's process; the checks see it as a node of their cluster.

    Attributes:
        last: when its process recorded something last.
        talks: the links that it has begun.
        heard, obeyed: the orders for the policy that its machine took, and those that the policy was given.
    """

    def __init__(self, run: TracedRun, process: str) -> None:
        self.run, self.process = run, process
        self.name = self.node_id = self.incarnation = ""
        self.view = v.View()
        self.machine = NodeMachine()
        self.workers = TracedWorkers()
        self.alive, self.last, self.started = True, run.now, False
        self.talks: list[Talk] = []
        self.heard: list[Any] = []
        self.obeyed: list[Any] = []

    @property
    def frozen(self) -> bool:
        """Whether its process has done nothing for a while."""
        return self.run.now - self.last > STILL * self.run.timing.dead_after


class TracedLeader:
    """One term of an agent as leader; the attributes are those of :class:`explore.agents.Office`."""

    def __init__(self, node: TracedNode, machine: LeaderMachine, silent: frozenset[str]) -> None:
        self.node, self.machine, self.kernel = node, machine, node.run
        self.began = self.sure = node.run.now
        self.silent = silent
        self.greeted: dict[int, str] = {}
        self.heard: dict[str, float] = {}
        self.closed: set[str] = set()
        self.ended: set[str] = set()
        self.talks: dict[int, Talk] = {}

    def hangs_up(self, link: int) -> str:
        """A link ends; return which incarnation was at its other end."""
        incarnation = self.greeted.pop(link, "")
        self.closed.add(incarnation)
        return incarnation


class TracedRun:
    """A run, as far as it was replayed; the simulation's checks see it as their cluster.

    Attributes:
        met: how often each event came in each phase of a machine.
        disturbed: incarnations that may have been frozen, so that orders reached them late.
    """

    def __init__(self, *, disturbed: bool) -> None:
        self.now = 0.0
        self.timing, self.limits = Timing(), Limits()
        self.leaders: list[TracedLeader] = []
        self.all: list[TracedNode] = []
        self.voters = None
        self.disturbed: set[str] = set()
        self.met: Counter[tuple[str, str]] = Counter()
        self.checks: Checks = TracedChecks(self)  # type: ignore[arg-type]
        self._disturbed = disturbed
        self._processes: dict[str, TracedNode] = {}
        self._leading: dict[tuple[str, int], TracedLeader] = {}
        self._unsure: tuple[bytes, TracedNode] | None = None
        self._rounds_of: dict[str, dict[int, tuple[str, ...]]] = {}

    # What the checks look at.

    @property
    def kernel(self) -> TracedRun:
        return self

    @property
    def network(self) -> NoPartition:
        return NoPartition()

    @property
    def nodes(self) -> list[TracedNode]:
        """Those that live, without those of a run that has begun anew since."""
        known = {"", *self.leaders[-1].machine._state.continued} if self.leaders else {""}
        return [node for node in self.all if node.alive and node.machine.hello.seen_run in known]

    def __getitem__(self, node_id: str) -> TracedNode:
        return [node for node in self.all if node.node_id == node_id][-1]

    # Replay.

    def follow(self, line: Line) -> None:
        """Replay a call.

        Raises:
            Drift: the machine returns something else.
            AssertionError: an invariant is broken.
        """
        self.now = line.at
        node = self._processes.get(line.process)
        if node is None:
            node = self._processes[line.process] = TracedNode(self, line.process)
        node.last = line.at
        match line.machine:
            case "policy":
                self._policy(node, line)
            case "node":
                self._node(node, line)
            case "leader":
                self._leader(node, line)
            case "store":
                self._stored(node, line)
        self.checks.always()

    def over(self, process: str) -> None:
        """A process has recorded its last call: it and its workers end."""
        node = self._processes[process]
        node.alive, node.workers.training = False, 0

    def _policy(self, node: TracedNode, line: Line) -> None:
        view, event, facts = line.arguments
        if not node.started:
            node.view, node.started = view, True
        _same(line, node.view, view)
        self.met[f"policy {view.phase.value}", name_of(event)] += 1
        self.checks.obeyed(node, event)  # type: ignore[arg-type]
        if isinstance(event, FOR_POLICY):
            node.obeyed.append(event)
        after, actions = decide(view, event, facts)
        _same(line, (after, actions), line.result)
        node.view = after
        if isinstance(event, v.Reported) and isinstance(event.report, c.Suspended) and event.round == after.round:
            node.workers.left.add(event.local_rank)
        for action in actions:
            match action:
                case v.StartWorkers(form=form):
                    node.workers.left.clear()
                    self.checks.starts(node, form)  # type: ignore[arg-type]
                case m.Done(round=number):
                    node.workers.done.add(number)
                case v.Finish(code=code):
                    self.checks.finished(node, code)  # type: ignore[arg-type]
        node.workers.training = after.round if after.alive - node.workers.left else 0

    def _node(self, node: TracedNode, line: Line) -> None:
        if line.method == "__init__":
            node.machine = NodeMachine()
            return
        found = getattr(node.machine, line.method)(*line.arguments, **line.options)
        _same(line, found, line.result)
        match line.method:
            case "begin":
                hello = node.machine.hello
                node.node_id, node.name, node.incarnation = hello.node_id, hello.incarnation, hello.incarnation
                if node not in self.all:
                    self.all.append(node)
                if self._disturbed:
                    self.disturbed.add(node.incarnation)
            case "greet":
                node.talks.append(Talk(self.now))
            case "take":
                node.talks[-1].reports += found
            case "obey" if not isinstance(order := line.arguments[0], UNQUEUED):
                node.talks[-1].orders.append(order)
                if isinstance(order, FOR_POLICY) and found:
                    node.heard.append(order)
                self._ordered(order)

    def _leader(self, node: TracedNode, line: Line) -> None:
        key = line.process, line.key
        if line.method == "__init__":
            self._leads(node, key, line)
            return
        leader = self._leading[key]
        phase = f"leader {type(leader.machine._rounds.phase).__name__}"
        out = getattr(leader.machine, line.method)(*line.arguments, **line.options)
        _same(line, *map(_plain, (out, line.result)))
        link, *given = line.arguments
        match line.method:
            case "hello":
                self.met[phase, "NodeHello"] += 1
                self._greets(leader, link, given[0])
                hello = given[0]
                if hello.seen_run in leader.machine._state.continued:
                    for number, names in self._rounds_of.get(hello.seen_run, {}).items():
                        if number <= hello.seen_round:  # those that a node which lives knows
                            self.checks.rounds.setdefault(number, names)
            case "report":
                self.met[phase, name_of(given[0])] += 1
                leader.heard[leader.greeted.get(link, "")] = self.now
                if not isinstance(given[0], UNQUEUED):
                    leader.talks[link].reports.append(given[0])
            case "closed":
                self.met[phase, "closed"] += 1
                leader.ended.add(leader.hangs_up(link))
        for instruction in out:
            match instruction:
                case to_do.Send(link=number, order=order):
                    leader.talks[number].orders.append(order)
                case to_do.Close(link=number):
                    leader.hangs_up(number)
                case to_do.Emit(event=event):
                    self.checks.emitted(leader, event)  # type: ignore[arg-type]

    def _greets(self, leader: TracedLeader, link: int, hello: m.NodeHello) -> None:
        leader.talks[link] = Talk(self.now, [hello])
        leader.greeted[link] = hello.incarnation
        leader.heard[hello.incarnation] = self.now
        leader.closed.discard(hello.incarnation)
        if not hello.holding:
            leader.ended.discard(hello.incarnation)

    def _leads(self, node: TracedNode, key: tuple[str, int], line: Line) -> None:
        record, timing, *_ = line.arguments
        machine = LeaderMachine(*line.arguments, **line.options)
        if not self.leaders:
            self.timing, self.limits = timing, record.limits
        if record.run not in self._rounds_of:  # the record of the leader before may have been only in its memory
            spent = self.checks.spent
            self.checks = TracedChecks(self)  # type: ignore[arg-type]
            self.checks.spent = spent
            self._rounds_of[record.run] = self.checks.rounds
        silent = frozenset(x.incarnation for x in record.round.members if x.node_id in machine._state._silent)
        leader = self._leading[key] = TracedLeader(node, machine, silent)
        self.leaders.append(leader)
        node.name = node.incarnation = record.leader.incarnation
        node.node_id = record.leader.node_id
        self._settle(record)
        self.checks.written(record.encode(), node)  # type: ignore[arg-type]

    def _stored(self, node: TracedNode, line: Line) -> None:
        """A leader has written the record; if that has failed, it may have been written all the same."""
        value = line.arguments[1]
        if line.result is True:
            self.checks.written(value, node)  # type: ignore[arg-type]
        elif isinstance(line.result, Exception):
            self._unsure = value, node

    def _settle(self, record: ControlRecord) -> None:
        """The next leader has found a record: a write that had failed has been done, if this shows it."""
        unsure, self._unsure = self._unsure, None
        if unsure is not None and ControlRecord.parse(unsure[0]).round == record.round:
            self.checks.written(*unsure)  # type: ignore[arg-type]

    def _ordered(self, order: m.Order) -> None:
        """An order has reached a node: the record has what it says."""
        record = self.checks.record
        if isinstance(order, m.Form):
            names = tuple(x.node_id for x in order.round.members)
            assert self.checks.rounds.get(order.round.number) == names, "a round was ordered before the record had it"
        if isinstance(order, m.RunEnd):
            assert record is not None
            assert record.end is not None, "an end was ordered before the record had it"

    def links(self) -> Iterable[tuple[Talk, list[Talk]]]:
        """Each link that a leader has accepted, and the node's links that it may be.

        A node greets a frozen leader in the same way on each link, until one is answered.

        Raises:
            Drift: a leader was greeted by a node that has not done so.
        """
        for leader in self.leaders:
            for talk in leader.talks.values():
                hello = talk.reports[0]
                nodes = [node for node in self.all if node.incarnation == hello.incarnation]
                theirs = [x for node in nodes for x in node.talks if x.reports[:1] == [hello] and x.at <= talk.at]
                if not theirs:
                    raise Drift(f"no node has said {hello}")
                yield talk, theirs


def replay(lines: Sequence[Line], *, disturbed: bool = False) -> TracedRun:
    """Replay what all agents of a run have recorded on one host; return what was met.

    Args:
        lines: in the order of time.
        disturbed: whether agents may have been frozen, or cut off.

    Raises:
        Drift: a machine returns something else, or something was lost or exchanged on a link.
        AssertionError: an invariant is broken.
    """
    run = TracedRun(disturbed=disturbed)
    last = {line.process: index for index, line in enumerate(lines)}
    for index, line in enumerate(lines):
        try:
            run.follow(line)
        except AssertionError as error:
            before = "\n".join(
                f"  {x.at:.3f} {x.process} {x.machine}.{x.method}{x.arguments}" for x in lines[: index + 1][-12:]
            )
            raise Drift(f"{error or traceback.format_exc(limit=-1)}\nafter\n{before}") from error
        if last[line.process] == index:
            run.over(line.process)
    for leader, nodes in run.links():
        drifts = [drift for node in reversed(nodes) if (drift := _drift(leader, node)) is not None]
        if len(drifts) == len(nodes):
            raise drifts[0]
    for each in run.all:
        _begins(each.obeyed, each.heard, "an agent obeyed orders that its link has not brought, or in another order")
    return run


def _drift(leader: Talk, node: Talk) -> Drift | None:
    """Return what was lost or exchanged, if these are the two ends of a link."""
    try:
        _begins(leader.reports, node.reports, "a leader got reports that the node has not sent, or in another order")
        _begins(node.orders, leader.orders, "a node got orders that the leader has not sent, or in another order")
    except Drift as drift:
        return drift
    return None


def _begins(found: Sequence[Any], whole: Sequence[Any], why: str) -> None:
    for index, each in enumerate(found):
        if index >= len(whole) or whole[index] != each:
            raise Drift(f"{why}: {each}, not {whole[index] if index < len(whole) else 'nothing'}")


def _same(line: Line, replayed: Any, real: Any) -> None:
    if replayed != real:
        raise Drift(f"{line.machine}.{line.method} returned\n{real}, and now\n{replayed}")


def _plain(instructions: Any) -> Any:
    """Instructions without what is random."""
    return [
        replace(x, record=replace(x.record, nonce="")) if isinstance(x, to_do.CommitRecord) else x
        for x in instructions or ()
    ]
