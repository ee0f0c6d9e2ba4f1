"""An agent's process: the real policy and the real node's side of the link, with threads and sockets simulated.

``_stay``, ``_connect``, ``_converse`` and ``_find_leader`` follow ``Membership`` and ``ElectedBackend``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_agents import policy_types as v
from elastic_agents.policy import decide
from elastic_launch.errors import LeasedError, RefusedError, StoreError
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.backends.c10d import ACK_TIMEOUT
from elastic_launch.rendezvous.backends.succession import Succession, Takeover
from elastic_launch.rendezvous.continuity import REPAIR, Continuity, SpoiledError, repairing
from elastic_launch.rendezvous.node.failure_detector import FailureDetector
from elastic_launch.rendezvous.node.machine import NodeMachine, Search
from elastic_launch.rendezvous.node.membership import RETRY
from elastic_launch.rendezvous.node.membership_events import LinkDown, RendezvousLost
from elastic_launch.rendezvous.record import ControlRecord, Leader, Round
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.seal import Patience
from simulation.kernel import Host, Mailbox, Resume, Task, Wait
from simulation.leader import COMMAND, SEAL, SimLeader
from simulation.network import END, Connection
from simulation.voters import VOTERS
from simulation.workers import SUSPENSION, SimWorkers

if TYPE_CHECKING:
    from simulation.cluster import Cluster

__all__ = ["SimNode"]

NPROC = 1


class SimNode(Host):
    """One agent with its workers.

    Attributes:
        code: its exit code, or None.
        lost_power: its host is off, so that it sends no answers.
    """

    def __init__(self, cluster: Cluster, node_id: str, incarnation: str) -> None:
        super().__init__(node_id)
        self.cluster, self.kernel = cluster, cluster.kernel
        self.node_id, self.incarnation = node_id, incarnation
        self.code: int | None = None
        self.lost_power = False
        slow = cluster.live and self.kernel.random.choice((True, False))
        self.view = v.View(ahead=v.AheadWorkers(slow=slow))
        self.workers = SimWorkers(self)
        self.inbox = Mailbox(self.kernel, self)
        self.side = NodeMachine()
        self.succession = Succession(incarnation, cluster.timing.dead_after)
        self.leading: SimLeader | None = None
        self.port = 0  # where it listens for its lifetime, once it has tried to lead
        self.connections: list[tuple[Connection, int]] = []
        self.backlog: list[Connection] = []  # not accepted yet
        self._wires = Mailbox(self.kernel, self)
        self._closing = self._answered = self._over = False
        self._detector = FailureDetector(cluster.timing.dead_after, cluster.timing.beat_among(cluster.limits.max_nodes))
        self._former: list[Connection] = []
        self._record: ControlRecord | None = None
        self._led_by = ""
        self._continuity = Continuity(SEAL)
        self._patience = Patience(REPAIR * cluster.timing.dead_after)
        self._spoiled_at: float | None = None
        limits = str(cluster.limits)
        self.side.begin(
            m.NodeHello(
                m.PROTOCOL_VERSION, "run", "digest", COMMAND, limits, node_id, incarnation, NPROC, f"host-{node_id}", 1
            )
        )
        if cluster.voters is not None:
            cluster.voters.started(self)
        self.kernel.spawn(self, self._agent())
        self.kernel.spawn(self, self._membership())

    def die(self, *, power: bool) -> None:
        """Kill its process, upon which the guard kills the workers; or switch its host off without a trace."""
        self.alive, self.lost_power = False, power
        self.workers.die()
        if self.leading is not None:
            self.leading.over = True
        for connection, side in self.connections:
            connection.close(side, silently=power)

    def drop_links(self) -> None:
        """A device between the hosts ends its connections; both sides see it."""
        self.cluster.disturb()
        for connection, _ in self.connections:
            connection.reset()

    def leave(self) -> None:
        self.inbox.put(v.Leave("SIGTERM", 143))

    # The main thread.

    def _agent(self) -> Task:
        while True:
            for event in (yield self.inbox.get()):
                self.cluster.checks.obeyed(self, event)
                self.view, actions = decide(self.view, event, v.NodeFacts(NPROC))
                for action in actions:
                    self._carry_out(action)
                if self.code is not None:
                    return
                yield self.kernel.sleep(self, self.kernel.soon() / 10)

    def _carry_out(self, action: v.Action) -> None:
        number = self.view.round
        match action:
            case v.StartWorkers(form=form, kept=kept, waiting=waiting, coming=coming):
                self.cluster.checks.starts(self, form)
                self.workers.start(form.round, kept=bool(kept), waiting=bool(waiting), coming=bool(coming))
                self._say(m.Joined(form.round.number))
            case v.StartWorkersAhead():
                self.workers.start_ahead()
            case v.KillAhead():
                self.workers.kill_ahead()
            case v.GivePlace():
                self.workers.give_place()
            case m.RankOffer() | m.Imported():
                self._say(action)
            case v.Terminate():
                self.workers.terminate()
                grace = self.cluster.grace
                self.kernel.call(grace, self, lambda: self.inbox.put(v.GraceOver(number)))
            case v.Kill():
                self.workers.kill()
            case v.SuspendWorkers():
                self.workers.suspend()
                self.kernel.call(SUSPENSION, self, lambda: self.inbox.put(v.SuspendOver(number)))
            case v.SendExit():
                self.workers.dismiss()
            case v.AskStop():
                self.workers.ask_stop()
            case v.Later(seconds=seconds, event=event):
                self.kernel.call(seconds, self, lambda: self.inbox.put(event))
            case v.ReportFailure() | v.ReportDisconnected():
                symptom = "" if isinstance(action, v.ReportFailure) else "broken connection"
                failure = Failure(self.node_id, "crash", 0, 0, 42, 1, "", ran=60.0, symptom=symptom)
                self._say(replace(failure, round=number))
            case v.ReportReady(round=ready):
                self._say(m.NodeReady(ready, live=self.cluster.live))
            case v.ReportStopped(round=stopped, drained=step, importing=importing):
                self._say(m.Stopped(stopped, 1, step, importing=importing))
            case m.Done(round=done):
                self._say(m.Done(done))
            case m.Leaving(reason=reason, seconds=seconds):
                self._say(m.Leaving(reason, seconds))
            case v.AwaitCopies():
                self.inbox.put(v.CopiesDone())  # nothing is in memory here
            case v.Finish(code=code):
                self.code = code
                self.cluster.checks.finished(self, code)
                self._closing = True
                self._wires.put(("wake", END))

    def _say(self, report: m.Report) -> None:
        self.side.say(report, self.kernel.now)
        self._wires.put(("wake", END))

    # The membership's thread.

    def _membership(self) -> Task:
        try:
            yield from self._stay()
        except RefusedError as error:
            self.inbox.put(RendezvousLost(error))
        except StoreError as error:
            self.inbox.put(RendezvousLost(error))
        while not self._closing:
            yield self._wires.get(1.0)
        yield from self._end_leading()
        yield from self._linger()
        self.die(power=False)

    def _linger(self) -> Task:
        """As a voter of an ended run: answer nodes that may not know of the end."""
        cluster, until = self.cluster, self.kernel.now + ACK_TIMEOUT
        while self._over and cluster.voters is not None and self.node_id in VOTERS and self.kernel.now < until:
            if all(node._closing for node in cluster.nodes):
                return
            yield self.kernel.sleep(self, 0.05)

    def _stay(self) -> Task:
        timing = self.cluster.timing
        search = Search(timing, self.kernel.now)
        while not self._closing:
            self._judge()
            try:
                connection = yield from self._connect(search.attempt(self._detector, self.kernel.now))
            except (StoreError, OSError) as error:
                self._judge()
                if search.failed(self.kernel.now):
                    self.inbox.put(LinkDown(str(error), gone=search.gone))
                if search.over(self.kernel.now):
                    raise StoreError("given up.") from error
                yield self.kernel.sleep(self, RETRY)
                continue
            if connection is None:
                return
            self._answered = False
            silent = yield from self._converse(connection)
            if silent:
                self._former.append(connection)
            else:
                self._hang_up(connection)
            while not self.side.may_return() and not self._closing:
                yield self.kernel.sleep(self, 0.02)
            assert self._record is not None
            if self._answered:
                search.linked()
                search.lost(self.kernel.now)
            if silent and not self._closing:
                search.fell_silent()
                seen = self.side.hello.seen_round
                self._unreachable(self._record, refused=False, silent_for=timing.dead_after, seen_round=seen)
                if self._answered:
                    self.inbox.put(LinkDown("silent", gone=False))
            if not self._answered and not self._closing:
                self._unreachable(self._record, refused=False)
                if search.over(self.kernel.now):
                    raise StoreError("nobody answers as the leader.")
                if search.failed(self.kernel.now):
                    self.inbox.put(LinkDown("no answer", gone=search.gone))
                yield self.kernel.sleep(self, RETRY)

    def _hang_up(self, connection: Connection) -> None:
        connection.close(0)
        self.connections.remove((connection, 0))

    def _judge(self, gap: float = 0.0) -> None:
        if self._record is None:
            return
        leads = self._record.leader.incarnation == self.incarnation
        sure = max((x.sure for x in self.cluster.leaders if x.node is self), default=-math.inf)
        if cut_off := self._detector.judge(self.kernel.now, gap, self.kernel.now - sure if leads else None):
            steps_down = leads and self.cluster.voters is not None
            self.inbox.put(replace(cut_off, leader="" if steps_down else self._led_by))

    def _connect(self, timeout: float) -> Task:
        record: ControlRecord = yield from self._find_leader(timeout)
        if record.end is not None:
            self.inbox.put(m.RunEnd(record.term, record.end.code, record.end.cause, record.restarts))
            self._closing = self._over = True
            return None
        self._record = record
        try:
            connection = yield self._dial(record.leader, timeout)
        except OSError as error:
            self._unreachable(record, refused=isinstance(error, ConnectionRefusedError))
            raise
        self.connections.append((connection, 0))
        self.side.greet(self.kernel.now, record.term)
        return connection

    def _unreachable(self, record: ControlRecord, **how: Any) -> None:
        self.succession.unreachable(record, self.kernel.now, **how)

    def _dial(self, leader: Leader, timeout: float) -> Wait:
        """Connect to the leader's listener; the kernel accepts even for a frozen process."""
        kernel, network = self.kernel, self.cluster.network

        def wait(resume: Resume) -> None:
            over = kernel.now + timeout

            def arrive() -> None:
                there = self.cluster.leader_at(leader)
                host = there.node if there is not None else self.cluster.host(leader.node_id)
                far = self is not host and self.name in network.unlinked
                if host is None or host.lost_power or far or not network.joins(self, host):
                    outcome: Any = TimeoutError("timed out")
                    kernel.call(max(0.0, over - kernel.now), self, lambda: resume(outcome))
                    return
                if not host.alive or (host.incarnation, host.port) != (leader.incarnation, leader.port):
                    outcome = ConnectionRefusedError("refused")
                else:
                    outcome = Connection(network, ((self, self._wires), (host, Mailbox(kernel, host))))
                    host.connections.append((outcome, 1))
                    if there is None or not there.listening:
                        host.backlog.append(outcome)
                    else:
                        there.accept(outcome)
                kernel.call(network.delay(), self, lambda: resume(outcome))

            kernel.call(network.delay(), kernel.outside, arrive)

        return wait

    def _converse(self, connection: Connection) -> Task:
        kernel, detector = self.kernel, self._detector
        now = kernel.now
        next_beat = now + detector.beat
        detector.linked(now)
        while not detector.leader_lost:
            if now >= next_beat:
                next_beat = now + detector.beat
                connection.send(0, m.Beat())
            for report in self.side.take():
                connection.send(0, report)
            if self._closing:
                return False
            messages = yield self._wires.get(detector.wait(now, next_beat - now))
            now = kernel.now
            self._judge(detector.turn(now))
            for source, order in messages:
                if source is not connection:
                    continue
                if order is END:
                    return False
                self._answered = True
                if self.side.obey(order, self.kernel.now):
                    self._learn(order)
                    self._notice(order)
                detector.heard(kernel.now)
        return True

    def _learn(self, order: m.Order) -> None:
        self.succession.reached()
        match order:
            case m.Welcome(run=run):
                self._continuity.welcomed(run)
            case m.Form(term=term, round=formed, restarts=restarts):
                self._continuity.heard(term, formed, restarts)
            case m.Pulse(term=term, round=number, restarts=restarts):
                self._continuity.heard(term, Round(number), restarts)

    def _notice(self, order: m.Order) -> None:
        match order:
            case m.Welcome(leader=leader):
                self._led_by = leader
                while self._former:
                    self._hang_up(self._former.pop())
            case m.Refused(reason=reason):
                raise RefusedError(reason)
            case m.Reach(round=number):
                self._say(m.Reached(number, ""))
            case m.StartAhead():
                self.inbox.put(order)
            case m.Form() | m.DrainRound() | m.Break() | m.Evicted() | m.RunEnd():
                if isinstance(order, m.Form):
                    self._detector.formed()
                self._over = self._over or isinstance(order, m.RunEnd)
                self.inbox.put(order)

    # Leading.

    def _find_leader(self, timeout: float) -> Task:
        store = self.cluster.store
        began = self.kernel.now
        try:
            value = yield store.load(self, timeout)
        except LeasedError as error:
            self.succession.leased(self.kernel.now, error.wait)
            raise
        except StoreError:
            self.succession.looked(self.kernel.now - began, failed=True)
            raise
        self.succession.looked(self.kernel.now - began, failed=False)
        me = Leader(self.node_id, self.incarnation, f"host-{self.node_id}", 0)
        now = self.kernel.now
        try:
            record = self._continuity.judge(value)
            self._spoiled_at = None
        except SpoiledError as spoiled:
            if not self._continuity.member:
                if self._patience.stands(value, now):
                    raise RefusedError("the record is spoiled.") from spoiled
                raise StoreError("waiting for the repair.") from spoiled
            record = self._newest()
            self._spoiled_at = now if self._spoiled_at is None else self._spoiled_at
        may_lead = self.cluster.voters is None or self.node_id in VOTERS
        if record is None:
            if not may_lead:
                raise StoreError("no node leads yet.")
            first = ControlRecord("run", "digest", 1, me, limits=self.cluster.limits, run="01")
            return (yield from self._take_over(None, first, timeout, Takeover("first")))
        leading = self.leading is not None and self.leading.alive
        takeover = self.succession.decide(record, now, leading=leading)
        dead_after = self.cluster.timing.dead_after
        stands = self._spoiled_at is None or now - self._spoiled_at >= dead_after
        leading = self.leading if record.leader.incarnation == self.incarnation else None
        led = leading is not None and now - leading.sure <= dead_after
        if takeover is None or not may_lead or not (led or stands):
            return record
        following = record if self._spoiled_at is None else repairing(record, None if led else self.kernel.random)
        following = replace(following, term=following.term + 1, leader=me)
        return (yield from self._take_over(value, following, timeout, takeover))

    def _newest(self) -> ControlRecord | None:
        newest = self._continuity.newest
        assert newest is not None
        if newest.leader.incarnation == self.incarnation and self.leading is not None and not self.leading.alive:
            return self.leading.record
        return newest

    def _take_over(self, expected: bytes | None, record: ControlRecord, timeout: float, takeover: Takeover) -> Task:
        yield from self._end_leading()
        store = self.cluster.store
        self.port = self.port or self.cluster.next_port()
        record = replace(record, leader=replace(record.leader, port=self.port)).renewed()
        began = self.kernel.now
        self.succession.tries(record.term, takeover)
        try:
            written = yield store.compare_and_set(self, expected, record.encode(), timeout)
        except LeasedError as error:
            self.succession.leased(self.kernel.now, error.wait)
            raise
        if not written:
            value = yield store.load(self, timeout)
            try:
                return self._continuity.judge(value)
            except SpoiledError as spoiled:
                raise StoreError("looking again.") from spoiled
        self.succession.reached()
        self._continuity.wrote(record)
        self._spoiled_at = None
        self.leading = SimLeader(self, record, takeover, began)
        self.cluster.leaders.append(self.leading)
        self.leading.start()
        return record

    def _end_leading(self) -> Task:
        if self.leading is None:
            return
        self.leading.close()
        while not self.leading.over:
            yield self.kernel.sleep(self, 0.01)
        self.leading = None
