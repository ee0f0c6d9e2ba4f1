"""The leader's pure state machine, which decides which nodes train together.

Its input is reports, closed links and clock ticks; its output is instructions, to be carried out in order. If a
``CommitRecord`` fails because the store holds another leader's record, the instructions after it must be dropped, and
the leader must stop.

Invariants, checked by the stateful tests after every event:

- a round number is committed once, and rounds are ordered by number;
- the members of a round are distinct, their ranks are a permutation, and their number is within the limits;
- a round is formed only when every member of the previous one has stopped or is dead. Workers of a member that has
  stopped are reaped or suspended: only an order to form a later round lets a suspended one train again;
- a member takes part only with workers that its node has offered, and no worker has two ranks;
- a round is drained only if the workers of all its members can be, and ends so only when all of them have stopped;
- a round is charged once, and only for crash, hang and out of memory, or if the training does not advance;
- no order is sent before the record contains what it says.

For the phases of a run and their transitions, see :mod:`elastic_launch.rendezvous.leader.phases`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import Loss, Misfit, Outside
from elastic_launch.events.sentences import command_differs, limits_differ, refused, sentence, why
from elastic_launch.events.types import FaultLanded, JoinBlocked, NodeDiffers, NodeJoined, NodeRefused, RunResized
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.admission import differences, intrusion, refusal
from elastic_launch.rendezvous.leader.forming import try_reach
from elastic_launch.rendezvous.leader.nodes import ACTIVE, DONE, Node
from elastic_launch.rendezvous.leader.phases import Draining, Ended, ParkedRun, Running, last_failure, over, put_off
from elastic_launch.rendezvous.leader.rounds import MOST_SECONDS, Rounds
from elastic_launch.rendezvous.leader.state import LeaderState
from elastic_launch.rendezvous.leader.types import Instruction
from elastic_launch.rendezvous.record import ControlRecord, Round
from elastic_launch.rendezvous.wire import messages as m

TURN_CAP = 2.0
"""Most seconds of silence that a gap between the leader's own turns counts: a suspended leader evicts no node."""


SAID_BY_ALL = (m.Joined, m.NodeReady, m.Stopped, m.RankOffer, m.Imported)
"""Reports whose consequences wait for the turn after all that was received, since to find them all nodes are looked
through: a round of N nodes would otherwise cost N * N looks."""

MOST_COMPARED = 64
"""Most kinds of difference between nodes and the run that are reported to the user."""


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """What an agent knew when it first came to this leader.

    Attributes:
        term: the last one that it had seen; this leader's, if it had been in none.
    """

    name: str
    term: int
    round: int

    def is_older(self, other: _Incarnation) -> bool:
        """Whether the other one must have joined later: from then on, this one has received no more orders."""
        # One without a round may have waited for its first one when the leader changed.
        return self.term < other.term or (self.term == other.term and 0 < self.round < other.round)


class LeaderMachine:
    """One term of a leader: tracks nodes and their reports; its :class:`Rounds` decides what follows for the rounds.

    Args:
        record: the record as committed when this leader took its term.
        command: this node's command, written as for a shell; other nodes' commands are compared with it.
        now: the leader's monotonic clock, in seconds, here and in all methods.
        dead: incarnations of nodes whose process is known to be dead.
        silent: incarnations of nodes that were silent for dead_after before this term.
        hosted: whether the run ends with the leader's node.
    """

    def __init__(
        self,
        record: ControlRecord,
        timing: Timing,
        command: str,
        now: float,
        dead: frozenset[str] = frozenset(),
        silent: frozenset[str] = frozenset(),
        *,
        hosted: bool = False,
    ) -> None:
        self._state = state = LeaderState(record, timing, now, dead, silent)
        self._rounds = Rounds(state)
        self.timing, self.nodes = timing, state.nodes
        self._send, self._emit, self._close, self._flush = state.send, state.emit, state.close, state.flush
        self._consider = self._rounds.consider
        self._owners: dict[int, str] = {}
        self._command, self._hosted = command, hosted
        state.host = record.leader.node_id if hosted else ""
        self._awake = now
        self._arrivals = 0
        self._incarnations: dict[str, list[_Incarnation]] = {}  # by node id, the newest last
        self._compared: set[tuple[tuple[str, ...], str]] = set()  # differences found so far

    @property
    def record(self) -> ControlRecord:
        """The run's record, including what is about to be committed."""
        return self._state.record

    @property
    def ended(self) -> bool:
        """Whether the run's end is recorded."""
        return isinstance(self._rounds.phase, Ended)

    @property
    def running(self) -> bool:
        """Whether a round is training; it may be draining."""
        return self._rounds.running

    @property
    def draining(self) -> bool:
        """Whether the current round is being drained."""
        return isinstance(self._rounds.phase, Draining)

    @property
    def live(self) -> bool:
        """Whether the run's workers can be suspended, as far as is known, and workers start ahead of a place."""
        return self._state.live

    @property
    def restarts(self) -> int:
        """Restarts charged so far."""
        return self._state.budget.spent

    def max_restarts(self, now: float) -> int:
        """Restarts that may be charged in all, with those that the present round has given back so far."""
        phase, budget = self._rounds.phase, self._state.budget
        if isinstance(phase, Running | Draining):
            return budget.allowed_after(over(phase, now, None, ""))
        return budget.allowed

    @property
    def limits(self) -> Limits:
        """The run's current limits."""
        return self._state.limits

    @property
    def outlook(self) -> str:
        """What happens next, as text."""
        return self._rounds.outlook

    @property
    def parked(self) -> bool:
        """Whether no round can form, since too few nodes are there."""
        return isinstance(self._rounds.phase, ParkedRun)

    # Input.

    def hello(self, link: int, hello: m.NodeHello, now: float) -> list[Instruction]:
        """Handle a node's hello on a new link."""
        self._wake(now)
        misfit = refusal(hello, self.record, self._command) or self._intrudes(hello)
        if misfit is not None:
            reason, hint = refused(misfit, hello.node_id)
            self._send(link, m.Refused(self.record.term, reason, hint))
            self._close(link)
            self._emit(NodeRefused(hello.node_id, reason))
            return self._flush()
        if self.record.end is not None:
            self._send(link, self.end_order())
            return self._flush()
        if 0 < hello.term < self.record.term:  # it waited for an earlier term of this leader, and may be out of date
            self._close(link)
            return self._flush()
        if self._is_replaced(hello):
            self._evict_for_good(link, hello.node_id)
            return self._flush()
        # A node that comes from the previous leader already knows how it differs.
        comes = hello.seen_term == 0 or hello.seen_term > self.record.term
        self._learn(hello, now)
        self._compare(link, hello, tell=comes)
        if self._is_of_another_run(hello) and not hello.holding:  # else its workers have to end first, see `_admit`
            self._send(link, m.Evicted(self.record.term, why(Outside("anew")), anew=True))
            self._close(link)
            return self._flush()
        known = self.nodes.get(hello.node_id)
        if known is not None and known.hello.incarnation == hello.incarnation:
            self._close(known.link)
            self._relink(known, link, hello, now)
            return self._flush()
        if known is not None:
            self._rounds.lose(known, self._evict_for_good(known.link, hello.node_id), now)
        self._admit(link, hello, now)
        return self._flush()

    def report(self, link: int, report: m.Report, now: float) -> list[Instruction]:
        """Handle a node's report; any report is a sign of life. What follows may wait for the next :meth:`turn`."""
        self._wake(now)
        node = self.node_at(link)
        if node is None or self.ended:
            return []
        node.heard = now
        current = self.record.round.number
        if isinstance(report, m.Beat | m.ProgressBeat):
            node.load = report.load or node.load
            if isinstance(report, m.ProgressBeat) and node.active and report.round == current:
                self._rounds.progressed(node, report.step)
            return []  # timers are left to the next turn: every node sends a beat each second
        match report:
            case m.Joined(round=number) if node.active and number == current:
                node.joined = True
            case m.NodeReady(round=number) if node.active and number == current:
                node.joined = node.ready = True
                node.live, node.apart = report.live, False
                self._state.arguments = report.arguments or self._state.arguments
                self._rounds.ready(report, now)
            case m.Done(round=number) if node.active and number == current:
                first = not self._state.some_done
                node.joined = node.done = True
                order = m.PeerDone(self.record.term, number)
                for other in self.nodes.where(ACTIVE, lacks=DONE) if first else ():
                    self._send(other.link, order)
            case Failure(round=number) if number == current:
                self._rounds.failed(node, report, now)
            case m.StrikeDue(round=number) if node.active and number == current:
                self._fault_due(node, report)
            case m.Stalled(round=number) if node.active and number == current:
                self._rounds.stalled(node, report, now)
            case m.Stopped(store_port=port):
                node.store_port, node.held, node.importing = port, report.held, report.importing
                node.offer(report.slots)
                if report.trained:
                    self._state.trains(node)
                if report.round == current:
                    self._rounds.stopped(node, report, now)
            case m.Imported(arguments=arguments):
                self._rounds.imported(node, arguments, now)
            case m.Unfit(failure=failure):
                self._rounds.unfit(node, failure, now)
            case m.Reached(round=number, error=error) if number == current and not (node.active and node.ready):
                self._reached(node, error)
            case m.RankOffer(slots=slots):
                node.offer(slots)
            case m.Leaving(reason=reason, seconds=seconds):
                self._rounds.leaves(node, reason, seconds, now)
        if not isinstance(report, SAID_BY_ALL):
            self._consider(now)
        return self._flush()

    def closed(self, link: int, now: float) -> list[Instruction]:
        """Handle a link that was closed by its node, or by the death of its process."""
        self._wake(now)
        node = self.node_at(link)
        self._owners.pop(link, None)
        if node is None:
            return []
        if self.ended:
            self.nodes.remove(node)
            return []
        self._rounds.lose(node, Loss("closed"), now)
        self._consider(now)
        return self._flush()

    def turn(self, now: float) -> list[Instruction]:
        """Handle timers; call this after handling all that was received, and no later than :meth:`wait` says."""
        self._wake(now)
        turned, self._state.turned = self._state.turned, now
        if self.ended:
            return []
        dead_after = self.timing.dead_after
        asleep = now - turned - min(TURN_CAP, dead_after / 2)
        if asleep > 0:
            for node in self.nodes.values():
                node.heard = min(node.heard + asleep, now)
        for node in self.nodes.silent(now, dead_after):
            silence = now - node.heard
            self._close(node.link)
            self._rounds.lose(node, Loss("silent", silence), now)
        self._consider(now)
        return self._flush()

    def wait(self, now: float) -> float:
        """Seconds until the next turn is due, 0 or more."""
        due = [now + self.timing.beat, *self._rounds.due()]
        due += self._state.owed_until()
        return max(0.0, min([moment for moment in due if moment > now], default=now) - now)

    def _wake(self, now: float) -> None:
        """Extend deadlines by the time this process was suspended: reports that would meet them are still unread."""
        slept = now - self._awake - max(TURN_CAP, 2 * self.timing.beat)
        self._awake = now
        if slept > 0:
            self._state.began += slept
            self._state.exclusion.put_off(slept)
            self._state.refusals.put_off(slept)
            put_off(self._rounds.phase, slept)

    # Users' requests.

    def depart(self, node_id: str, reason: str, seconds: float | None) -> list[Instruction]:
        """Order a connected node to leave after a drain; seconds None means no limit."""
        limit = MOST_SECONDS if seconds is None else seconds
        self._send(self.nodes[node_id].link, m.Depart(self.record.term, reason, limit))
        return self._flush()

    def stop(self, reason: str, seconds: float | None, now: float) -> list[Instruction]:
        """Drain the round, if there is one, and end the run with exit code 143."""
        self._wake(now)
        self._rounds.stop(reason, seconds, now)
        return self._flush()

    def save(self) -> list[Instruction]:
        """Have the current round write a checkpoint; its first member must be connected."""
        number, first = self.record.round.number, self.record.round.members[0]
        self._send(self.nodes[first.node_id].link, m.SaveNow(self.record.term, number))
        return self._flush()

    def resize(self, min_nodes: int, max_nodes: int, now: float) -> list[Instruction]:
        """Change how many nodes the run may have; a round that has too many or could have more is drained.

        The resize is carried out whether or not it saves time.

        Raises:
            UsageError: if the numbers are invalid.
        """
        self._wake(now)
        was, limits = self.limits, self.limits.resized(min_nodes, max_nodes)
        self._state.resizing.wanted = True
        if limits != was:
            self._state.commit(replace(self.record, limits=limits))
            self._emit(RunResized(min_nodes, max_nodes, was.min_nodes, was.max_nodes))
        self._consider(now)
        return self._flush()

    def too_large(self, standing: ControlRecord, cause: str, now: float) -> list[Instruction]:
        """End the run: the store holds ``standing`` and will never accept the last commit; every round would fail."""
        # The last record must fit, so it has no members.
        self._state.record = replace(standing, round=Round(standing.round.number))
        self._rounds.end(ExitCode.RENDEZVOUS, cause, now)
        return self._flush()

    def give_way(self, cause: str, now: float) -> list[Instruction]:
        """End the run, which cannot continue beside another one."""
        if not self.ended:
            self._rounds.end(ExitCode.RENDEZVOUS, cause, now)
        return self._flush()

    def end_order(self) -> m.RunEnd:
        """The order that tells nodes of the run's recorded end."""
        return self._state.end_order(last_failure(self._rounds.phase))

    # Membership.

    def _learn(self, hello: m.NodeHello, now: float) -> None:
        """Take over what a member of an earlier term knows: the record may have been lost with its host."""
        if not self.record.round.number:
            self._state.continued.add(hello.seen_run)
            if hello.origin and hello.seen_round > self._state.seen:
                self._state.record = replace(self.record, origin=hello.origin)
        self._state.floor = max(self._state.floor, hello.seen_round)
        if not self._is_of_another_run(hello):
            self._state.budget.learn(hello.seen_restarts)
            self._state.seen = max(self._state.seen, hello.seen_round)
        ahead = hello.seen_term == self.record.term and hello.seen_round > self.record.round.number
        if ahead or hello.seen_term > self.record.term:
            self._state.commit(replace(self.record, term=hello.seen_term + 1))
        formed = self.record.round
        member = formed.index(hello.node_id, hello.incarnation) is not None
        if hello.round_seen is not None and member and hello.seen_round == formed.number:
            self._rounds.recall(hello.round_seen, now)

    def _intrudes(self, hello: m.NodeHello) -> Misfit | None:
        if hello.node_id in self.nodes or self.record.end is not None:
            return None
        known = [places for places, _ in self._compared]
        if len(known) >= MOST_COMPARED:  # no more are noted
            differs = differences(self._command, hello.command)
            known.append(differs.places if differs is not None else ())
        nodes = self.nodes.values()
        return intrusion(hello, self.record, nodes, self._command, hosted=self._hosted, known=known)

    def _compare(self, link: int, hello: m.NodeHello, *, tell: bool) -> None:
        """Note how a node differs; tell it, and the user if no node has differed in that way before."""
        differs, ours = differences(self._command, hello.command), str(self.limits)
        if differs is None and hello.limits == ours:
            return
        arguments, places = (command_differs(differs), differs.places) if differs is not None else ("", ())
        limits = limits_differ(hello.limits, ours) if hello.limits != ours else ""
        event = NodeDiffers(hello.node_id, arguments, limits)
        if tell and hello.incarnation != self.record.leader.incarnation:
            self._send(link, m.UserMessage(self.record.term, sentence(event)))
        if (places, limits) not in self._compared and len(self._compared) < MOST_COMPARED:
            self._compared.add((places, limits))
            if tell:
                self._emit(event)

    def _is_replaced(self, hello: m.NodeHello) -> bool:
        """Whether a newer incarnation of the node id has joined."""
        seen = self._incarnations.setdefault(hello.node_id, [])
        if all(hello.incarnation != other.name for other in seen):
            known = _Incarnation(hello.incarnation, hello.seen_term or self.record.term, hello.seen_round)
            # The order in which they come to a new leader says little: an older one may have been frozen until now.
            place = next((i for i, other in enumerate(seen) if known.is_older(other)), len(seen))
            seen.insert(place, known)
        return hello.incarnation != seen[-1].name

    def _is_of_another_run(self, hello: m.NodeHello) -> bool:
        """Whether a node comes from a round of a run whose record was lost before this one began, and which this one
        does not go on with: none of its nodes had come before the first round, or none that knew that round.

        Numbers of rounds in the two cannot be compared.
        """
        state, run = self._state, hello.seen_run
        if not run or not hello.seen_round or run == self.record.run:
            return False
        return run not in state.continued or 0 < state.first_round <= hello.seen_round

    def _evict_for_good(self, link: int, node_id: str) -> Loss:
        reason = Loss("replaced", node=node_id)
        self._send(link, m.Evicted(self.record.term, why(reason), final=True))
        self._close(link)
        return reason

    def _fault_due(self, node: Node, report: m.StrikeDue) -> None:
        """A worker has come to a fault of the drill: have it happen, unless it has happened before."""
        if not self._state.drill.lands(report.fault):
            self._send(node.link, m.Strike(self.record.term, report.fault, ""))
            return
        self._emit(FaultLanded(report.round, node.hello.node_id, report.fault, report.step))
        order = m.Strike(self.record.term, report.fault, node.hello.node_id)
        for other in self.nodes.values():
            self._send(other.link, order)

    def _admit(self, link: int, hello: m.NodeHello, now: float) -> None:
        node = Node(hello, link, self._arrivals, hello.store_port, heard=now)
        node.importing, node.held, node.apart = hello.importing, hello.held, hello.apart
        node.trained = node.veteran = hello.trained
        node.offer(hello.slots)
        self._arrivals += 1
        rank = self.record.round.index(hello.node_id, hello.incarnation)
        if rank is not None:
            node.takes_part(self.record.round.members[rank].slots)
        same_round = hello.holding == self.record.round.number and rank is not None
        # A node that comes from the previous leader does not know that the round broke: it receives the order to stop.
        if hello.holding and not (same_round and (self.running or hello.node_id in self._state.owed)):
            self._send(link, m.Evicted(self.record.term, why(Outside("over", round=hello.holding))))
            self._close(link)
            return
        self._state.owed.discard(hello.node_id)
        self._state.drill.joined(hello)
        if hello.holding:
            self._state.gone.pop(hello.node_id, None)
            node.active, node.joined = True, hello.joined or hello.ready or hello.done
            node.ready, node.done, node.live = hello.ready, hello.done, hello.live
        else:
            self._state.last_arrival = now
        self.nodes.add(node)
        self._owners[link] = hello.node_id
        self._state.review(now)
        if not hello.holding and rank is not None:
            self._rounds.comes_without_workers(node, "new leader", self._uncharged(hello), now)
        self._welcome(link, hello)
        running = self.running
        if node.active and (failure := self._uncharged(hello)) is not None:
            self._rounds.failed(node, failure, now, brought=True)
        if node.active and not running:
            self._rounds.tell_again(node, now)
        self._try_reach(node)
        self._emit(NodeJoined(hello.node_id, hello.workers, hello.address, self.outlook))
        if hello.leaving:
            self._rounds.leaves(node, hello.leaving, 0.0, now)
        self._consider(now)
        phase = self._rounds.phase
        if not (self.running or self.ended or (isinstance(phase, ParkedRun) and phase.at == now)):
            self._send(link, m.UserMessage(self.record.term, self.outlook))
        if (reason := self._state.waits_why(node, now)) and node.hello.node_id in self.nodes:
            text = why(reason) if isinstance(reason, Outside) else sentence(reason)
            self._send(link, m.UserMessage(self.record.term, text))

    def _relink(self, node: Node, link: int, hello: m.NodeHello, now: float) -> None:
        """Handle a known node that returns before its old link was seen to close; only what it holds now counts."""
        node.link, node.heard = link, now
        self._owners[link] = hello.node_id
        node.store_port, node.hello, node.importing = hello.store_port, hello, hello.importing
        node.held, node.released, node.ahead, node.apart = hello.held, False, False, hello.apart
        node.trained = node.trained or hello.trained
        node.stalled = None  # it may have advanced meanwhile; if not, it says so again
        node.offer(hello.slots)
        if hello.leaving:
            self._rounds.leaves(node, hello.leaving, 0.0, now)
        if node.active and hello.holding != self.record.round.number:
            self._rounds.comes_without_workers(node, "back", self._uncharged(hello), now)
            node.active = False
        elif node.active:
            node.joined, node.ready, node.done = hello.joined or hello.ready or hello.done, hello.ready, hello.done
            node.live = hello.live
        self._welcome(link, hello)
        self._try_reach(node)
        if node.active:
            self._rounds.tell_again(node, now)
            if (failure := self._uncharged(hello)) is not None:
                self._rounds.failed(node, failure, now, brought=True)
        self._consider(now)

    def _try_reach(self, node: Node) -> None:
        """Have a node that waits connect to the running round's hosts before a round is formed with it."""
        if isinstance(self._rounds.phase, Running) and not node.active:
            try_reach(self._state, node)

    def _reached(self, node: Node, error: str) -> None:
        if not error:
            node.apart = False
        elif isinstance(self._rounds.phase, Running):  # else the round's first member may just have closed its store
            # Of a member this is only said: it is not known whether it or the first member is behind the firewall.
            node.apart = node.apart if node.active else True
            first = self.record.round.members[0]
            event = JoinBlocked(node.hello.node_id, first.node_id, first.address, first.store_port, error)
            self._emit(event)
            self._send(node.link, m.UserMessage(self.record.term, sentence(event)))

    def _uncharged(self, hello: m.NodeHello) -> Failure | None:
        """Return the failure that a member brings from the current round, unless the last leader charged for it."""
        failure, number = hello.failed, self.record.round.number
        charged = self.restarts > hello.seen_restarts
        return failure if failure is not None and failure.round == hello.seen_round == number and not charged else None

    def _welcome(self, link: int, hello: m.NodeHello) -> None:
        beat = self.timing.beat_among(self.limits.max_nodes)
        record, most = self.record, self.limits.max_nodes
        leader, dead_after = record.leader.incarnation, self.timing.dead_after
        self._send(link, m.Welcome(record.term, hello.node_id, beat, dead_after, record.run, most, leader))

    def node_at(self, link: int) -> Node | None:
        """The node at the other end of a link."""
        node = self.nodes.find(self._owners.get(link, ""))
        return node if node is not None and node.link == link else None
