"""A node's membership: finds the leader, holds the link, reconnects after an outage.

One thread makes all blocking calls. It passes events to ``notify``, as the types of
:mod:`elastic_launch.rendezvous.node.membership_events`; the node reports through the methods.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from elastic_launch.clock import Clock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.config.settings import host_of
from elastic_launch.errors import (
    DeniedError,
    EndpointError,
    ExitCode,
    ProtocolError,
    RefusedError,
    RendezvousError,
    StoreError,
    UnresolvedError,
)
from elastic_launch.rendezvous.admin import messages as asking
from elastic_launch.rendezvous.backends.c10d import Backend, FoundLeader, NodeAddress
from elastic_launch.rendezvous.leader.admission import LONGEST_COMMAND
from elastic_launch.rendezvous.node.failure_detector import FailureDetector
from elastic_launch.rendezvous.node.machine import NodeMachine, Search
from elastic_launch.rendezvous.node.membership_events import (
    LinkDown,
    LinkUp,
    MembershipEvent,
    Opened,
    RendezvousLost,
)
from elastic_launch.rendezvous.node.reach import ReachTest
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import Channel, OtherTokenError, link_key
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.rendezvous.wire.outline import completed
from elastic_launch.secret import HINT_TOKEN
from elastic_launch.system.descriptors import explained, remedy
from elastic_launch.system.plain_text import clipped
from elastic_launch.system.wake import Waker

HINT_STRANGE = (
    "If the port is in use by another service, choose another --rdzv-endpoint; if its agent is frozen, end it."
)

SILENT = "its agent may be frozen, or the port may be in use by another service"

_log = logging.getLogger(__name__)

RETRY = 0.2
"""Seconds between two attempts to reach the leader."""

Notify = Callable[[MembershipEvent], None]
Reserve = Callable[[str], int]
Beating = Callable[[], m.Beat | m.ProgressBeat]


class Membership:
    """One node's membership in one run.

    Args:
        notify: called from the membership's thread with each event; must not block.
        reserve: called with the node's advertised address; returns the port of its next worker store.
        beat: called from the membership's thread for each beat; returns the report to send.

    Attributes:
        round: number of the run's last round, as the leader last said; 0 until it has.
        outlook: what the leader last said happens next; empty until it has.
        parked: whether it said that too few nodes are there for a round.
        max_restarts: the budget, with restarts given back so far, as the leader last said; None until it has.
        checkpoint: training and step of the newest checkpoint on storage that a leader has told of, and when it was
            reported, by the node's clock; None until then.
    """

    def __init__(
        self,
        config: LaunchConfig,
        backend: Backend,
        clock: Clock,
        notify: Notify,
        reserve: Reserve,
        beat: Beating = m.Beat,
    ) -> None:
        self._config = config
        self._backend = backend
        self._clock = clock
        self._notify = notify
        self._reserve = reserve
        self._make_beat = beat
        self._beat_due = False
        self._lock = threading.Lock()
        self._side = NodeMachine()
        self._waker = Waker()
        self._closing = threading.Event()
        self._key = link_key(config.token, config.run_id)
        self._once = LogOnce(_log)
        self._answered = False
        self._spoke = b""  # the beginning of what came over the link
        self._welcomed = False
        self._found: FoundLeader | None = None
        self._cut_until = 0.0  # by a drill
        self._most_nodes = config.limits.max_nodes  # until the leader sends the run's limit
        self._led_by = ""  # incarnation of the node whose orders came last
        self.round = 0
        self.outlook, self.parked = "", False
        self.max_restarts: int | None = None
        self.checkpoint: tuple[int, int, float] | None = None
        timing = config.timing
        self._detector = FailureDetector(timing.dead_after, timing.beat_among(config.limits.max_nodes))
        # A silent link is kept until the next one is accepted: a leader that thaws would read its end as this node's.
        self._former = contextlib.ExitStack()
        self._reach: ReachTest | None = None
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        """Start searching for the leader."""
        self._thread.start()

    def importing(self) -> None:
        """Report that workers could not begin at once: rounds that can do without this node do not wait for it."""
        with self._lock:
            self._side.importing()

    def report(self, report: m.Report) -> None:
        """Send a report to the leader, now or once there is a link to it."""
        with self._lock:
            self._side.say(report, self._clock.now())
        self._waker.wake()

    def beat(self) -> None:
        """Send a beat now, without waiting until the next one is due."""
        self._beat_due = True
        self._waker.wake()

    def cut_link(self, seconds: float) -> bool:
        """For a drill: exchange nothing with the leader for some seconds, as if packets were lost.

        Returns:
            False if this node leads the run; nothing happens then.
        """
        found = self._found
        if found is None or found.incarnation == self._side.hello.incarnation:
            return False
        self._cut_until = max(self._cut_until, self._clock.now() + seconds)
        self._waker.wake()
        return True

    @property
    def cut_off(self) -> bool:
        """Whether the others may continue without this node by now."""
        return self._replaceable and self._detector.cut_off(self._clock.now())

    def belongs_since(self, moment: float) -> bool:
        """Whether the leader has shown since a time, by the node's clock, that the others need this node."""
        return not self.cut_off and self._detector.heard_since(moment)

    @property
    def replaceable(self) -> bool:
        """Whether others may train without this node now: not if it leads, and no other node can."""
        found = self._found
        only = found is not None and found.incarnation == self._side.hello.incarnation and not self._config.kind.elected
        return self._replaceable and not only

    @property
    def unconfirmed(self) -> float | None:
        """Seconds for which the store has not shown that this node still leads, if that ends no round; else None.

        Callable from any thread. All of the store may be out of reach, so that no other node can lead either.
        """
        found = self._found
        if found is None or found.incarnation != self._side.hello.incarnation or self._backend.steps_down:
            return None
        seconds = self._backend.unsure_for() if self.cut_off else math.inf
        return seconds if 0 < seconds < math.inf else None

    @property
    def _replaceable(self) -> bool:
        """Whether others may train without this node; in a run of one node, a spare may, if leaders are elected."""
        return self._most_nodes > 1 or self._config.kind.elected

    def close(self, timeout: float = 15.0) -> None:
        """Close the link; as the leader of an ended run, first wait (bounded) until all nodes have received its end."""
        self._closing.set()
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._reach is not None:
            self._reach.close()
        if not self._thread.is_alive():
            self._waker.close()

    # The thread.

    def _run(self) -> None:
        try:
            place = self._open()
            hello = self._first_hello(place)
            with self._lock:
                self._side.begin(hello)
            self._notify(Opened(place))
            self._stay()
        except RendezvousError as error:
            self._notify(RendezvousLost(error))
        except (OSError, RuntimeError) as error:
            hint = remedy(error)
            if not hint and isinstance(error, RuntimeError):
                raise
            lost = EndpointError(f"The rendezvous has failed: {explained(error)}.", hint)
            if hint:  # a limit of this process, which another agent does not have to reach
                lost.exit_code = ExitCode.TRAINING_FAILED
            self._notify(RendezvousLost(lost))
        finally:
            if sys.exc_info()[0] is not None:  # a bug, whose traceback follows: nothing must wait forever
                self._notify(RendezvousLost(EndpointError("The rendezvous failed because of an internal error.")))
            self._former.close()
            self._backend.close()

    def _open(self) -> NodeAddress:
        """Open the backend; retry while a name does not resolve yet, as for pods that are starting."""
        patience = self._config.timing.join_timeout
        deadline = self._clock.now() + patience
        while True:
            try:
                return self._backend.open()
            except UnresolvedError as error:
                if self._clock.now() >= deadline or self._closing.is_set():
                    raise
                text = error.message.rstrip(".")
                self._once.warn("unresolved", "%s; retrying for up to %g s", text, patience)
                self._closing.wait(RETRY)

    def _first_hello(self, place: NodeAddress) -> m.NodeHello:
        config = self._config
        return m.NodeHello(
            version=m.PROTOCOL_VERSION,
            run_id=config.run_id,
            digest=config.digest(),
            command=clipped(config.shared, LONGEST_COMMAND),
            limits=str(config.limits),
            node_id=config.node_id,
            incarnation=place.incarnation,
            workers=config.nproc,
            replica_size=config.replica_size,
            address=place.address,
            store_port=self._reserve(place.address),
            wanted_rank=config.node_rank,
            shutdown_timeout=config.shutdown_timeout,
            planned=len(config.drill.faults),
            role=config.role,
            host=host_of(config.node_id),
        )

    def _stay(self) -> None:
        """Maintain a link to the leader until closed."""
        timing, clock, detector = self._config.timing, self._clock, self._detector
        search = Search(timing, clock.now())
        elects = self._config.kind.elected
        while not self._closing.is_set():
            self._judge(clock.now())  # at once, where this node led: the attempt takes time
            try:
                sock = self._connect(search.attempt(detector, clock.now()))
            except (EndpointError, StoreError, OSError) as error:
                now = clock.now()
                self._judge(now)
                if search.failed(now):
                    reason = error.message if isinstance(error, RendezvousError) else str(error)
                    self._notify(LinkDown(reason.rstrip("."), gone=search.gone, elects=elects))
                if search.over(now):
                    raise
                self._closing.wait(RETRY)
                continue
            self._answered, self._spoke = False, b""
            with contextlib.ExitStack() as link:
                link.enter_context(sock)
                silent = self._converse(sock)
                if silent:
                    self._former.push(link.pop_all())
            self._wait_released()
            if self._answered:
                search.linked()
                search.lost(clock.now())
            if silent and not self._closing.is_set():
                search.fell_silent()
                assert self._found is not None
                seen = self._side.hello.seen_round
                self._backend.unreachable(self._found, refused=False, silent_for=timing.dead_after, seen_round=seen)
                if self._answered:
                    text = f"the leader was silent for {timing.dead_after:g} s"
                    self._notify(LinkDown(text, gone=False, elects=elects))
            if not self._answered and not self._closing.is_set():
                # What listens there is silent, closes the link, or is not the leader.
                self._doubt(search, silent=silent)

    def _judge(self, now: float, gap: float = 0.0) -> None:
        """Report once if the others may train without this node by now; this thread did not turn for ``gap``."""
        found = self._found
        if found is None or not self._replaceable:
            return
        leads = found.incarnation == self._side.hello.incarnation
        if cut_off := self._detector.judge(now, gap, self._backend.unsure_for() if leads else None):
            self._notify(replace(cut_off, leader="" if leads and self._backend.steps_down else self._led_by))

    def _doubt(self, search: Search, *, silent: bool) -> None:
        """Handle that no leader of this run answered at the leader's address: retry, but not forever."""
        found, now = self._found, self._clock.now()
        assert found is not None
        self._backend.unreachable(found, refused=False)
        text = f"what listens at {found.what} does not answer as the run's leader"
        # A leader whose agent is frozen says nothing, or has said only the beginning of what leaders say.
        frozen = silent and self._spoke in (b"", b"{")
        if search.over(now) or (found.strange and self._spoke and not frozen):
            raise EndpointError(f"{text[0].upper()}{text[1:]}.", HINT_STRANGE)
        if search.failed(now):
            if frozen and not self._welcomed:
                text += f"; {SILENT}, and this node tries for up to {self._config.timing.join_timeout:g} s"
            self._notify(LinkDown(text, gone=search.gone, elects=self._config.kind.elected))
        self._closing.wait(RETRY)

    def _wait_released(self) -> None:
        """After an eviction, wait until the workers are killed before coming back."""
        while not self._closing.is_set():
            with self._lock:
                if self._side.may_return():
                    return
            self._closing.wait(0.02)

    def _connect(self, timeout: float) -> socket.socket:
        if self._clock.now() < self._cut_until:
            raise EndpointError("The drill has cut the link to the leader.")
        try:
            found = self._backend.find_leader(timeout)
        except DeniedError as error:
            if self._found is not None:
                raise
            raise RefusedError(error.message, error.hint) from error
        if found.record is not None and found.record.end is not None:
            record, end = found.record, found.record.end
            self._notify(m.RunEnd(record.term, end.code, self._end_cause(end.cause), record.restarts))
            self._closing.set()
            raise StoreError("the run has ended.")
        self._found = found
        try:
            sock = socket.create_connection((found.address, found.port), timeout=timeout)
        except (OSError, UnicodeError) as error:
            self._backend.unreachable(found, refused=isinstance(error, ConnectionRefusedError))
            raise _unreached(found, error) from error
        try:
            # A leader closes what has connected when it steps down or fails, and nothing would close a later link.
            if found.incarnation == self._side.hello.incarnation and self._backend.stepped_down():
                raise EndpointError("This node led until now.")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            beat = self._make_beat()
            with self._lock:
                self._side.beats(beat)
                self._side.greet(self._clock.now(), found.record.term if found.record is not None else 0)
            sock.setblocking(False)
        except (EndpointError, OSError):
            sock.close()
            raise
        return sock

    def _end_cause(self, cause: str) -> str:
        """Return why the run ended; for a node that never took part, the text says so."""
        if self._welcomed:
            return cause
        cause = f"run {self._config.run_id!r} had ended before this node came: {cause}"
        if self._config.kind.elected:
            cause += " (to use its id for a new run, give all nodes of that --rdzv-conf reuse=true)"
        return cause

    def _converse(self, sock: socket.socket) -> bool:
        """Exchange messages until the link ends; return whether it ended by silence."""
        clock, detector = self._clock, self._detector
        channel = Channel.of_node(self._key)
        unsent = channel.unsent
        now = clock.now()
        next_beat = now + detector.beat
        detector.linked(now)
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while not detector.leader_lost:
                if now < self._cut_until and not self._closing.is_set():
                    self._closing.wait(min(RETRY, detector.wait(now, self._cut_until - now)))
                    now = clock.now()
                    self._judge(now, detector.turn(now))
                    continue
                if now >= next_beat or self._beat_due:
                    next_beat, self._beat_due = now + detector.beat, False
                    beat = self._make_beat()
                    with self._lock:
                        self._side.beats(beat)
                    channel.send(m.pack(beat))
                closing = self._closing.is_set()  # read first: reports made before closing must be sent
                for report in self._take():
                    channel.send(m.pack(report))
                if closing:
                    self._last_words(sock, unsent)
                    return False
                try:
                    if unsent:
                        del unsent[: sock.send(unsent)]
                except BlockingIOError:
                    pass
                except OSError:
                    return False
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(sock, wanted)
                ready = selector.select(detector.wait(now, next_beat - now))
                now = clock.now()
                # Before reading: messages that arrived while this node was frozen say nothing about now.
                self._judge(now, detector.turn(now))
                for key, events in ready:
                    if key.fileobj is self._waker:
                        self._waker.clear()
                    elif events & selectors.EVENT_READ:
                        heard = self._hear(sock, channel)
                        if heard is None:
                            return False
                        if heard:
                            detector.heard(clock.now())
        return True

    def _take(self) -> list[m.Report]:
        with self._lock:
            return self._side.take()

    def _last_words(self, sock: socket.socket, unsent: bytearray) -> None:
        """Send the remaining reports, for up to a second."""
        sock.settimeout(1.0)
        try:
            sock.sendall(unsent)
        except OSError:
            return

    def _hear(self, sock: socket.socket, channel: Channel) -> bool | None:
        """Read what has arrived; return whether it is a sign of life from the leader, or None if the link ended."""
        try:
            data = sock.recv(262144)
        except BlockingIOError:
            return False
        except OSError:
            return None
        if not data:
            return None
        self._spoke = self._spoke or data[:1]
        try:
            for line in channel.feed(data):
                order = m.unpack(line)
                if isinstance(order, m.Form):
                    order = completed(order, self._side.hello)
                if isinstance(order, m.Order):
                    self._answered = True
                    self._obey(order)
        except OtherTokenError as error:
            assert self._found is not None
            if not self._welcomed and self._found.given:
                hint = f"{HINT_TOKEN} If that is the case already, check --rdzv-id and --rdzv-endpoint."
                raise RefusedError(f"{error.message.rstrip('.')}, at {self._found.what}.", hint) from error
            self._once.warn(type(error).__name__, "the link to the leader was closed: %s", error)
            return None
        except ProtocolError as error:
            self._once.warn(type(error).__name__, "the link to the leader was closed: %s", error)
            return None
        return channel.ready

    def _obey(self, order: m.Order) -> None:
        """Pass an order on, unless it comes from a lower term than seen."""
        with self._lock:
            if not self._side.obey(order, self._clock.now()):
                return
        self._backend.reached(order)
        if isinstance(order, m.Welcome | m.Pulse):
            self._most_nodes = order.max_nodes or self._most_nodes
        match order:
            case m.Pulse(checkpoint=saved):
                self.round, self.max_restarts = order.round, order.max_restarts
                self.outlook, self.parked = order.outlook, order.parked
                if saved is not None:
                    at = self._clock.now() - saved.ago
                    self.checkpoint = (saved.training, saved.step, at) if saved.step else None
            case asking.AdminAnswer() | asking.Status() | asking.NodeStacks():
                return  # to a caller
            case m.Welcome(leader=leader):
                self._former.close()
                self._welcomed, self._led_by = True, leader
                assert self._found is not None
                self._notify(LinkUp(str(Endpoint(self._found.address, self._found.port))))
            case m.Reach():
                self._try_reach(order)
            case m.Refused(reason=reason, hint=hint):
                raise RefusedError(f"The run refuses this node: {reason}", hint)
            case m.RunEnd(cause=cause):
                self._notify(replace(order, cause=self._end_cause(cause)))
            case _:
                self.outlook, self.parked = "", False  # what was to happen next has happened
                if isinstance(order, m.Form):
                    self._detector.formed()
                    self._formed(order)
                self._notify(order)

    def _formed(self, order: m.Form) -> None:
        """In this node's first round, if the leader has not had it try before, try to reach the round's first member.

        Its workers may wait for that in vain, and say nothing for minutes.
        """
        first = order.round.members[0]
        if self._config.kind.fixed_ranks:
            return  # the workers meet at the endpoint
        if self._reach is not None:
            self._reach.stop()
        elif first.incarnation != self._side.hello.incarnation:
            where = m.Reach(order.term, order.round.number, first.address, first.store_port)
            self._try_reach(where, asked=False)

    def _try_reach(self, where: m.Reach, *, asked: bool = True) -> None:
        self._reach = self._reach or ReachTest(self.report)
        self._reach.begin(where, asked=asked)


def _unreached(found: FoundLeader, error: OSError | UnicodeError) -> EndpointError:
    """Return why the leader's address could not be connected to."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return UnresolvedError(
            f"{found.what[0].upper()}{found.what[1:]} does not resolve: {error}.",
            "Check --rdzv-endpoint, and that the name is known on this host.",
        )
    return EndpointError(
        f"Nothing answers at {found.what}: {error.strerror or error}.",
        "Start the agent on that host, or correct --rdzv-endpoint.",
    )
