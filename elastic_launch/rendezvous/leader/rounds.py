"""How a leader forms, drains, breaks and ends rounds: its phase, and the transitions between phases."""

# Every match on the phase is exhaustive: a new phase must be handled everywhere.
# mypy: enable-error-code="exhaustive-match"
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from elastic_launch.config.launch_config import LONGEST_WAIT
from elastic_launch.errors import ExitCode
from elastic_launch.events import facts as f
from elastic_launch.events.sentences import next_up, sentence, why
from elastic_launch.events.types import (
    CauseFound,
    NodeLeft,
    NodeLost,
    RestartCharged,
    RoundBroken,
    RoundDrained,
    RoundDraining,
)
from elastic_launch.failure import Failure, StallPlace, Suspect
from elastic_launch.rendezvous.leader.forming import gather, outlook, start_ahead
from elastic_launch.rendezvous.leader.hangs import judge_stalled
from elastic_launch.rendezvous.leader.newcomers import code_of, difference, newcomers_failures
from elastic_launch.rendezvous.leader.nodes import (
    ACTIVE,
    DONE,
    JOINED,
    LIVE,
    MEMBER,
    READY,
    STALLS,
    TRAINED,
    VETERAN,
    Node,
)
from elastic_launch.rendezvous.leader.phases import (
    COLLECT,
    LATE,
    Broken,
    Draining,
    Ended,
    Ending,
    Gathering,
    ParkedRun,
    Phase,
    Running,
    broken_round,
    highest,
    last_failure,
    over,
)
from elastic_launch.rendezvous.leader.resizing import prepared, regained
from elastic_launch.rendezvous.leader.state import LeaderState
from elastic_launch.rendezvous.leader.verdict import Kind, disconnected, is_own, judge, killed, kind_of, root_cause
from elastic_launch.rendezvous.record import Member
from elastic_launch.rendezvous.wire import messages as m

MOST_SECONDS = 86400.0
"""A drain's limit of this many seconds or more counts as no limit."""


class Rounds:
    """A leader's rounds; :class:`elastic_launch.rendezvous.leader.machine.LeaderMachine` reports events to it.

    Attributes:
        phase: see :mod:`elastic_launch.rendezvous.leader.phases`.
    """

    def __init__(self, state: LeaderState) -> None:
        self._state = state
        self.phase: Phase = Gathering()
        self._hung_at: set[StallPlace] = set()  # the places at which workers have hung
        if state.record.end is not None:
            self.phase = Ended()
        elif state.record.round.members:
            self.phase = Running(state.began, taken_over=True, fetching=True)

    @property
    def outlook(self) -> str:
        """What happens next, as text."""
        return next_up(outlook(self.phase, self._state))

    @property
    def running(self) -> bool:
        """Whether a round is training; it may be draining."""
        return isinstance(self.phase, Running | Draining)

    # Events of a round's members.

    def ready(self, report: m.NodeReady, now: float) -> None:
        """Handle that a member's workers train; they may not know yet that the round is over."""
        if (said := self._last()) is not None:
            said.begun = highest(said.begun, report.step)
        self._state.resizing.prices.told(report.remaining_s, now)

    def progressed(self, node: Node, step: int) -> None:
        """Handle that a member's workers in the current round have done so many steps."""
        if (said := self._last()) is not None:
            said.reached = highest(said.reached, step)
            if said.begun is not None and step > said.begun:
                if said.taken_over:
                    node.trained = True  # as its last leader knew
                self._state.trains(node)

    def recall(self, known: m.RoundSeen, now: float) -> None:
        """Take over what a member knows of a round that another leader formed, and that is not judged yet."""
        said = self._last()
        if said is None or not said.taken_over:
            return
        lasted = min(known.lasted, known.formed_ago)
        if isinstance(said, Running):
            said.earlier = max(said.earlier, lasted - (now - said.formed_at))
        elif said.judged_at is None:
            said.lasted = max(said.lasted, lasted - (now - said.at))
        else:
            return
        said.begun, said.reached = highest(said.begun, known.begun), highest(said.reached, known.reached)
        self._state.exclusion.stood(known.formed_ago - (now - self._state.began))

    def _last(self) -> Running | Broken | None:
        """The round that trains, drains or was broken; None if none does and its members have stopped."""
        match self.phase:
            case Running() | Broken() as last:
                return last
            case Draining(running=last):
                return last
            case Gathering() | ParkedRun() | Ending() | Ended():
                return None

    def failed(self, node: Node, failure: Failure, now: float, *, brought: bool = False) -> None:
        """Handle the failure of a worker of the current round.

        Args:
            brought: the node reported it to the last leader already, or could not.
        """
        failure = self._after_others(failure)
        match self.phase:
            case Running() | Draining():
                if node.active:
                    self._break_by(failure, self.phase, now)
            case Broken() | Gathering() | ParkedRun() | Ending():
                if (last := broken_round(self.phase)) is not None:
                    self._also_failed(last, failure, now, brought=brought)
            case Ended():
                pass

    def unfit(self, node: Node, failure: Failure, now: float) -> None:
        """Handle that a newcomer's worker, started ahead of a place, would fail again in a round."""
        if node.leaving or node.active:
            return
        if self._state.has_trained and self._state.is_newcomer(node):
            self._leave_out(node, failure, now)
        else:
            node.importing = False

    def imported(self, node: Node, arguments: str, now: float) -> None:
        """Handle that a node's workers could begin at once, with these arguments if they are known."""
        node.importing = False
        differs = difference(node.hello.node_id, arguments, self._state.arguments)
        if differs and self._state.has_trained and self._state.is_newcomer(node) and not (node.active or node.leaving):
            self._state.leave_out(node, ExitCode.DO_NOT_RETRY, differs, None, now)

    def _leave_out(self, node: Node, failure: Failure, now: float) -> None:
        code = code_of(failure, self._state.limits.max_restarts)
        self._state.leave_out(node, code, failure, failure, now, stays=killed(failure))

    def _leave_out_newcomers(self, broken: Broken, now: float) -> bool:
        """If only newcomers have failed in a round, leave them out, at no cost to the run; return whether."""
        if broken.imposed is not None or not self._state.nodes.count(MEMBER | VETERAN):
            return False
        state, counts = self._state, broken.begun is not None or self._state.budget.best is not None
        found = newcomers_failures(state.record.round, state.nodes, broken.failures, counts=counts, host=state.host)
        if not found:
            return self._leave_out_ended(broken, now)
        broken.imposed = Kind.MEMBERSHIP
        first = next(iter(found.values()))
        self._found(broken, kind_of(first), first, [_suspect(first)], first)
        for node_id, failure in found.items():
            node = state.nodes.get(node_id)
            if node is not None and not node.leaving:
                self._leave_out(node, failure, now)
        return True

    def _leave_out_ended(self, broken: Broken, now: float) -> bool:
        """If a round broke only because workers of newcomers had ended with 0, leave these out; return whether."""
        members = self._state.nodes.where(MEMBER)
        ended = [node for node in members if node.done and self._state.is_newcomer(node) and not node.veteran]
        others = [node for node in members if node not in ended]
        fails = any(is_own(failure) or failure.alike for _, failure in broken.failures)
        if fails or not broken.failures or not ended or not any(node.veteran for node in others):
            return False
        cause = f.OfMembers("ended early", _names(ended))
        broken.imposed = Kind.MEMBERSHIP
        self._found(broken, Kind.MEMBERSHIP, cause, map(Suspect, cause.nodes))
        for node in ended:
            if not node.leaving:
                self._state.leave_out(node, ExitCode.DO_NOT_RETRY, cause, None, now)
        return True

    def _awaits_newcomer(self, broken: Broken) -> bool:
        """Whether a newcomer may yet report the failure that made others of a broken round fail."""
        if broken.imposed is not None or any(is_own(failure) or failure.alike for _, failure in broken.failures):
            return False
        nodes = self._state.nodes
        return nodes.count(MEMBER | ACTIVE, lacks=TRAINED) > 0 and nodes.count(MEMBER | VETERAN) > 0

    def _after_others(self, failure: Failure) -> Failure:
        """Return the report on a broken connection with the ranks of other nodes that had ended with 0 before.

        Those of its own node are known there.
        """
        if not failure.symptom or failure.ended_before:
            return failure
        last, nodes = self._state.record.round, self._state.nodes
        there = {node.hello.node_id: node.hello.incarnation for node in nodes.where(MEMBER | DONE)}
        done = [last.index(*each) for each in {**self._state.gone, **there}.items()]
        ranks = [place.rank for index in done if index is not None for place in last.ranks_of(index)]
        return replace(failure, ended_before=tuple(sorted(ranks)))

    def _break_by(self, failure: Failure, phase: Running | Draining, now: float) -> None:
        broken = over(phase, now, None, failure)
        broken.failures.append((now, failure))
        broken.told, broken.suspects = failure, (_suspect(failure),)
        self._end_round(phase, broken, kind_of(failure), lambda: "")

    def stalled(self, node: Node, report: m.Stalled, now: float) -> None:
        """Handle that a member's workers are late, or no longer.

        The round is judged once those of all members are, or one is stopped by a signal. A drain with a limit ends by
        itself, and then costs nothing.
        """
        node.stalled = report if report.seconds > 0 else None
        match self.phase:
            case Running() | Draining(deadline=None):
                self._consider_stalled(self.phase, report, now)
            case Draining() | Broken() | Gathering() | ParkedRun() | Ending() | Ended():
                pass

    def _consider_stalled(self, phase: Running | Draining, report: m.Stalled, now: float) -> None:
        # Of thousands of members each says that it is late.
        nodes, size, gone = self._state.nodes, len(self._state.record.round.members), len(self._state.gone)
        if isinstance(phase, Draining):  # members that have stopped are done, those of an earlier leader may train
            size = gone + nodes.count(ACTIVE) + len(self._state.owed)
        stopped = any(worker.state == "stopped" for worker in report.workers)
        if not stopped and gone + nodes.count(ACTIVE | STALLS) + nodes.count(ACTIVE | DONE, lacks=STALLS) < size:
            return
        members = self._state.members()
        late = {each.hello.node_id: each.stalled for each in members if each.stalled is not None}
        # What reports steps and is left by the others may wait for its last checkpoint.
        asked = all(report.asked for report in late.values())
        finished = gone + sum(each.done for each in members if each.stalled is None) if asked else 0
        if late and (stopped or len(late) + finished == size):
            self._judge_stalled(phase, late, now)

    def _judge_stalled(self, phase: Running | Draining, late: Mapping[str, m.Stalled], now: float) -> None:
        number = self._state.record.round.number
        running = phase.running if isinstance(phase, Draining) else phase
        left = sum(len(report.workers) for report in late.values())
        # Of a round that drains, others may have left the last exchange that a slow rank is still in.
        finished = phase is running and left < self._state.record.round.world_size
        verdict = judge_stalled(number, late, now - running.formed_at, finished=finished, before=self._hung_at)
        if verdict is None:
            return
        self._hung_at |= verdict.stood
        broken = over(phase, now, None if verdict.failures else Kind.HANG, verdict.cause)
        broken.failures += [(now, failure) for failure in verdict.failures]
        broken.told = next(iter(verdict.failures), None)
        broken.suspects = tuple(map(_suspect, verdict.failures))
        self._state.emit(verdict.event(number))
        self._end_round(phase, broken, Kind.HANG, lambda: "")

    def stopped(self, node: Node, report: m.Stopped, now: float) -> None:
        """Handle that a member of the current round has reaped or suspended its workers."""
        match self.phase:
            case Running() | Draining():
                if node.active:
                    self._stopped(self.phase, node, report, now)
            case Broken() | Gathering() | ParkedRun() | Ending() | Ended():
                pass
        node.active = False

    def _stopped(self, phase: Running | Draining, node: Node, report: m.Stopped, now: float) -> None:
        if report.drained is None:
            name = node.hello.node_id
            if isinstance(phase, Draining) and phase.kind is Kind.PREEMPTION:
                self.break_round(phase, phase.kind, f.DrainFailed(phase.cause, (name,), stopped=True), [name], now)
            else:
                self.break_round(phase, Kind.NODE_LOSS, f.OfMembers("stopped", (name,)), [name], now)
            return
        if isinstance(phase, Running):
            # The ranks agreed by themselves, because a worker was asked to stop, not its agent.
            node.active = False
            cause = f.OfMembers("told", (node.hello.node_id,))
            phase = self._drain(phase, Kind.PREEMPTION, cause, None, now)
        phase.step = max(phase.step, report.drained)
        phase.saved |= report.saved
        phase.unsaved = phase.unsaved or report.unsaved

    def leaves(self, node: Node, reason: str, seconds: float, now: float) -> None:
        """Handle that a node leaves, with so many seconds for a drain."""
        if node.leaving:
            return
        node.leaving = True
        # Workers started under a leader that is about to leave would be started for nothing.
        self._state.departing = self._state.departing or node.hello.incarnation == self._state.record.leader.incarnation
        name = node.hello.node_id
        cause = f.MemberLeaves(name, reason)
        broke = 0
        match self.phase:
            case Running() | Draining():
                if node.active and not node.done:
                    broke = self._state.record.round.number
                    self._stop_round(self.phase, Kind.PREEMPTION, cause, [name], seconds, now)
            case Broken():
                if node.active:
                    # Other workers crashed because this node's workers ended before it could report that it leaves.
                    self._impose(self.phase, Kind.PREEMPTION, cause, [name])
            case Gathering() | ParkedRun() | Ending() | Ended():
                pass
        self._state.emit(NodeLeft(name, reason, broke, self.outlook))

    def lose(self, node: Node, how: f.Loss, now: float) -> None:
        """Handle the loss of a node."""
        self._state.nodes.remove(node)
        if self.running and node.active and node.done:
            self._state.gone[node.hello.node_id] = node.hello.incarnation
            node.active = False
        trains = self.running and node.active
        if node.leaving and not trains:
            return  # it announced that it leaves, and no other node waits for it
        name = node.hello.node_id
        cause = f.MemberLost(name, how)
        match self.phase:
            case Running() | Draining():
                if node.active:
                    self.break_round(self.phase, Kind.NODE_LOSS, cause, [name], now)
            case Broken():
                if node.active:
                    self._impose(self.phase, Kind.NODE_LOSS, cause, [name])
            case Gathering() | ParkedRun() | Ending() | Ended():
                pass
        broke = self._state.record.round.number if trains else 0
        silence = how.seconds if how.what == "silent" else 0.0
        self._state.emit(NodeLost(name, why(how), silence, broke, self.outlook))

    def comes_without_workers(
        self, node: Node, how: Literal["back", "new leader"], failure: Failure | None, now: float
    ) -> None:
        """Handle that a member of the current round is connected without its workers.

        Args:
            failure: why it stopped them, if one of them failed and it is not charged yet.
        """
        match self.phase:
            case Running() | Draining() if node.done or node.hello.node_id in self._state.gone:
                self._state.gone[node.hello.node_id] = node.hello.incarnation
            case Running() | Draining():
                name = node.hello.node_id
                # A lost member makes workers crash.
                if failure is None or any(member.node_id != name for member in self._lost(now)):
                    self.break_round(self.phase, Kind.NODE_LOSS, f.OfMembers(how, (name,)), [name], now)
                    if isinstance(self.phase, Broken):
                        self.phase.presumed = failure is None and node.hello.broken
                else:
                    self._break_by(failure, self.phase, now)
            case Broken() | Gathering() | ParkedRun() | Ending():
                if failure is not None and (last := broken_round(self.phase)) is not None:
                    self._also_failed(last, failure, now, brought=True)
            case Ended():
                pass

    def tell_again(self, node: Node, now: float) -> None:
        """Repeat the orders for a member's round: they may have been lost with its old link."""
        match self.phase:
            case Running():
                if self._state.some_done:
                    self._state.send(node.link, m.PeerDone(self._state.record.term, self._state.record.round.number))
            case Draining():
                self._send_drain([node], self.phase, now)
            case Broken():
                self._send_break([node], self.phase)
            case Ending(after=broken):
                self._send_break([node], broken)
            case Gathering() | ParkedRun() | Ended():
                pass

    # Users' requests.

    def stop(self, reason: str, seconds: float | None, now: float) -> None:
        """Drain the round, if there is one, and end the run with exit code 143."""
        ends = f.UserStop(reason)
        match self.phase:
            case Running():
                self._stop_round(self.phase, Kind.PREEMPTION, reason, (), seconds, now, ends)
            case Draining():
                if self.phase.ends:
                    return
                self._stop_round(self.phase, Kind.PREEMPTION, reason, (), seconds, now, ends)
            case Gathering() | Broken():
                if self.phase.ends:
                    return
                self.phase.ends = ends
            case ParkedRun(after=after):
                self.phase = Gathering(after, ends)
            case Ending() | Ended():
                return
        self.consider(now)

    def end(self, code: int, cause: f.RunCause, now: float) -> None:
        """Record the run's end."""
        failure = last_failure(self.phase)
        self.phase = Ended(failure)
        self._state.end(code, cause, failure, now)

    # Transitions from Running and Draining.

    def _stop_round(
        self,
        phase: Running | Draining,
        kind: Kind,
        cause: f.Cause,
        nodes: Iterable[str],
        seconds: float | None,
        now: float,
        ends: f.UserStop | None = None,
    ) -> None:
        """Drain the round if all members can within ``seconds`` (None: no limit), else break it.

        Args:
            nodes: ids of those of which the cause is.
        """
        in_time = seconds is None or seconds > 0  # False for NaN
        deadline = None if seconds is None or seconds >= MOST_SECONDS else now + seconds
        if isinstance(phase, Draining) and in_time:
            phase.deadline = min((x for x in (phase.deadline, deadline) if x is not None), default=None)
            if ends:
                phase.ends = ends
                self._send_drain(self._state.members(), phase, now)
        elif isinstance(phase, Running) and in_time and self._can_drain():
            self._drain(phase, kind, cause, deadline, now, ends)
        else:
            self.break_round(phase, kind, cause, nodes, now, ends)

    def _can_drain(self) -> bool:
        nodes, size = self._state.nodes, len(self._state.record.round.members)
        return nodes.count(ACTIVE) == size == nodes.count(ACTIVE | READY, lacks=DONE)

    def _drain(
        self,
        running: Running,
        kind: Kind,
        cause: f.Cause,
        deadline: float | None,
        now: float,
        ends: f.UserStop | None = None,
    ) -> Draining:
        self.phase = drain = Draining(running, now, kind, cause, deadline, ends)
        self._send_drain(self._state.members(), drain, now)
        seconds = None if deadline is None else round(deadline - now, 3)
        self._state.emit(RoundDraining(self._state.record.round.number, kind.text, why(cause), seconds))
        return drain

    def _send_drain(self, nodes: Iterable[Node], drain: Draining, now: float) -> None:
        seconds = None if drain.deadline is None else round(max(0.0, drain.deadline - now), 3)
        term, number, cause = self._state.record.term, self._state.record.round.number, why(drain.cause)
        order = m.DrainRound(term, number, drain.kind.text, cause, seconds, bool(drain.ends))
        for node in nodes:
            self._state.send(node.link, order)

    def break_round(
        self,
        phase: Running | Draining,
        kind: Kind,
        cause: f.Cause,
        nodes: Iterable[str],
        now: float,
        ends: f.UserStop | None = None,
    ) -> None:
        """Break the round because of an event on its nodes, of which these are the ids."""
        broken = over(phase, now, kind, cause, ends)
        broken.suspects = tuple(map(Suspect, nodes))
        free = self._state.budget.spares(broken, self._state.limits.max_nodes)
        self._end_round(phase, broken, kind, lambda: self.outlook if free else "")

    def _end_round(self, phase: Running | Draining, broken: Broken, kind: Kind, outlook: Callable[[], str]) -> None:
        self.phase = broken
        self._send_break(self._state.members(), broken, kind)
        lasted = None if broken.taken_over else broken.lasted
        number, code = self._state.record.round.number, _exit_code(broken.told)
        self._state.emit(RoundBroken(number, kind.text, why(broken.cause), lasted, outlook(), code, broken.suspects))

    def _send_break(self, nodes: Iterable[Node], broken: Broken, kind: Kind | None = None) -> None:
        number = self._state.record.round.number
        kind = judge(broken.imposed, broken.failures) if kind is None else kind
        hung = tuple(
            failure.rank for _, failure in broken.failures if failure.rank is not None and kind_of(failure) is Kind.HANG
        )
        order = m.Break(self._state.record.term, number, kind.text, why(broken.cause), hung, broken.suspects)
        for node in nodes:  # the same object, so that it is encoded once
            self._state.send(node.link, order)

    # Findings about a round that is over.

    def _impose(self, broken: Broken, kind: Kind, cause: f.Cause, nodes: Iterable[str]) -> None:
        """Record an event on nodes of the broken round, which made workers elsewhere fail."""
        if broken.judged_at is None and (broken.imposed is None or broken.presumed or broken.imposed > kind):
            broken.imposed, broken.presumed = kind, False
            self._found(broken, kind, cause, map(Suspect, nodes))

    def _also_failed(self, broken: Broken, failure: Failure, now: float, *, brought: bool = False) -> None:
        """Record that another worker of the broken round failed; it may be the root cause."""
        if any(known == failure for _, known in broken.failures):
            return  # its node has repeated it on another link
        if brought and broken.presumed and broken.judged_at is None:
            broken.imposed, broken.presumed = None, False
        broken.failures.append((now, failure))
        if broken.judged_at is not None and self._leave_out_newcomers(broken, now):
            return
        if broken.imposed is not None or root_cause(broken.failures) is not failure:
            return
        kind = kind_of(failure)
        self._found(broken, kind, failure, [_suspect(failure)], failure)
        ends = broken.judged_at is not None and kind.is_final and not isinstance(self.phase, Ending)
        if broken.failure is not None or ends:
            broken.failure = failure
        if ends:
            self.phase = Ending(broken, self._state.budget.end(kind), now)

    def _found(
        self, broken: Broken, kind: Kind, cause: f.Cause, suspects: Iterable[Suspect], failure: Failure | None = None
    ) -> None:
        if failure is None or failure is not broken.told:
            broken.cause, broken.told, broken.suspects = cause, failure, tuple(suspects)
            number = self._state.record.round.number
            event = CauseFound(number, kind.text, why(cause), _exit_code(failure), broken.suspects)
            self._state.emit(event)
            order = m.UserMessage(self._state.record.term, sentence(event))
            for node in self._state.nodes.values():
                if node.hello.incarnation != self._state.record.leader.incarnation:  # this node shows the event itself
                    self._state.send(node.link, order)

    # Timers and pending transitions.

    def consider(self, now: float) -> None:
        """Carry out what has become possible or due."""
        if now - self._state.began >= self._state.timing.dead_after:
            self._state.owed.discard("")
        self._state.review(now)
        match self.phase:
            case Running():
                self._consider_running(self.phase, now)
            case Draining():
                start_ahead(self._state, self.phase)
                self._consider_draining(self.phase, now)
            case Broken():
                start_ahead(self._state, self.phase)
                self._consider_broken(self.phase, now)
            case Ending(after=broken, ruling=ruling):
                if now - self.phase.since >= LATE or not self._state.nodes.count(ACTIVE):
                    self.end(*self._state.budget.verdict(ruling, broken), now)
            case Gathering() | ParkedRun():
                if not self._state.owed:
                    self.phase = gather(self._state, self.phase, now)
                    if not self.running:
                        self._state.release()
            case Ended():
                pass

    def due(self) -> list[float]:
        """Times at which the phase must be considered at the latest; those in the past do not count."""
        timing = self._state.timing
        match self.phase:
            case Running():
                back = [*self._state.exclusion.ends(), *self._state.refusals.ends()]
                return [self._state.last_arrival + timing.resize_delay, *back] if self._room() else back
            case Draining(deadline=deadline):
                return [] if deadline is None else [deadline]
            case Broken(judged_at=None, at=at):
                return [at + COLLECT]
            case Broken() as broken:
                return [broken.not_before, *(self._due_back(grace, broken) for grace in self._state.nodes.graces)]
            case Gathering():
                return [self._state.last_arrival + timing.join_settle]
            case ParkedRun(at=at):
                return [self._state.last_arrival + timing.join_settle, at + timing.min_wait]
            case Ending(since=since):
                return [since + LATE]
            case Ended():
                return []

    def _consider_running(self, running: Running, now: float) -> None:
        nodes, size, most = self._state.nodes, len(self._state.record.round.members), self._state.limits.max_nodes
        gone = len(self._state.gone)
        here, done, ready = nodes.count(ACTIVE) + gone, nodes.count(ACTIVE | DONE) + gone, nodes.count(ACTIVE | READY)
        if here == size == ready + nodes.count(ACTIVE | DONE, lacks=READY) + gone:
            running.fetching = False
        if not running.fetching:
            self._state.release()
        if here == size == ready:
            self._state.resizing.prices.trains(now, live=not nodes.count(ACTIVE, lacks=LIVE))
        start_ahead(self._state, running)
        if here < size and (lost := self._lost(now)):
            # Only a leader that took over a running round can lack members: they are dead, or never connected to it.
            name = lost[0].node_id
            self.break_round(running, Kind.NODE_LOSS, f.OfMembers("missing", (name,)), [name], now)
            self.consider(now)
        elif here == size == done:
            self.end(ExitCode.DONE, f.WorkersFinished(), now)
        elif nodes.count(ACTIVE, lacks=JOINED):
            if now - running.formed_at >= self._state.timing.join_timeout:
                cause = f.OfMembers("not started", _names(nodes.where(ACTIVE, lacks=JOINED)))
                self.break_round(running, Kind.NODE_LOSS, cause, cause.nodes, now)
        elif here == size > most and not done:
            self._stop_round(running, Kind.MEMBERSHIP, f.Resize(most=most), (), None, now)
            self.consider(now)
        else:
            self._consider_resize(running, now)

    def _consider_resize(self, running: Running, now: float) -> None:
        """Enlarge the round for prepared nodes that wait, and for workers of its members that have started again."""
        state, most = self._state, self._state.limits.max_nodes
        at_boundary = self._can_drain()
        # Breaking a round of live workers that are still meeting would only delay them.
        meets = state.live and not at_boundary and now - running.formed_at < state.timing.join_timeout
        settled = now - state.last_arrival >= state.timing.resize_delay
        joining = prepared(state.nodes) if self._room() and settled and not meets else []
        back = regained(state.nodes, state.record.round) if at_boundary else []
        if not joining and not back:
            return
        if not state.resizing.pays(state.record.round, most, now):
            self._skip_resize([*joining, *back], now)
            return
        self._stop_round(running, Kind.MEMBERSHIP, f.Resize(_names(joining), _names(back)), (), None, now)
        self.consider(now)

    def _lost(self, now: float) -> list[Member]:
        """Members of the running round that are not connected and need not be waited for."""
        owed, overdue = self._state.owed, self._state.overdue(now)
        members = self._state.record.round.members
        there = self._state.nodes.count(ACTIVE) + len(self._state.gone)
        if not overdue and there + len(owed) - ("" in owed) >= len(members):
            return []
        awaited = owed - overdue
        here = {*self._state.gone, *(node.hello.node_id for node in self._state.members())}
        known = here | awaited
        return [member for member in members if member.node_id not in known]

    def _room(self) -> bool:
        return self._state.resizing.has_room(len(self._state.record.round.members), self._state.limits.max_nodes)

    def _skip_resize(self, skipped: list[Node], now: float) -> None:
        """Inform the user and those nodes that the running round is not resized for them."""
        state = self._state
        event = state.resizing.skip(skipped, state.record.round, state.limits.max_nodes, now)
        if event is not None:
            self._state.emit(event)
            order = m.UserMessage(state.record.term, sentence(event))
            for node in skipped:
                state.send(node.link, order)

    def _consider_draining(self, drain: Draining, now: float) -> None:
        nodes, number, everybody = (
            self._state.nodes,
            self._state.record.round.number,
            len(self._state.record.round.members),
        )
        left, done, gone = nodes.count(ACTIVE), nodes.count(ACTIVE | DONE), len(self._state.gone)
        if done + gone == everybody:
            self.end(ExitCode.DONE, f.WorkersFinished(), now)
        elif not left:
            ends = drain.ends and replace(drain.ends, step=drain.step, saved=drain.saved, unsaved=drain.unsaved)
            self.phase = over(drain, drain.at, drain.kind, drain.cause, ends)
            took = round(now - drain.at, 6)
            self._state.emit(RoundDrained(number, drain.step, drain.kind.text, why(drain.cause), took, self.outlook))
            self.consider(now)
        elif left == done:
            self.break_round(drain, drain.kind, f.DrainFailed(drain.cause), (), now)
        elif drain.deadline is not None and now >= drain.deadline:
            cause = f.DrainFailed(drain.cause, _names(nodes.where(ACTIVE)))
            self.break_round(drain, drain.kind, cause, cause.nodes, now)

    def _consider_broken(self, broken: Broken, now: float) -> None:
        nodes = self._state.nodes
        if overdue := self._state.overdue(now):
            cause = f.OfMembers("missing", tuple(sorted(overdue)))
            self._impose(broken, Kind.NODE_LOSS, cause, cause.nodes)
            self._state.owed -= overdue
        # A member that died with the previous leader makes the others crash: first find out which are missing.
        # The worker that broke connections may still be ending; until its node has stopped, nothing waits for this.
        awaits = disconnected(broken.imposed, broken.failures) or self._awaits_newcomer(broken)
        collected = now - broken.at >= COLLECT and not awaits
        if broken.judged_at is None and not self._state.owed and (not nodes.count(ACTIVE) or collected):
            self._judge(broken, now)
        if self.phase is not broken:
            self.consider(now)  # this was the last one
            return
        late = now - broken.at >= self._state.timing.return_after  # this is asked after each report
        for node in nodes.where(ACTIVE) if late else ():
            due = self._due_back(node.hello.shutdown_timeout, broken)
            if now < due:
                continue
            reason = f.Loss("late", due - broken.at)
            self._state.send(node.link, m.Evicted(self._state.record.term, why(reason)))
            self._state.close(node.link)
            self.lose(node, reason, now)
        if nodes.count(ACTIVE) or self._state.owed or broken.judged_at is None:
            return
        if now >= broken.not_before or broken.ends:
            self.phase = Gathering(broken, broken.ends)
            self.consider(now)
        else:
            self._state.release()

    def _due_back(self, grace: float, broken: Broken) -> float:
        """When a member must have stopped its workers, which may take its whole shutdown timeout."""
        # A node may send any value.
        return broken.at + self._state.timing.return_after + (grace if 0 <= grace <= LONGEST_WAIT else 0.0)

    def _is_alone(self, broken: Broken, now: float) -> bool:
        """Whether all that failed, in the last fault too, is on one node without which the run can go on."""
        failed = {failure.node_id for _, failure in broken.failures if is_own(failure)}
        last = self._state.exclusion.last(now)
        return len(failed) == 1 and (not last or last in failed) and self._state.spares(*failed)

    def _judge(self, broken: Broken, now: float) -> None:
        if self._state.seen > self._state.record.round.number:  # the leader that formed that round has judged this one
            self._impose(broken, Kind.NODE_LOSS, f.FormedSince(self._state.seen), ())
            broken.judged_at = now
            return
        broken.judged_at = now
        if broken.ends:
            return  # no other round follows
        self._leave_out_newcomers(broken, now)
        for node_id in {failure.node_id for _, failure in broken.failures if failure.corrupt}:
            self._state.computed_wrong(node_id, now)
        ruling = self._state.budget.rule(broken, self._state.limits.max_nodes, alone=self._is_alone(broken, now))
        if broken.imposed is None and (ruling.kind.is_fault or ruling.ends):
            broken.failure = root_cause(broken.failures)
        if ruling.ends:
            self.phase = Ending(broken, ruling, now)
        elif ruling.charged:
            failure = root_cause(broken.failures) if broken.imposed is None else None
            if failure is not None and not killed(failure):
                self._state.fault(failure.node_id, now)
            broken.not_before = now + ruling.delay
            number, kind = self._state.record.round.number, ruling.kind.text
            spent, most, idle = self._state.budget.spent, self._state.budget.allowed, ruling.idle
            back = self._state.budget.refilled
            self._state.emit(RestartCharged(number, kind, spent, most, self.outlook, idle, ruling.delay, back))


def _suspect(failure: Failure) -> Suspect:
    return Suspect(failure.node_id, failure.rank)


def _exit_code(failure: Failure | None) -> int | None:
    """Return the exit code of a worker that failed; None if it has not ended, or if no worker has failed."""
    return None if failure is None or failure.alive else failure.exit_code


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(node.hello.node_id for node in nodes)
