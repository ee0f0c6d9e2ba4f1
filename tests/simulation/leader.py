"""A leader's process: the real state machine, with the service's input and output simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_launch.errors import StoreError
from elastic_launch.events.sentences import sentence
from elastic_launch.rendezvous.backends.c10d import ACK_TIMEOUT
from elastic_launch.rendezvous.backends.election import WATCH
from elastic_launch.rendezvous.backends.succession import Takeover
from elastic_launch.rendezvous.backends.voting import STEP_DOWN
from elastic_launch.rendezvous.continuity import Claim, Sight
from elastic_launch.rendezvous.leader import types as to_do
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.stores.claimed_store import ATTEMPTS
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.seal import ValueSeal
from simulation.kernel import Mailbox, Task
from simulation.network import END, Connection

if TYPE_CHECKING:
    from simulation.node import SimNode

__all__ = ["COMMAND", "SEAL", "SimLeader"]

COMMAND = "train.py"

SEAL = ValueSeal(None, "run")


class SimLeader:
    """One term of a node as leader.

    Attributes:
        heard: when a node's incarnation was last heard from on a link.
        closed: incarnations whose last link was seen to end, or was closed here.
        ended: those whose link was seen to end.
        silent: see :class:`LeaderMachine`.
    """

    def __init__(self, node: SimNode, record: ControlRecord, takeover: Takeover, sure: float) -> None:
        self.node = node
        self.cluster, self.kernel = node.cluster, node.cluster.kernel
        self.port = record.leader.port
        self.began = self.kernel.now
        self.mailbox = Mailbox(self.kernel, node)
        timing = self.cluster.timing
        dead, self.silent = frozenset({takeover.dead} - {""}), frozenset({takeover.silent} - {""})
        if self.cluster.voters is None:
            self.silent = frozenset()
        self.machine = LeaderMachine(record, timing, COMMAND, self.began, dead, self.silent)
        self.links: dict[int, Connection] = {}
        self.greeted: dict[int, str] = {}
        self.heard: dict[str, float] = {}
        self.closed: set[str] = set()
        self.ended: set[str] = set()
        self.deposed = False
        self.over = False
        self._stopping = False
        self._numbers: dict[Connection, int] = {}
        self._claim = Claim(SEAL, record, sure)
        self._writing = False

    @property
    def alive(self) -> bool:
        """Whether it is the leader, as far as its node knows."""
        return not self.over and not self.deposed

    @property
    def listening(self) -> bool:
        return not self.over

    def unsure_for(self) -> float:
        """Seconds since its term was last seen in the record, or written there."""
        return self.kernel.now - self._claim.sure

    def _may_lead(self) -> bool:
        """Whether no other node can lead yet."""
        return self.cluster.voters is None or self.unsure_for() < STEP_DOWN * self.cluster.timing.dead_after

    @property
    def record(self) -> ControlRecord:
        """The record as it is known to have been written last."""
        return self._claim.record

    @property
    def sure(self) -> float:
        """When the last read or write began in which it found or wrote its own value."""
        return self._claim.sure

    @property
    def _ended(self) -> bool:
        return self._claim.record.end is not None

    def start(self) -> None:
        while self.node.backlog:
            self.accept(self.node.backlog.pop(0))
        self.kernel.spawn(self.node, self._serve())
        self.kernel.spawn(self.node, self._watch())

    def accept(self, connection: Connection) -> None:
        number = len(self._numbers) + 1
        self._numbers[connection], self.links[number] = number, connection
        connection.accepted(self.mailbox)

    def depose(self) -> None:
        self.deposed = self._stopping = True
        self.mailbox.put(("wake", END))

    def close(self) -> None:
        """Ask it to end; it has ended once ``over`` is set."""
        self._stopping = True
        self.mailbox.put(("wake", END))

    def _serve(self) -> Task:
        timing, machine, kernel = self.cluster.timing, self.machine, self.kernel
        beat, next_turn = timing.beat_among(self.cluster.limits.max_nodes), 0.0
        next_pulse = kernel.now + beat
        give_up: float | None = None
        while True:
            now = kernel.now
            if self._stopping:
                give_up = give_up if give_up is not None else now + (ACK_TIMEOUT if machine.ended else 0)
                if now >= give_up or not self.links or self.deposed:
                    break
            wait = 0.05 if give_up is not None else max(0.0, min(next_turn, next_pulse) - now)
            news = False
            messages = yield self.mailbox.get(wait)
            if not self._may_lead():
                self.depose()
            for connection, message in messages:
                news = news or not isinstance(message, m.Beat)
                yield from self._receive(connection, message)
            now = kernel.now
            if news or now >= next_turn:
                yield from self._carry_out(machine.turn(now))
                next_turn = now + machine.wait(now)
            if now >= next_pulse and not self.deposed:
                next_pulse = now + beat
                for number in self.greeted:
                    record = machine.record
                    most = record.limits.max_nodes
                    self._send(number, m.Pulse(record.term, record.round.number, record.restarts, most))
        self.over = True
        for connection in self.links.values():
            connection.close(1)

    def _receive(self, connection: Any, message: m.Report | None) -> Task:
        number = self._numbers.get(connection)
        if number is None or number not in self.links:
            return
        now = self.kernel.now
        if message is END:
            self.links.pop(number).close(1)
            if number in self.greeted:
                self.closed.add(self.greeted[number])
                self.ended.add(self.greeted[number])
                yield from self._carry_out(self.machine.closed(number, now))
        elif isinstance(message, m.NodeHello):
            self.greeted[number] = message.incarnation
            self.heard[message.incarnation] = now
            self.closed.discard(message.incarnation)
            if not message.holding:  # until it has read that its round is over for it, its workers run
                self.ended.discard(message.incarnation)
            yield from self._carry_out(self.machine.hello(number, message, now))
        else:
            self.heard[self.greeted[number]] = now
            yield from self._carry_out(self.machine.report(number, message, now))

    def _carry_out(self, instructions: list[to_do.Instruction]) -> Task:
        for instruction in instructions:
            if self.deposed:
                return
            match instruction:
                case to_do.CommitRecord(record=record):
                    if not (yield from self._commit(record)) or (record.end is None and not self._may_lead()):
                        self.deposed = self._stopping = True
                        return
                case to_do.Send(link=number, order=order):
                    self._send(number, order)
                case to_do.Close(link=number) if number in self.links:
                    self.closed.add(self.greeted[number])
                    self.links.pop(number).close(1)
                case to_do.Emit(event=event):
                    sentence(event)
                    self.cluster.checks.emitted(self, event)

    def _commit(self, record: ControlRecord) -> Task:
        while self._writing:  # the watcher repairs: writes are sequential
            yield self.kernel.sleep(self.node, 0.01)
        self._writing = True
        try:
            return (yield from self._write(self._claim.stored, record))
        except StoreError:
            return False
        finally:
            self._writing = False

    def _write(self, expected: bytes | None, record: ControlRecord) -> Task:
        """As ``ClaimedStore``."""
        store, timeout, began = self.cluster.store, self.cluster.timing.read_timeout, self.kernel.now
        value = self._claim.propose(record)
        for _ in range(ATTEMPTS):
            if (yield store.compare_and_set(self.node, expected, value, timeout)):
                self._claim.wrote(record, began)
                return True
            expected = yield store.load(self.node, timeout)
            if expected == value:
                self._claim.wrote(record, began)
                return True
            if self._claim.look(expected) is not Sight.OWN and not self._ended:
                return False
        return False

    def _send(self, number: int, order: m.Order) -> None:
        if number in self.links:
            self.cluster.checks.ordered(self, order)
            self.links[number].send(1, order)

    def _watch(self) -> Task:
        look = min(WATCH, self.cluster.timing.dead_after / 5)
        while self.alive:
            began = self.kernel.now
            voters = self.cluster.voters
            if not self._may_lead():
                self.depose()
                return
            try:
                if voters is not None:
                    value = yield voters.load(self.node, look, leading=True)
                else:
                    value = yield self.cluster.store.load(self.node, look)
                sight = self._claim.look(value)
                if sight is not Sight.OWN and (yield self.cluster.store.load(self.node, look)) != value:
                    continue
            except StoreError:
                yield self.kernel.sleep(self.node, WATCH)
                continue
            if sight is Sight.SUCCEEDED or (sight is Sight.SPOILED and not self._ended):
                self.depose()
                return
            if sight is not Sight.OWN and not self._writing:
                self._writing = True
                try:
                    yield from self._write(value, self._claim.record.renewed())
                except StoreError:
                    pass
                finally:
                    self._writing = False
                continue
            self._claim.seen(began)
            yield self.kernel.sleep(self.node, look)
