"""The agent's end of the workers' socket: passes their messages to the agent, and the agent's requests to them.

The socket has a random name in the abstract namespace, so it needs no file system and leaves nothing behind after a
crash. Only processes of the same user are accepted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from elastic_agents import policy_types as v
from elastic_agents.drill import FaultReached
from elastic_agents.inbox import FirstStepDone, ProcessEnding
from elastic_agents.snapshots.durable_state import DurableState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.step_events import StepEvents
from elastic_agents.timers import StepTimer
from elastic_agents.workers.sessions import start_of
from elastic_launch import contract as c
from elastic_launch.clock import Clock
from elastic_launch.codec import LineReader
from elastic_launch.errors import ProtocolError
from elastic_launch.events.facts import NotSaved
from elastic_launch.events.sentences import why
from elastic_launch.events.types import EventSink, SnapshotsLeftOut
from elastic_launch.rendezvous.wire.messages import NodeSaved
from elastic_launch.shared_progress import SharedProgress, WorkerProgress
from elastic_launch.system.descriptors import PAUSE, reserve, scarce
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.wake import Waker

_log = logging.getLogger("elastic_launch.agent")


_FOR_AGENT = (
    c.Ready,
    c.Restored,
    c.Drained,
    c.Stopping,
    c.SlowRank,
    c.Disconnected,
    c.Differs,
    c.RestoreFailed,
    c.Differing,
    c.Corrupt,
    c.Suspended,
)
"""What the agent learns as the worker has said it."""

PEERS_PER_WORKER = 4
"""Connections at once per worker of the node: those of the last round may not be closed yet."""

_READS = 100
"""How often the sockets are read at most before an exit is reported: other workers may keep sending."""

SPARE_PEERS = 16
"""Connections at once in addition to these."""


@dataclass(slots=True)
class _Peer:
    """One worker's connection.

    Attributes:
        hello: its first message, with the round and rank of its present place.
        begun: whether it trains.
        training: the number of the script's training that it was in last.
        waits: whether it waits for a place, suspended or started ahead of one.
        deaf: whether it does not receive what is sent to it; then nothing more is.
    """

    sock: socket.socket
    pid: int
    lines: LineReader = field(default_factory=lambda: LineReader(c.MAX_LINE))
    hello: c.WorkerHello | None = None
    begun: bool = False
    training: int = 0
    waits: bool = False
    deaf: bool = False


class Control:
    """Listens to the workers of one node, in its own thread.

    Args:
        snapshot_store: holds the node's snapshots.
        durable: learns what workers say of durable storage.
        say: puts what a worker has reported into the agent's inbox; must not block.
        events: records what the workers report about their steps.
        workers: how many workers this node has.
        patience_s: seconds for which a worker that lost its connection to another rank waits for an order; 0 if no
            worker is to be suspended.

    Attributes:
        clock: the agent's.
        address: passed to the workers in their environment.
        step_timer: how long their steps take.
        arguments: what workers that trained here last were given; see :class:`elastic_launch.contract.Ready`.
        writer: local rank of the worker that writes the node's snapshots.
    """

    def __init__(
        self,
        clock: Clock,
        snapshot_store: SnapshotStore,
        durable: DurableState,
        say: Callable[[object], None],
        events: EventSink,
        workers: int,
        patience_s: float = 0.0,
    ) -> None:
        self.clock = clock
        self._snapshot_store = snapshot_store
        self.durable = durable
        self._say = say
        self._workers = workers
        self._patience_s = patience_s
        self.address = f"@elastic-launch-{secrets.token_hex(8)}"
        self._progress = SharedProgress.make("elastic-launch-progress")
        self.step_timer = StepTimer(self._reached)
        self.arguments = ""
        self.writer = 0
        self._last_told = False  # whether a worker that was told to exit may write a last snapshot
        self._events = events
        self._step_events = StepEvents(clock, events)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address[1:])
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._trained = False  # whether a worker has said that it has done a step
        self._save_asked: tuple[int, int] | None = None  # the training and its steps when a checkpoint was asked for
        self._peers: dict[socket.socket, _Peer] = {}
        # By pid and start, also of processes that have closed their connection.
        self._places: dict[tuple[int, str], c.WorkerHello] = {}
        self._crowded = False
        self._accept_at = 0.0
        self._closing = self._ended = False
        self._unread: deque[Callable[[], None]] = deque()
        self._thread = VitalThread(self._run, "control")
        self._thread.start()

    def ask_stop(self, round_number: int, local_ranks: Collection[int], cause: str, *, ends: bool = False) -> None:
        """Ask workers of the round to stop after the same step; ``ends`` is as for :class:`c.Stop`."""
        with self._lock:
            for peer in self._of_round(round_number, local_ranks):
                self._send(peer, c.Stop(cause, ends))

    def suspend(self, round_number: int, local_ranks: Collection[int], cause: str) -> None:
        """Tell workers to leave the round."""
        with self._lock:
            for peer in self._of_round(round_number, local_ranks):
                self._send(peer, c.Suspend(round_number, cause))

    def place(self, local_rank: int, place: c.Place) -> bool:
        """Give a worker that waits its place in a round: what it says from now on belongs to that round.

        Args:
            place: its fields about the slots are filled in here.

        Returns:
            whether it could be sent.
        """
        with self._lock:  # the worker must not be informed of a fetch before this
            for peer in self._waiting([local_rank]):
                peer.hello = c.WorkerHello(place.round, place.placement.rank, local_rank)
                self._places[peer.pid, start_of(peer.pid)] = peer.hello
                peer.waits = False
                slots, _ = self._snapshot_store.offer()
                place = replace(place, use=slots.use, sequence=slots.sequence, fetching=slots.fetching)
                self._send(peer, replace(place, writes=slots.writes))
                return not peer.deaf
        return False

    def dismiss(self, local_ranks: Collection[int], writer: int) -> None:
        """Tell suspended workers to exit.

        Args:
            writer: the local rank that may write the node's last snapshot before, unless another one was told so.
        """
        with self._lock:
            slots, _ = self._snapshot_store.offer()
            for peer in self._waiting(local_ranks):
                writes = not self._last_told and peer.hello is not None and peer.hello.local_rank == writer
                self._last_told = self._last_told or writes
                self._send(peer, c.Exit(slots.use if writes else None, slots.sequence))

    def _of_round(self, round_number: int, local_ranks: Collection[int]) -> Iterator[_Peer]:
        for peer in self._peers.values():
            if peer.hello is not None and peer.hello.round == round_number and peer.hello.local_rank in local_ranks:
                yield peer

    def _waiting(self, local_ranks: Collection[int]) -> Iterator[_Peer]:
        for peer in self._peers.values():
            if peer.waits and peer.hello is not None and peer.hello.local_rank in local_ranks:
                yield peer

    def tell_copied(self, copied: c.Copied | c.Copying | c.Save) -> bool:
        """Tell the worker that writes snapshots that a copy ended or continues, or request one that all can write.

        Returns:
            whether there was any such worker.
        """
        with self._lock:
            told = [peer for peer in self._peers.values() if peer.hello is not None and self._writes(peer.hello)]
            for peer in told:
                self._send(peer, copied)
            return bool(told)

    def _writes(self, hello: c.WorkerHello) -> bool:
        return bool(hello.round) and hello.local_rank == self.writer and hello.saves

    def tell_fetched(self, fetched: c.Fetched) -> None:
        """Inform the workers that the snapshot from another node has arrived, or is unavailable."""
        with self._lock:
            for peer in self._peers.values():
                if peer.hello is not None and peer.hello.round:  # others learn of it with their place
                    self._send(peer, fetched)

    def ask_save(self, round_number: int) -> None:
        """Ask the round's first local rank, which must be its rank 0, to have all ranks save a checkpoint."""
        with self._lock:
            for peer in self._peers.values():
                if peer.hello is None or (peer.hello.round, peer.hello.rank) != (round_number, 0):
                    continue
                if peer.hello.saves:
                    self._save_asked = self.step_timer.position
                    self._send(peer, c.Save())
                else:
                    self._say(NodeSaved(round_number, self.step_timer.done, why(NotSaved("itself")), asked=True))

    def answers(self, position: tuple[int, int]) -> bool:
        """Whether a checkpoint of a training after a step has all that was done when one was requested."""
        with self._lock:
            answers = self._save_asked is not None and position >= self._save_asked
            if answers:
                self._save_asked = None
        return answers

    def progress(self, local_rank: int) -> WorkerProgress | None:
        """What the worker of a local rank has reported in shared memory; None if nothing."""
        return self._progress.read(local_rank)

    def reports(self, number: int) -> list[WorkerProgress]:
        """What the workers have reported in shared memory in a round, by local rank."""
        found = map(self._progress.read, range(self._workers))
        return [report for report in found if report is not None and report.round == number]

    def steps(self) -> tuple[float, tuple[int, ...]]:
        """Seconds of all steps of this node's workers, and their numbers by duration, as they have reported them."""
        found = [report for rank in range(self._workers) if (report := self._progress.read(rank)) is not None]
        return sum(x.steps_s for x in found), tuple(map(sum, zip(*(x.durations for x in found), strict=True)))

    def _reached(self) -> WorkerProgress | None:
        """The report of the worker that has come furthest, and was the first to; None if there is none."""
        reports = [report for local_rank in range(self._workers) if (report := self._progress.read(local_rank))]
        return max(reports, key=lambda report: (*report.position, -report.at), default=None)

    def after_reading(self, then: Callable[[], None]) -> None:
        """Call a function, in this object's thread, once it has read what workers have sent so far.

        A process may end right after its last word, which says what its exit code means.
        """
        self._unread.append(then)
        self._waker.wake()
        if self._ended:
            self._call_unread()

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join(10)
        self._progress.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._read(self._until_due())
                self._waker.clear()
                due = len(self._unread)
                for _ in range(_READS):
                    if not due or not self._read(0.0):
                        break
                self._call_unread(due)
                if self._step_events.until_progress() == 0.0:
                    self._look()
                    self._step_events.progress()
            self._read(0.0)  # what the workers have sent until then
        finally:
            self._ended = True
            self._call_unread()
            self._look()
            self._step_events.close()
            for sock in self._peers:
                sock.close()
            self._selector.close()
            self._waker.close()  # here, since a thread that is busy must find it once it waits again
            self._listener.close()

    def _call_unread(self, most: int = sys.maxsize) -> None:
        with contextlib.suppress(IndexError):  # none is left
            for _ in range(most):
                self._unread.popleft()()

    def _read(self, timeout: float | None) -> bool:
        """Accept workers and read what they have sent; return whether there was anything."""
        ready = [key.fileobj for key, _ in self._selector.select(timeout) if key.fileobj is not self._waker]
        for file in ready:
            if file is self._listener:
                self._accept()
            else:
                assert isinstance(file, socket.socket)
                self._receive(self._peers[file])
        return bool(ready)

    def _until_due(self) -> float | None:
        """Return the seconds until this thread has something to do without being told."""
        known = [x for x in (self._until_accepting(), self._step_events.until_progress()) if x is not None]
        return min(known, default=None)

    def _until_accepting(self) -> float | None:
        """Return the seconds until workers are accepted again after descriptors ran out."""
        if not self._accept_at or self._listener in self._selector.get_map():
            return None
        left = self._accept_at - time.monotonic()
        if left > 0:
            return left
        self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _look(self) -> None:
        """Record the last step that workers have done without reporting it."""
        if (reached := self._reached()) is not None:
            self._step_events.step(*reached[:3], reached.training)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if scarce(error):  # the worker waits meanwhile
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + PAUSE
            else:
                _log.warning("a worker's connection could not be accepted: %s", error)
            return
        if self._accept_at:
            self._accept_at = 0.0
            reserve()
        sock.setblocking(False)
        pid, user = _process_of(sock)
        if user not in (os.getuid(), 0):
            sock.close()
            return
        if len(self._peers) >= SPARE_PEERS + PEERS_PER_WORKER * self._workers:
            if not self._crowded:
                self._crowded = True
                _log.warning("a worker's connection is closed: there are %d already (said once)", len(self._peers))
            sock.close()
            return
        with self._lock:
            self._peers[sock] = _Peer(sock, pid)
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for line in peer.lines.feed(data):
                self._hear(peer, c.unpack(line, c.FROM_WORKERS))
        except ProtocolError as error:
            _log.warning("a worker's connection is closed: %s", error)
            data = b""
        if not data:
            with self._lock:
                del self._peers[peer.sock]
            self._selector.unregister(peer.sock)
            peer.sock.close()
            if peer.hello is not None:
                self._end(peer, peer.hello.round)
                if peer.waits:
                    self._say(v.HungUp(peer.hello.round, peer.hello.local_rank))

    def _end(self, peer: _Peer, round_number: int) -> None:
        """Nothing more about a round will come from this worker."""
        if peer.begun:
            peer.begun = False
            self._look()
            self._step_events.hung_up(round_number)

    def _hear(self, peer: _Peer, message: c.Message) -> None:
        if isinstance(message, c.WorkerHello):
            if peer.hello is not None or message.local_rank >= self._workers:
                raise ProtocolError(f"{message} is not the one WorkerHello of one of {self._workers} workers.")
            if holder := self._holder(peer.pid, message):
                self._send(peer, c.PlaceTaken(holder))
                return
            self._offer(peer, message)
            return
        if isinstance(message, c.WorkerEnding):
            self._say(ProcessEnding(peer.pid, message))
            return
        if isinstance(message, c.FaultDue):
            self._say(FaultReached(peer.pid, message, partial(self._order_fault, peer.sock)))
            return
        if peer.hello is None:
            raise ProtocolError(f"{type(message).__name__} was sent before WorkerHello.")
        number, local_rank = peer.hello.round, peer.hello.local_rank
        if number == 0 or isinstance(message, c.Ahead):
            if number or peer.waits or not isinstance(message, c.Ahead):
                raise ProtocolError(f"{type(message).__name__} was sent in round {number}.")
            peer.waits = True
            self._say(v.Reported(0, local_rank, message))
            return
        match message:
            case c.Ready(step=step, live=live, training=training):
                further = peer.begun and training > peer.training
                if not peer.begun:
                    self._look()
                elif further:  # shared memory may tell of this one already
                    ended = number, message.last, min(message.last_at, self.clock.now()), peer.training
                    self.step_timer.step(*ended)
                    self._step_events.step(*ended)
                self.durable.checkpoints = self.durable.checkpoints or message.checkpoints
                if message.base_in:
                    self.durable.base = training, message.base, message.base_in
                self.step_timer.begin(number, step, self.clock.now(), message.total, training)
                if further or not peer.begun:  # after the timer, so that no step of it counts for another training
                    self._step_events.begin(peer.hello, message, further=further)
                peer.begun, peer.training = True, training
                if further:
                    return  # the agent knows that it trains
                self.arguments = message.arguments
                message = replace(message, live=live and self._patience_s > 0)
            case c.StepDone(step=step, training=training):
                # The time of the step itself, if known: this thread may learn of it later, together with further steps.
                reached = self._reached()
                if reached is None or reached.position[:2] != (number, training) or reached.step < step:
                    reached = WorkerProgress(number, step, self.clock.now(), training=training)
                self.step_timer.step(*reached[:3], reached.training)
                self._step_events.step(number, step, reached.at, training)
                if not self._trained:
                    self._trained = True
                    self._say(FirstStepDone())
            case c.MayCommit(number=asked):
                self._send(peer, c.CommitAnswer(asked, self._snapshot_store.may_commit()))
            case c.Stored():
                self._send(peer, c.Use(self._snapshot_store.stored(message)))
            case c.Agreed():
                self._snapshot_store.agreed()
            case c.NoSnapshots(cause=cause):
                self._events.emit(SnapshotsLeftOut(number, cause))
            case c.WorkerSaved(step=step, error=error, training=training, withdrew=withdrew):
                asked = not withdrew and self.answers((training, step))
                self._say(NodeSaved(number, step, error, asked, training, withdrew))
            case c.Drained(seconds=seconds):
                self.step_timer.saved(seconds)
            case c.Suspended():
                self._end(peer, number)
                peer.waits = True
        if isinstance(message, _FOR_AGENT):
            self._say(v.Reported(number, local_rank, message))
        if isinstance(message, c.Drained | c.Differs | c.RestoreFailed | c.Differing | c.Corrupt):
            self._send(peer, c.Noted())

    def _holder(self, pid: int, hello: c.WorkerHello) -> int:
        """Return the running process whose place a process claims that it has started; 0 if there is none.

        A worker's next process has a later round, and one that is started ahead has none yet.
        """
        with self._lock:
            self._places = {key: place for key, place in self._places.items() if key[1] and start_of(key[0]) == key[1]}
            for (holder, _), place in self._places.items():
                same = place.local_rank == hello.local_rank and place.round >= hello.round > 0
                if same and holder != pid:
                    return holder
        return 0

    def _order_fault(self, sock: socket.socket, strikes: bool) -> None:
        with self._lock:
            if (peer := self._peers.get(sock)) is not None:
                self._send(peer, c.FaultOrder(strikes))

    def _offer(self, peer: _Peer, hello: c.WorkerHello) -> None:
        with self._lock:  # the worker must not be informed of a fetch before this
            peer.hello, self.durable.library_saves = hello, hello.saves
            self._places[peer.pid, start_of(peer.pid)] = hello
            slots, descriptors = self._snapshot_store.offer()
            slots = replace(slots, patience_s=self._patience_s)
            try:
                socket.send_fds(peer.sock, [c.pack(slots)], [*descriptors, self._progress.descriptor])
            except OSError as error:
                _log.warning("a message to a worker could not be sent: %s", error)
                peer.deaf = True

    def _send(self, peer: _Peer, message: c.Message) -> None:
        """Send a message, or end the connection: a worker that does not even read these short messages is stuck."""
        if peer.deaf:
            return
        line = c.pack(message)
        try:
            if peer.sock.send(line) == len(line):
                return
            reason = "it does not read"  # nothing may follow a part of a line
        except BlockingIOError:
            reason = "it does not read"
        except (BrokenPipeError, ConnectionResetError):  # it is ending
            peer.deaf = True
            return
        except OSError as error:
            reason = str(error)
        peer.deaf = True
        _log.warning("a message to a worker could not be sent, its connection is closed: %s", reason)
        with contextlib.suppress(OSError):
            peer.sock.shutdown(socket.SHUT_RDWR)  # its thread reads what the worker has sent, and the end


def _process_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and user of the connected process."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return int(pid), int(user)
