"""The leader's input and output: one thread that owns the links, the clock and the store, and runs the machine."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from elastic_launch import codec
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ProtocolError, RecordTooLargeError, StoreError
from elastic_launch.events.facts import Misfit
from elastic_launch.events.sentences import refused
from elastic_launch.events.types import EventSink
from elastic_launch.rendezvous.admin import messages as asking
from elastic_launch.rendezvous.admin.server import AdminRequests
from elastic_launch.rendezvous.leader import types as to_do
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.authentication import MissingTokenError, UnexpectedTokenError, link_key
from elastic_launch.rendezvous.wire.links import Link, Links
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.rendezvous.wire.outline import OrderEncoder
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0
"""Seconds within which a new connection must say hello."""

MAX_STRANGERS = 512
"""Most links without a hello."""

LONGEST_LINE = 1024 * 1024
"""Most bytes buffered of an unfinished line after the hello."""

MAX_RECORD = codec.MAX_BYTES - 64 * 1024
"""Bytes of the largest record: the order to form has its members and more, and must fit into one line."""

MOST_WAITING = 4096
"""Connections that are refused when a leader steps down: strangers could go on connecting."""

DRAIN_LINGER = 2.0
"""Seconds that a leaving leader waits for a drain to end; its own node has ended by then."""

Write = Callable[[bytes, bytes, float], bool]

UNSURE = "the store has not confirmed for too long that no other node leads"


class LeaderService:
    """Leads a run until closed or deposed.

    Args:
        config: has the run's times, command and token.
        listener: the listening socket for links; this object takes ownership of it.
        write: replaces the record as it was last written, within seconds; returns whether it still was that.
        record: the record as committed for this leader's term.
        dead, silent: see :class:`LeaderMachine`.
        sure: whether no other node can lead yet; asked in each turn, since this process may have been frozen.
        unsure_for: see :class:`AdminRequests`.
    """

    def __init__(
        self,
        config: LaunchConfig,
        listener: socket.socket,
        write: Write,
        record: ControlRecord,
        clock: Clock,
        events: EventSink,
        dead: frozenset[str] = frozenset(),
        silent: frozenset[str] = frozenset(),
        sure: Callable[[], bool] = lambda: True,
        unsure_for: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._listener = listener
        self._write = write
        self.committed = record.encode()  # as it last wrote it; for others once it no longer leads
        self._clock = clock
        self._timing = timing = config.timing
        self._beat = timing.beat_among(record.limits.max_nodes)
        self._events = events
        hosted = not config.kind.elected
        self._machine = LeaderMachine(record, timing, config.shared, clock.now(), dead, silent, hosted=hosted)
        self._requests = AdminRequests(self._machine, unsure_for=unsure_for)
        self._sure = sure
        self._once = LogOnce(_log)
        self._links = Links(listener, link_key(config.token, config.run_id), MAX_STRANGERS, self._once, clock.now)
        self._stop = threading.Event()
        self._linger = 0.0
        self._queue: deque[to_do.Instruction] = deque()
        self._carrying = False
        self._news = False
        self._encoder = OrderEncoder()
        self._deposed = False
        self._given_way = ""
        self.died: ThreadDied | None = None  # the internal error that ended it
        self._thread = VitalThread(self._run, "leader", owner=self._failed)

    def start(self) -> None:
        """Begin to lead."""
        self._links.listen()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it leads."""
        return self._thread.is_alive() and not self._deposed and self.died is None

    @property
    def restarts(self) -> int:
        """Restarts charged, including those that could no longer be recorded."""
        return self._machine.restarts

    def depose(self, reason: str) -> None:
        """Stop leading at once, because another node leads."""
        _log.warning("this node no longer leads: %s", reason)
        self._deposed = True
        self._stop.set()
        self._links.waker.wake()

    def give_way(self, cause: str) -> None:
        """End the run with exit code 95, since it cannot continue beside another one."""
        self._given_way = cause
        self._links.waker.wake()

    def close(self, linger: float) -> None:
        """Stop leading; if the run has ended, wait up to ``linger`` seconds for the nodes to receive its end.

        If its round is being drained, for example because the leader's own node leaves, wait for the other nodes' last
        reports: the next leader would consider the round broken.

        A leader that stepped down keeps its port until now: nodes that are refused there consider the process dead.
        """
        self._linger = linger
        self._stop.set()
        self._links.waker.wake()
        self._thread.join(linger + 5)
        self._listener.close()

    def _failed(self, died: ThreadDied) -> None:
        self.died = died  # its links are closed, so its own node searches for the leader and finds this
        self._refuse_waiting()
        if not self._deposed:
            self._listener.close()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._links.close()
        if self._deposed:
            self._refuse_waiting()
        else:
            self._listener.close()

    def _serve(self) -> None:
        clock, machine = self._clock, self._machine
        next_pulse = clock.now() + self._beat
        next_turn = 0.0
        give_up: float | None = None
        while True:
            now = clock.now()
            if self._stop.is_set():
                give_up = give_up if give_up is not None else now + self._patience()
                settled = not machine.ended and not machine.draining
                # Do not wait for strangers: they are not part of the run.
                alone = len(self._links.strangers) == len(self._links.open)
                if settled or now >= give_up or alone or self._deposed:
                    self._read_the_rest()
                    self._flush_all()
                    return
            wait = 0.05 if give_up is not None else max(0.0, min(next_turn, next_pulse) - now)
            ready = self._links.wait(wait)
            # After the end is recorded there is nothing that another leader could take over.
            if not self._deposed and not machine.ended and not self._sure():
                self.depose(UNSURE)
            for number in ready:
                self._ready(number)
            now = clock.now()
            if self._given_way:
                self._decided(machine.give_way(self._given_way, now))
            if self._news or now >= next_turn:
                # Not after every beat, since a turn visits all nodes.
                self._news = False
                self._decided(machine.turn(now))
                next_turn = now + machine.wait(now)
            if now >= next_pulse and not self._deposed:
                next_pulse = now + self._beat
                self._pulse(now)

    def _refuse_waiting(self) -> None:
        """Close the connections that nothing serves now: among them may be that of this node's own membership."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        # accept() may block: the listener's copies share one flag, and the next leader sets it for its own.
        with contextlib.suppress(OSError):  # without descriptors left, for example, they wait all the same
            for _ in range(MOST_WAITING):
                if not waiting.poll(0):
                    return
                self._listener.accept()[0].close()

    def _patience(self) -> float:
        """Seconds that nodes have, once this leader must stop, to receive the run's end or to finish a drain."""
        return self._linger if self._machine.ended else min(self._linger, DRAIN_LINGER)

    def _ready(self, number: int) -> None:
        self._flush(number)
        if number in self._links.open:
            self._receive(number)

    def _receive(self, number: int) -> None:
        link = self._links.open[number]
        try:
            data = link.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(number, tell=True)
            return
        if link.closing:
            return
        try:
            reports = [m.unpack(line) for line in link.channel.feed(data)]
        except (MissingTokenError, UnexpectedTokenError) as error:
            self._reject(number, link, error)
            return
        except ProtocolError as error:
            self._once.warn(type(error).__name__, "a link from %s was closed: %s", link.peer, error)
            self._drop(number, tell=True)
            return
        if not link.greeted:
            self._flush(number)  # the handshake's answer
        for report in reports:
            if number in self._links.open and not link.closing:
                self._handle(number, link, report)

    def _reject(self, number: int, link: Link, error: ProtocolError) -> None:
        """Tell a node, unauthenticated, how its token differs. It has proven nothing, so nothing else follows."""
        self._once.warn("token", "a link from %s was refused: %s", link.peer, error)
        misfit = Misfit("no token" if isinstance(error, MissingTokenError) else "token")
        link.channel.send_bare(m.pack(m.Refused(self._machine.record.term, *refused(misfit))))
        link.closing = True
        self._flush(number)

    def _handle(self, number: int, link: Link, report: m.Spoken) -> None:
        now = self._clock.now()
        self._news = self._news or not isinstance(report, m.Beat | m.ProgressBeat)
        if isinstance(report, m.NodeHello | asking.Caller):
            self._links.greet(number, LONGEST_LINE)
        if isinstance(report, m.NodeHello):
            self._decided(self._machine.hello(number, report, now))
        elif isinstance(report, asking.Caller):
            self._carry_out(self._requests.call(number, report))
        elif link.greeted and isinstance(report, asking.AdminRequest):
            self._carry_out(self._requests.ask(number, report, now))
        elif not link.greeted or not isinstance(report, m.Report):
            text = "a link from %s was closed: it sent %s before its hello"
            self._once.warn("no hello", text, link.peer, type(report).__name__)
            self._drop(number, tell=False)
        else:
            self._requests.heard(number, report, now)
            self._decided(self._machine.report(number, report, now))

    def _decided(self, instructions: list[to_do.Instruction]) -> None:
        """Carry out what the machine decided, and answer the callers that asked for it."""
        self._carry_out(self._requests.watch(instructions, self._clock.now()))

    def _carry_out(self, instructions: list[to_do.Instruction]) -> None:
        """Carry out instructions in the order of decision, even if carrying out one (a link breaks) leads to more."""
        if self._deposed:
            return  # orders that depend on an unwritten record must not be sent
        self._queue.extend(instructions)
        if self._carrying:
            return
        self._carrying = True
        while self._queue:
            self._do(self._queue.popleft())
        self._carrying = False

    def _do(self, instruction: to_do.Instruction) -> None:
        match instruction:
            case to_do.CommitRecord(record=record):
                if not self._commit(record):
                    self._queue.clear()
                    self._deposed = True
                    self._stop.set()
                elif record.end is None and not self._sure():  # it was frozen during the write
                    self._queue.clear()
                    self.depose(UNSURE)
            case to_do.Send(link=number, order=order):
                if number in self._links.open:
                    self._links.open[number].channel.send(self._encoder.encode(order))
                    self._flush(number)
            case to_do.Close(link=number):
                if number in self._links.open:
                    self._links.open[number].closing = True
                    self._flush(number)
            case to_do.Emit(event=event):
                self._events.emit(event)

    def _commit(self, record: ControlRecord) -> bool:
        value = record.encode()
        try:
            if len(value) > MAX_RECORD:
                raise RecordTooLargeError(
                    f"The control record has {len(value)} bytes; the limit is {MAX_RECORD}.",
                    "Start fewer nodes, or give them shorter ids and addresses.",
                )
            written = self._write(self.committed, value, self._timing.read_timeout)
        except RecordTooLargeError as error:
            if record.end is not None:
                _log.error("the end of the run could not be written; this node no longer leads: %s", error)
                return False
            self._queue.clear()
            cause = f"{error.message} {error.hint}"
            self._decided(self._machine.too_large(ControlRecord.parse(self.committed), cause, self._clock.now()))
            return True
        except StoreError as error:
            _log.error("the control record could not be written; this node no longer leads: %s", error)
            return False
        if written:
            self.committed = value
        else:
            _log.error("the control record was written by another node or client; this node no longer leads")
        return written

    def _pulse(self, now: float) -> None:
        self._links.listen()
        machine, record = self._machine, self._machine.record
        told = machine.outlook, self._requests.checkpoint(now)
        most = record.limits.max_nodes, machine.max_restarts(now)
        pulse = m.pack(m.Pulse(record.term, record.round.number, record.restarts, *most, *told, machine.parked))
        for number, link in list(self._links.open.items()):
            if link.greeted and not link.closing:
                link.channel.send(pulse)
                self._flush(number)
            elif (link.closing and not link.channel.unsent) or now - link.opened > HELLO_TIMEOUT:
                self._drop(number, tell=False)

    def _flush(self, number: int) -> None:
        if not self._links.flush(number):
            self._drop(number, tell=True)

    def _read_the_rest(self) -> None:
        """Process what has been received: other nodes may wait for what this node's own agent said before it closed."""
        if not self._deposed:
            for number in self._links.wait(0):
                self._ready(number)

    def _flush_all(self) -> None:
        for number in list(self._links.open):
            self._flush(number)

    def _drop(self, number: int, *, tell: bool) -> None:
        link = self._links.drop(number)
        if link is None:
            return
        self._requests.hung_up(number)
        if tell and link.greeted:
            self._news = True
            self._decided(self._machine.closed(number, self._clock.now()))
