"""Users' requests to a leader, and their outcome: pure code that calls and watches the leader's machine.

A caller's link is not a node's. A request that takes time is answered once it is done or can no longer be done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from elastic_launch.errors import UsageError
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import Event, Parked, RoundBroken, RoundDrained, RoundFormed, RunEnded
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.leader.nodes import ACTIVE, Node
from elastic_launch.rendezvous.leader.types import Close, Emit, Instruction, Send
from elastic_launch.rendezvous.wire import messages as m

DRAIN_REASON = "elasticctl drain"

MAX_CALLERS = 64
"""Most callers at once; further ones are refused."""

INCIDENTS = 10
"""Number of decisions that a leader keeps for callers."""

STACKS = 20.0
"""Seconds within which nodes tell where their workers stand; then the answer names those that have not."""

LATE = 10.0
"""Seconds past its deadline after which a drain has failed, whatever the node reports."""


@dataclass(slots=True)
class _Waiting:
    """A caller with a pending request.

    Attributes:
        node: for a drain of one node, that node at the time of the request.
        busy: whether its workers were in a round then.
        until: when the request is answered in any case.
        step: optimizer steps in the state drained since.
        saved: whether that state is committed to durable storage.
        unsaved: why not, if a node that should have committed it says so.
        broken: why the round has broken since.
        stacks_of: the nodes that have not told yet where their workers stand.
        asks_again: whether the next round is to save, because this one was drained before it had.
    """

    request: a.AdminRequest
    node: Node | None = None
    busy: bool = False
    until: float | None = None
    step: int | None = None
    saved: bool = False
    unsaved: str = ""
    broken: str = ""
    asks_again: bool = False
    stacks_of: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Heard:
    """The nodes' reports about the training, with the leader's time."""

    round: int = 0
    training: int = 0  # number of the script's training in the round, from 0
    step: int | None = None
    stepped: float | None = None  # when the training's first number of steps in the round came, or a higher one
    progress: m.ProgressBeat | None = None  # the last report of the node that is ahead
    checkpoint: tuple[int, float, int] | None = None  # its step, when it was reported, and its training
    snapshot: tuple[int, float, int] | None = None
    steps: dict[str, int] = field(default_factory=dict)  # in this round, by node


class AdminRequests:
    """The requests to one leader.

    Args:
        wall: this host's time, in seconds since 1970; only callers are told of it.
        unsure_for: returns the seconds since the store last showed that this leader leads.
    """

    def __init__(
        self,
        machine: LeaderMachine,
        wall: Callable[[], float] = time.time,
        unsure_for: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._machine = machine
        self._wall, self._unsure_for = wall, unsure_for
        self._callers: dict[int, _Waiting | None] = {}
        self._incidents: deque[tuple[float, str]] = deque(maxlen=INCIDENTS)
        self._heard = _Heard()
        self._out: list[Instruction] = []

    def call(self, link: int, caller: a.Caller) -> list[Instruction]:
        """Handle a new link of a caller."""
        term, run_id = self._machine.record.term, self._machine.record.run_id
        if caller.version != m.PROTOCOL_VERSION:
            reason = f"elasticctl speaks version {caller.version} of the protocol, the leader {m.PROTOCOL_VERSION}."
            return self._refuse(link, reason, "Use the version of elastic-launch that the run uses.")
        if caller.run_id != run_id:
            # The run id is not disclosed: without a token, it is all that a request needs.
            return self._refuse(link, f"this leader leads another run, not {caller.run_id!r}.", "Check --rdzv-id.")
        if len(self._callers) >= MAX_CALLERS:
            return self._refuse(link, f"{MAX_CALLERS} others are asking already.", "Try again later.")
        self._callers[link] = None
        timing = self._machine.timing
        beat = timing.beat_among(self._machine.limits.max_nodes)
        self._send(link, m.Welcome(term, "", beat, timing.dead_after))
        if self._machine.ended:
            self._send(link, self._machine.end_order())
        return self._flush()

    def hung_up(self, link: int) -> None:
        """Handle a closed link; its request continues."""
        self._callers.pop(link, None)

    def ask(self, link: int, request: a.AdminRequest, now: float) -> list[Instruction]:
        """Handle a caller's request, which gets one answer. Another request before the answer replaces it."""
        if link not in self._callers or self._machine.ended:
            return []
        waiting = _Waiting(request)
        self._callers[link] = waiting
        match request:
            case a.AskStatus():
                self._callers[link] = None
                self._send(link, self.status(now))
            case a.AskDrain(node="", seconds=seconds):
                self._follow(self._machine.stop(DRAIN_REASON, seconds, now), now)
            case a.AskDrain():
                self._depart(link, waiting, request, now)
            case a.AskSave():
                self._save(link, now)
            case a.AskStacks():
                self._stacks(link, waiting, now)
            case a.AskResize(min_nodes=low, max_nodes=high):
                self._resize(link, low, high, now)
        return self._flush()

    def heard(self, link: int, report: m.Report, now: float) -> None:
        """Handle a node's report, before the machine does."""
        node = self._machine.node_at(link)
        number = self._machine.record.round.number
        if node is None or not node.active:
            return
        match report:
            case m.ProgressBeat(round=round_number, step=step, snapshot=snapshot) if round_number == number:
                self._reached(number, report.training, step, now)
                self._heard.steps[node.hello.node_id] = step
                if (report.training, step) == (self._heard.training, self._heard.step):
                    self._heard.progress = report
                known, of = self._heard.snapshot, report.snapshot_training
                if snapshot is not None and (known is None or (of, snapshot) > (known[2], known[0])):
                    self._heard.snapshot = snapshot, now, of
            case m.Stopped(round=round_number, drained=step) if round_number == number and step is not None:
                self._reached(number, report.training, step, now)
                for _, waiting in self._pending():
                    waiting.step = max(step, waiting.step or 0)
                    waiting.saved |= report.saved
                    waiting.unsaved = waiting.unsaved or report.unsaved
                if report.saved:
                    self._heard.checkpoint = step, now, report.training
            case m.StacksTaken(text=text):
                name, term = node.hello.node_id, self._machine.record.term
                for caller, asked in self._pending():
                    if name in asked.stacks_of:
                        asked.stacks_of.discard(name)
                        self._send(caller, a.NodeStacks(term, name, text))
                        self._told_stacks(caller, asked, now)
            case m.NodeSaved(round=round_number, step=step) if round_number == number:
                if not report.error:
                    if not report.withdrew:
                        self._reached(number, report.training, step, now)  # the report of the step may arrive later
                    self._heard.checkpoint = step, now, report.training
                if report.asked:
                    self._wrote(report)

    def watch(self, instructions: Sequence[Instruction], now: float) -> list[Instruction]:
        """Return the machine's instructions together with the answers that follow from them."""
        self._follow(instructions, now)
        return self._flush()

    def checkpoint(self, now: float) -> a.LastSave | None:
        """Return the newest checkpoint on storage, of step 0 if those that were reported are gone; None before."""
        return _last(self._heard.checkpoint, now)

    def status(self, now: float) -> a.Status:
        """Return the run's status."""
        machine, record, unsure = self._machine, self._machine.record, self._unsure_for()
        found = self._heard.progress if machine.running else None
        progress = found if found is not None and found.round == record.round.number else m.ProgressBeat(0, 0)
        trains = machine.running and self._heard.round == record.round.number
        saved = self.checkpoint(now)
        stepped = round(now - self._heard.stepped, 3) if trains and self._heard.stepped is not None else None
        ends = [*accumulate(member.workers for member in record.round.members)]
        ranks = {x.node_id: (end - x.workers, end - 1) for x, end in zip(record.round.members, ends, strict=True)}
        return a.Status(
            run_id=record.run_id,
            next=machine.outlook,
            term=record.term,
            leader=record.leader.node_id,
            round=record.round.number,
            world_size=record.round.world_size if machine.running else 0,
            replica_size=max((node.hello.replica_size for node in machine.nodes.values()), default=1),
            min_nodes=machine.limits.min_nodes,
            max_nodes=machine.limits.max_nodes,
            restarts=machine.restarts,
            max_restarts=machine.max_restarts(now),
            nodes=tuple(self._node(node, ranks, now) for node in machine.nodes.values()),
            step=self._heard.step,
            step_s=progress.step_s,
            remaining=progress.remaining,
            loss=progress.loss,
            snapshot=_last(self._heard.snapshot, now),
            checkpoint=saved if saved is not None and saved.step else None,
            incidents=tuple(a.Decision(text, round(now - at, 3)) for at, text in self._incidents),
            time=self._wall(),
            unconfirmed=round(unsure, 1) if unsure >= machine.timing.dead_after else None,
            stepped=stepped,
        )

    # Requests.

    def _depart(self, link: int, waiting: _Waiting, request: a.AskDrain, now: float) -> None:
        node = self._machine.nodes.get(request.node)
        if node is None:
            known = ", ".join(list(self._machine.nodes)[:20])
            self._answer(link, False, f"there is no node {request.node!r} in the run; there are: {known}")
            return
        waiting.node, waiting.busy = node, node.active
        waiting.until = None if request.seconds is None else now + request.seconds + LATE
        if not node.leaving:
            self._follow(self._machine.depart(request.node, DRAIN_REASON, request.seconds), now)

    def _save(self, link: int, now: float) -> None:
        machine = self._machine
        members = machine.record.round.members
        first = machine.nodes.get(members[0].node_id) if members else None
        if machine.draining:
            # The drained state is in memory: the next round saves it, or the run's end shows whether it was saved.
            self._ask_again()
        elif not machine.running or first is None or not first.active:
            self._answer(link, False, f"no round trains, so there is nothing to save; {machine.outlook}")
        elif first.done or not first.ready:
            text = "the workers cannot be asked: they have finished" if first.done else "the workers cannot be asked: "
            more = "" if first.done else "none trains with elastic_launch's library yet"
            self._answer(link, False, text + more)
        else:
            self._follow(machine.save(), now)

    def _stacks(self, link: int, waiting: _Waiting, now: float) -> None:
        machine = self._machine
        nodes = machine.nodes.where(ACTIVE)
        if not nodes:
            self._answer(link, False, f"no workers run; {machine.outlook}")
            return
        waiting.stacks_of, waiting.until = {node.hello.node_id for node in nodes}, now + STACKS
        order = m.TakeStacks(machine.record.term, machine.record.round.number)
        self._out += [Send(node.link, order) for node in nodes]

    def _told_stacks(self, link: int, waiting: _Waiting, now: float) -> None:
        """Answer the caller that waits for stacks, if there are no more to come."""
        late = waiting.until is not None and now >= waiting.until
        active = {node.hello.node_id for node in self._machine.nodes.where(ACTIVE)}
        left = waiting.stacks_of & active
        if left and not late:
            return
        missing = ", ".join(sorted(waiting.stacks_of))
        number = self._machine.record.round.number
        text = f"no stacks from {missing}" if missing else f"these are all workers of round {number}"
        self._answer(link, not missing, text)

    def _resize(self, link: int, low: int, high: int, now: float) -> None:
        before = self._machine.record.round.number
        try:
            instructions = self._machine.resize(low, high, now)
        except UsageError as error:
            self._answer(link, False, error.message.rstrip("."))
            return
        self._follow(instructions, now)
        machine = self._machine
        settled = machine.running and not machine.draining
        parked = not machine.running and len(machine.nodes) < low
        if self._callers.get(link) and (settled or parked) and machine.record.round.number == before:
            self._answer(link, True, f"the run may have {low}:{high} nodes now; {machine.outlook}")

    # Outcomes.

    def _follow(self, instructions: Sequence[Instruction], now: float) -> None:
        self._out += instructions
        for instruction in instructions:
            if isinstance(instruction, Emit):
                self._happened(instruction.event, now)
        for link, waiting in self._pending():
            if waiting.node is not None:
                self._departing(link, waiting, waiting.node, now)
            if isinstance(waiting.request, a.AskStacks) and waiting.until is not None:
                self._told_stacks(link, waiting, now)
            if waiting.asks_again and self._can_save():
                waiting.asks_again = False
                self._save(link, now)

    def _ask_again(self) -> None:
        for _, waiting in self._pending():
            waiting.asks_again = isinstance(waiting.request, a.AskSave)

    def _can_save(self) -> bool:
        """Whether a round trains and its first member can be asked to save, or never will be able to."""
        machine, members = self._machine, self._machine.record.round.members
        first = machine.nodes.get(members[0].node_id) if members else None
        return machine.running and not machine.draining and first is not None and (first.ready or first.done)

    def _happened(self, event: Event, now: float) -> None:
        if event.printed:
            self._incidents.append((now, sentence(event)))
        if not self._callers:
            return
        match event:
            case RoundDrained(step=step):
                for _, waiting in self._pending():
                    waiting.step = step
                self._ask_again()
            case RoundBroken(cause=cause):
                for _, waiting in self._pending():
                    waiting.broken = cause
                self._settle(a.AskSave, lambda _: (False, f"the round broke before all was saved: {cause}"))
            case RoundFormed():
                self._settle(a.AskResize, lambda waiting: (True, f"{_before(waiting)}{sentence(event)}"))
            case Parked():
                self._settle(a.AskResize, lambda waiting: (True, f"{_before(waiting)}{sentence(event)}"))
                self._settle(a.AskSave, lambda _: (False, f"nothing was saved; {sentence(event)}"))
            case RunEnded(code=code, cause=cause):
                self._ended(code, cause)

    def _departing(self, link: int, waiting: _Waiting, node: Node, now: float) -> None:
        """Answer the caller that waits for a node's drain, if the drain is over."""
        known = self._machine.nodes.get(node.hello.node_id)
        left = known is not node or (node.leaving and not node.active)
        name = f"node {node.hello.node_id}"
        if not left and waiting.until is not None and now >= waiting.until:
            self._answer(link, False, f"{name} has not left in time")
        elif left and waiting.broken:
            self._answer(link, False, f"{name} left, but the round was broken: {waiting.broken}")
        elif left and waiting.step is None and waiting.busy:
            self._answer(link, False, f"{name} left, but its workers were not drained")
        elif left and (not self._machine.draining or self._leads(node)):
            how = "had no workers" if waiting.step is None else f"was drained after step {waiting.step}"
            if waiting.unsaved:
                how += f", its state not saved: {waiting.unsaved}"
            self._answer(link, not waiting.unsaved, f"{name} left: it {how}; {self._machine.outlook}", waiting.step)

    def _leads(self, node: Node) -> bool:
        """Whether this leader leaves with the node, so that it sees only the node's own part."""
        return node.hello.incarnation == self._machine.record.leader.incarnation

    def _wrote(self, report: m.NodeSaved) -> None:
        if report.error:
            self._settle(a.AskSave, lambda _: (False, f"no checkpoint was written: {report.error}"))
        else:
            self._settle(a.AskSave, lambda _: (True, f"checkpoint of step {report.step} written"), report.step)

    def _ended(self, code: int, cause: str) -> None:
        text = f"the run has ended with {code}: {cause}"
        for link, waiting in self._pending():
            if isinstance(waiting.request, a.AskDrain) and not waiting.request.node:
                broken = f"; the round was broken: {waiting.broken}" if waiting.broken else ""
                kept = waiting.saved or waiting.step is None  # nothing trained
                self._answer(link, kept and not waiting.broken, text + broken, waiting.step)
            elif isinstance(waiting.request, a.AskSave):
                self._answer(link, waiting.saved, text, waiting.step)
        for link in self._callers:
            self._send(link, self._machine.end_order())

    def _settle(
        self, kind: type[a.AdminRequest], answer: Callable[[_Waiting], tuple[bool, str]], step: int | None = None
    ) -> None:
        for link, waiting in self._pending():
            if isinstance(waiting.request, kind):
                self._answer(link, *answer(waiting), step=step)

    def _pending(self) -> list[tuple[int, _Waiting]]:
        return [(link, waiting) for link, waiting in self._callers.items() if waiting is not None]

    def _reached(self, number: int, training: int, step: int, now: float) -> None:
        heard = self._heard
        # A later round may continue from an earlier step; within a round, nodes report at different times.
        if (number, training) > (heard.round, heard.training):
            heard.round, heard.training, heard.step, heard.stepped = number, training, step, now
            heard.snapshot, heard.steps = None, {}
        if (number, training) == (heard.round, heard.training) and step > (heard.step or 0):
            heard.step, heard.stepped = step, now

    def _node(self, node: Node, ranks: Mapping[str, tuple[int, int]], now: float) -> a.NodeStatus:
        idle = "spare" if self._machine.running else "waiting"
        idle = "starting" if self._machine.live and node.importing else idle
        hello, silence = node.hello, round(now - node.heard, 3)
        if not node.active:
            state = "leaving" if node.leaving else idle
            return a.NodeStatus(hello.node_id, hello.address, node.workers, state, silence, load=node.load)
        step = self._heard.steps.get(hello.node_id) if self._heard.round == self._machine.record.round.number else None
        mine, doing = ranks.get(hello.node_id, ()), _doing(node, step)
        busy = ("starting" if doing == "start" else "training") if self._machine.running else "stopping"
        state = "leaving" if node.leaving else busy
        return a.NodeStatus(hello.node_id, hello.address, node.workers, state, silence, mine, doing, step, node.load)

    def _answer(self, link: int, done: bool, text: str, step: int | None = None) -> None:
        self._callers[link] = None
        self._send(link, a.AdminAnswer(self._machine.record.term, done, text, step))

    def _refuse(self, link: int, reason: str, hint: str) -> list[Instruction]:
        self._send(link, m.Refused(self._machine.record.term, reason, hint))
        self._out.append(Close(link))
        return self._flush()

    def _send(self, link: int, order: m.Order) -> None:
        self._out.append(Send(link, order))

    def _flush(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out


def _doing(node: Node, step: int | None) -> str:
    """Return what the workers of a node of the round do."""
    if node.done:
        return "done"
    if node.stalled is not None:
        return "late"
    if node.ready or step is not None:
        return "train"
    return "run" if node.joined else "start"


def _last(save: tuple[int, float, int] | None, now: float) -> a.LastSave | None:
    return None if save is None else a.LastSave(save[0], round(now - save[1], 3), save[2])


def _before(waiting: _Waiting) -> str:
    """How the previous round ended, if it ended after the request."""
    if waiting.broken:
        return f"the round before was broken ({waiting.broken}); "
    return "" if waiting.step is None else f"drained after step {waiting.step}; "
