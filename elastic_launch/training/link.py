"""A worker's end of the socket to its agent."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_launch import contract as c
from elastic_launch.clock import MonotonicClock
from elastic_launch.collective_dump import dump_collectives_on_request
from elastic_launch.errors import UsageError
from elastic_launch.shared_progress import Activity, SharedProgress
from elastic_launch.snapshot.memory.slot import Slot
from elastic_launch.stack_dump import dump_stacks_on_signal
from elastic_launch.system.allowance import LOOK, Allowance

if TYPE_CHECKING:
    from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 2.0
"""Seconds to wait for the agent's answer."""

BUSY_TIMEOUT = 2.0
"""Seconds that sending a message waits for an agent that does not read."""

START_TIMEOUT = 60.0
"""Seconds to wait for the agent's first answer."""

PATIENCE = 600.0
"""Seconds to wait for a slow agent if a state must not be lost."""

COMMIT_TIMEOUT = 30.0
"""Seconds that the agent has to permit a commit; without an answer, nothing is committed."""

FETCH_TIMEOUT = 600.0
"""Seconds to wait for a snapshot that the agent fetches from another node."""

QUIET = 10.0
"""Seconds for which a longer wait for the agent is not logged."""

SILENCE = 1.0
"""Minimum seconds between two messages about steps, as long as steps can be written to shared memory."""

ADVANCES = 0.5
"""Minimum seconds between two reports of a state's parts that have arrived."""

PAUSE = 0.2
"""Seconds between two looks at what else may end a suspended worker's wait."""

_DESCRIPTORS = 16

_links: weakref.WeakSet[AgentLink] = weakref.WeakSet()


def _disown() -> None:
    for link in list(_links):
        link.disown()


os.register_at_fork(after_in_child=_disown)

LONGEST_ERROR = 1000
"""Maximum number of characters of an error sent to the agent."""


class AgentLink:
    """Reports the training's progress to the agent, and receives its requests; no error here fails the training.

    Messages from the agent are read when a method needs them, mostly at step boundaries. Once the worker can be
    suspended, a thread reads them, since the one that trains may be blocked in an exchange that is to be broken. One
    thread calls the methods, with two exceptions: any thread may call :meth:`stored`, and the thread that writes
    checkpoints calls :meth:`may_commit`.

    Args:
        sock: a socket connected to the agent; this object closes it. None: this process has no agent, and nothing here
            has an effect.
    """

    def __init__(self, sock: socket.socket | None = None) -> None:
        self.slots: list[Slot] = []  # of the node's snapshots; empty if the agent did not answer
        self.sequence = 0  # highest number of a snapshot in them, before this worker wrote any
        self.writes = True  # whether snapshots are written to them; it never becomes true again
        self.split = False  # whether snapshots of sharded states are to be split among the nodes
        self.writes_last = False  # whether this worker, which is to exit, writes its node's last snapshot
        if sock is not None:
            sock.settimeout(BUSY_TIMEOUT)
        self._agent = _peer(sock) if sock is not None else 0  # its pid
        self.present = sock is not None  # whether this process has, or had, an agent
        # Seconds to wait for an order after an exchange with other ranks has failed; 0 if this worker is not suspended.
        self.patience = 0.0
        self._sock = sock
        if sock is not None:
            _links.add(self)
        self._sending = threading.Lock()  # held while a message is sent, and to hang up
        self._reading = threading.Lock()  # held while reading
        self._pending = b""
        self._stop_asked, self._ends = "", False
        self._use: int | None = None
        self._silent = False  # whether it did not answer the last request for a slot
        self._commit = c.CommitAnswer(0, allowed=False)
        self._fetching = False
        self._noted = False
        self._copies: list[c.Copied] = []
        self._copying_at = 0.0  # time of the agent's last progress message
        self._save_asked = False
        self._tells_steps = True
        self._round = self._local_rank = self._step = self._training = 0
        self._watched = False
        self._forms = False  # whether the others of a round may be waiting for this process alone, as it joins them
        self._forming = 0  # how many contexts of this kind the process is in
        self._advanced = 0.0  # time of the last report of a state's part
        self._doing: tuple[Activity, float, str] = (Activity.UNWATCHED, 0.0, "")
        self._progress: SharedProgress | None = None
        self._next_word = 0.0  # time of the next message about steps
        self._stepped = 0.0  # time of the last step
        self._news = threading.Condition()  # notified by the reader; holds for all that messages change
        self._reader: threading.Thread | None = None
        self._on_suspend: Callable[[], object] = lambda: None
        self._suspend: c.Suspend | None = None
        self._place: c.Place | None = None
        self._exit = False
        self._taken_by: int | None = None  # the process that has this one's place

    @staticmethod
    def connect(world: World, *, saves: bool = True) -> AgentLink:
        """Connect to the agent that the environment names, if there is one and it can be reached.

        Args:
            saves: whether the library saves this worker's state.

        Raises:
            UsageError: if this process was started by a worker, with the worker's environment.
        """
        if not world.round:
            return AgentLink()
        link = AgentLink._connect(c.WorkerHello(world.round, world.rank, world.local_rank, saves))
        link._tells_steps = world.first_on_node  # all workers take the same steps: one report is enough
        # The first processes of a run may take long to find each other: nothing is known of their network.
        link._forms = os.environ.get(c.ENV_START_REASON, "first") != "first"
        return link

    @staticmethod
    def ahead(local_rank: int) -> AgentLink:
        """Like :meth:`connect`, in a process that was started ahead of a place in a round."""
        return AgentLink._connect(c.WorkerHello(0, 0, local_rank))

    @staticmethod
    def _connect(hello: c.WorkerHello) -> AgentLink:
        address = os.environ.get(c.ENV_SOCKET, "")
        if not address:
            return AgentLink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(BUSY_TIMEOUT)
        try:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            sock.close()
            _log.warning("the agent cannot be reached at %s (%s): planned changes will cost steps", address, error)
            return AgentLink()
        dump_stacks_on_signal()
        dump_collectives_on_request()
        link = AgentLink(sock)
        link._round, link._local_rank = hello.round, hello.local_rank
        link.say(hello)
        link._take_slots()
        if link._taken_by is not None:
            link.close()
            raise UsageError(
                f"This process (pid {os.getpid()}) has the environment of rank {hello.rank}, which belongs to the "
                f"running process {link._taken_by} of the training.",
                "Start a program that takes no part in the training with env=el.clean_environment(): it is then a "
                "world of one.",
            )
        return link

    @property
    def keeps(self) -> bool:
        """Whether snapshots are kept in this node's memory."""
        return bool(self.slots) and self.writes

    def say(self, message: c.Message) -> None:
        """Send a message to the agent; it gets lost if the agent is gone."""
        if not self.present:
            return
        data = c.pack(message)
        with self._sending:
            if self._sock is None:
                return
            try:
                self._sock.sendall(data)
            except OSError:
                # The agent is gone, and its guard will end this worker. The next read notices it and closes the socket.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def listen(self, on_suspend: Callable[[], object]) -> None:
        """From now on, have a thread read messages; it calls a function when the worker is to be suspended."""
        self._on_suspend = on_suspend
        if self._reader is None and self._sock is not None:
            self._reader = threading.Thread(target=self._read_all, name="agent", daemon=True)
            self._reader.start()

    def disconnected(self, step: int, error: str) -> bool:
        """Report that an exchange with other ranks failed; return whether the agent has this worker suspended."""
        if self._suspend is None:
            self.say(c.Disconnected(step, error[:LONGEST_ERROR]))
            self._hear_until(lambda: self._suspend is not None, self.patience)
        return self._suspend is not None

    @property
    def suspending(self) -> bool:
        """Whether this worker is to be suspended. Does not wait."""
        return self._suspend is not None

    def suspended(self, step: int, ends: Callable[[], bool]) -> c.Place | None:
        """Report that this worker has left its round, and wait for its place in another one.

        Args:
            ends: whether the wait is to end without a place; called from time to time.

        Returns:
            None if there is none: the node leaves, the run ends, or the agent is gone.
        """
        self.say(c.Suspended(step))
        return self.wait_for_place(ends)

    def wait_for_place(self, ends: Callable[[], bool] = lambda: False) -> c.Place | None:
        """Wait for this process' place in a round, see :meth:`suspended`."""
        while self._place is None and not self._exit and self._sock is not None and not ends():
            self._hear_until(lambda: self._place is not None or self._exit, PAUSE)
        place, self._place = self._place, None
        if place is not None:
            self._forms = self._watched = True
            self._doing = Activity.FORMING, 0.0, ""
            self._written()
        return place

    @property
    def training(self) -> int:
        """Number of the script's training, from 0, that steps and checkpoints are reported of."""
        return self._training

    def begin(self, ready: c.Ready) -> None:
        """Report that a training begins, or that this process begins or goes on with it in a round."""
        if ready.training > self._training:  # the agent may not know of its last steps, and the next are other ones
            ready, self._next_word = replace(ready, last=self._step, last_at=self._stepped), 0.0
        self._training = ready.training
        if self._progress is not None:
            self._progress.training = ready.training
        self.say(ready)

    def note(self, loss: float | None, batch: int, passes: int, lr: float | None = None) -> None:
        """Let the next report have these, see :class:`~elastic_launch.shared_progress.WorkerProgress`."""
        if self._progress is not None:
            self._progress.figures = loss, batch, passes, lr

    def step(self, step: int) -> None:
        """Report that a step is done: in shared memory if possible, and from time to time in a message."""
        self._step, self._stepped = step, MonotonicClock().now()
        self._doing = Activity.STEP if self._watched else Activity.UNWATCHED, 0.0, ""
        written = self._written()
        if not self._tells_steps or (written and time.monotonic() < self._next_word):
            return
        self._next_word = time.monotonic() + SILENCE
        self.say(c.StepDone(step, self._training))

    def watch(self, step: int | None, first: Activity = Activity.FIRST_STEP) -> None:
        """Have the agent notice from now on if no step follows those done; None: no further ones are expected.

        Args:
            first: what the next step is to this process, one of ``FIRST_STEPS``.
        """
        self._watched = step is not None
        self._step = self._step if step is None else step
        self._doing = first if self._watched else Activity.UNWATCHED, 0.0, ""
        self._written()

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Within this context, until :meth:`watch`, have the agent notice if the ranks of a round wait for each other.

        This does not hold for the first processes of a run.
        """
        if not self._forms or not self.patience:
            yield
            return
        self._forming += 1
        self._watched, self._doing = True, (Activity.FORMING, 0.0, "")
        self._written()
        try:
            yield
        finally:
            self._forming -= 1
            if not self._forming and self._doing[0] is Activity.FORMING:
                self.watch(None)

    def advanced(self) -> None:
        """Report that a part of a state has arrived."""
        if self._watched and time.monotonic() >= self._advanced + ADVANCES:
            self._advanced = time.monotonic()
            self._written()

    @contextlib.contextmanager
    def doing(self, activity: Activity, limit: float = 0.0, what: str = "") -> Iterator[None]:
        """Let the agent know that this is done meanwhile, which takes another time than a step.

        Args:
            limit, what: see :class:`~elastic_launch.shared_progress.WorkerProgress`.
        """
        if not self._watched:
            yield
            return
        before, self._doing = self._doing, (activity, limit, what)
        self._written()
        try:
            yield
        finally:
            if self._watched:
                self._doing = before
                self._written()

    def _written(self) -> bool:
        """Write the last step, and what follows, to shared memory; return whether that succeeded."""
        if self._progress is None:
            return False
        try:
            self._progress.write(self._round, self._step, *self._doing)
        except OSError:
            self._progress = None  # another object has reused its descriptor, or there is no memory
            return False
        return True

    def stop_asked(self) -> str:
        """Return why the agent requests a stop; empty if it does not. Does not wait."""
        self._hear(0.0)
        return self._stop_asked

    def ends(self) -> bool:
        """Whether the agent requests a stop after which this process takes part in no round. Does not wait."""
        self._hear(0.0)
        return self._ends

    def wait_fetched(self) -> None:
        """If the agent is fetching a snapshot from another node, wait until it is in the slots."""
        what = "the node's agent to fetch the newest state from another node"
        if not self._hear_at_length(lambda: not self._fetching, FETCH_TIMEOUT, what):
            _log.warning("the newest state did not arrive: training resumes from the newest state on this node")

    def slot_to_use(self, *, patient: bool = False) -> int | None:
        """Return the slot to write next; None if the agent does not answer. Call it once for each snapshot.

        Args:
            patient: wait for a slow agent. Otherwise an agent that did not answer is not waited for again until it has
                answered.
        """
        if patient:
            what = "the node's agent to say where in memory the last state is to be kept"
            self._hear_at_length(lambda: self._use is not None, PATIENCE, what)
        else:
            self._hear_until(lambda: self._use is not None, 0.0 if self._silent else ANSWER_TIMEOUT)
        use, self._use = self._use, None
        self._silent = use is None
        return use

    @property
    def silent(self) -> bool:
        """Whether the agent is connected but did not answer the last request for a slot. Does not wait."""
        self._hear(0.0)
        return self._silent and self._use is None and self._sock is not None

    def may_commit(self) -> bool:
        """Ask the agent whether a checkpoint that this process has written may be committed.

        The agent knows whether the node still belongs to the run. Without an answer, the result is False; without an
        agent, it is True. Only one thread, which may differ from the one that calls the other methods, calls this.
        """
        if not self.present:
            return True
        number = self._commit.number + 1
        self.say(c.MayCommit(number))
        deadline = time.monotonic() + COMMIT_TIMEOUT
        while self._commit.number < number and self._sock is not None and time.monotonic() < deadline:
            self._hear_until(lambda: self._commit.number >= number, 0.1)  # another thread may read the answer
        return self._commit.number == number and self._commit.allowed

    def copies(self) -> list[c.Copied]:
        """Return the outcomes of copies that ended since the last call. Does not wait."""
        self._hear(0.0)
        copies, self._copies = self._copies, []
        return copies

    def wait_copied(self, timeout: float) -> bool:
        """Wait until a copy has ended or the agent is gone.

        Args:
            timeout: seconds to wait; restarts whenever the agent reports progress of a copy.

        Returns:
            False on timeout or if the agent is gone.
        """
        self._copying_at = time.monotonic()
        while not self._copies and self._sock is not None:
            left = self._copying_at + timeout - time.monotonic()
            if left <= 0:
                return False
            self._hear_until(self._copied_since(self._copying_at), left)
        return bool(self._copies)

    def _copied_since(self, time_: float) -> Callable[[], bool]:
        return lambda: bool(self._copies) or self._copying_at != time_

    @property
    def alive(self) -> bool:
        """Whether the agent is connected."""
        return self._sock is not None

    def save_asked(self) -> bool:
        """Whether the agent has requested a checkpoint since the last call. Does not wait."""
        self._hear(0.0)
        asked, self._save_asked = self._save_asked, False
        return asked

    def saved(self, step: int, error: str = "") -> None:
        """Report that a checkpoint was written, or why it could not be."""
        self.say(c.WorkerSaved(step, error[:LONGEST_ERROR], self._training))

    def withdrew(self, left: int) -> None:
        """Report that checkpoints were removed, since they may be wrong; ``left``: step of the newest that is left."""
        self.say(c.WorkerSaved(left, "", self._training, withdrew=True))

    def drained(self, step: int, seconds: float) -> bool:
        """Report that all ranks have stopped after a step, and how long the save took.

        Returns:
            False if the agent has not confirmed it: then it may take an exit code of 0 for the end of the training.
        """
        self.say_noted(c.Drained(step, seconds))
        known = self._noted or not self.present
        if not known:
            _log.warning("the agent has not confirmed that this worker is drained")
        return known

    def say_noted(self, message: c.Message) -> None:
        """Send a message that the agent confirms, and wait for that."""
        self._noted = False
        self.say(message)
        self._hear_until(lambda: self._noted, ANSWER_TIMEOUT)

    def disown(self) -> None:
        """In a process that the script has forked: the agent is its parent's, and nothing here is said in its name."""
        self.present, self._reader, self._progress = False, None, None
        # Another thread may have held these.
        self._sending, self._reading, self._news = threading.Lock(), threading.Lock(), threading.Condition()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def close(self) -> None:
        """Close the socket and the slots' descriptors."""
        if self._reader is not None and self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RD)  # ends the reader
            self._reader.join(BUSY_TIMEOUT)
        self._hang_up()
        for slot in self.slots:
            slot.close()
        self.slots = []
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _hang_up(self) -> None:
        with self._sending:
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def _take_slots(self) -> None:
        if self._sock is None:
            return
        self._sock.settimeout(START_TIMEOUT)
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._sock, 4096, _DESCRIPTORS)
        except OSError as error:
            _log.warning("the agent did not answer (%s): a fault will cost the steps since the last checkpoint", error)
            self._hang_up()
            return
        self._sock.settimeout(BUSY_TIMEOUT)
        for number in descriptors:
            os.set_inheritable(number, False)
        *pairs, last = descriptors or [-1]
        if flags & socket.MSG_CTRUNC or len(pairs) % 2:
            _log.warning(
                "this process may open too few files (ulimit -n): a fault will cost the steps since the last checkpoint"
            )
            for number in descriptors:
                os.close(number)
            self._understand(data)
            return
        self.slots = [Slot(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
        self._progress = SharedProgress(last, self._local_rank) if last >= 0 else None
        self._understand(data)

    def _hear_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Process messages until something is done, the agent is gone, or the timeout in seconds has passed.

        What this process and the agent wait for a CPU does not count: an answer may be on its way.
        """
        allowance = Allowance(timeout, *((os.getpid(), self._agent) if timeout > LOOK and not done() else ()))
        if self._reader is not None:
            with self._news:
                while not done() and self._sock is not None and (left := allowance.left()) > 0:
                    self._news.wait(min(left, LOOK))
            return
        while not done() and self._sock is not None:
            self._hear(min(allowance.left(), LOOK))
            if allowance.left() <= 0:
                return

    def _hear_at_length(self, done: Callable[[], bool], timeout: float, what: str) -> bool:
        """Like :meth:`_hear_until`, but say what is waited for once it takes long; return whether it is done."""
        self._hear_until(done, QUIET)
        if not done() and self._sock is not None:
            _log.warning("waiting for %s, for up to %g s", what, timeout)
            self._hear_until(done, timeout - QUIET)
        return done()

    def _read_all(self) -> None:
        """Read messages until the agent is gone; runs in a thread."""
        while (sock := self._sock) is not None:
            try:
                data = sock.recv(65536)  # its timeout is for sending
            except TimeoutError:
                continue
            except OSError:
                data = b""
            suspending = self._suspend is not None
            with self._news:
                if data:
                    self._understand(data)
                else:
                    self._hang_up()
                self._news.notify_all()
            if self._suspend is not None and not suspending:
                self._on_suspend()

    def _hear(self, timeout: float) -> None:
        """Process messages that arrive within the timeout in seconds, unless a thread does so."""
        if self._reader is not None:
            return
        sock = self._sock
        if sock is None or (number := sock.fileno()) < 0:
            return
        # Not the socket's own timeout, which is for sending.
        arrivals = select.poll()
        arrivals.register(number, select.POLLIN)
        if not arrivals.poll(max(0.0, timeout) * 1000):
            return
        with self._reading:
            if self._sock is None or not arrivals.poll(0):
                return  # another thread has read it
            try:
                data = self._sock.recv(65536)
            except OSError:
                data = b""
            if data:
                self._understand(data)
            else:
                self._hang_up()

    def _take_use(self, given: c.SnapshotSlots | c.Place) -> None:
        self._use = given.use
        self.sequence, self._fetching, self.writes = given.sequence, given.fetching, given.writes

    def _understand(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            match c.unpack(line):
                case c.SnapshotSlots() as slots:
                    self._take_use(slots)
                    self.patience, self.split = slots.patience_s, slots.split
                case c.PlaceTaken(pid=pid):
                    self._taken_by = pid
                case c.Suspend(round=number) as suspend:
                    if number == self._round:
                        self._suspend = suspend
                case c.Place() as place:
                    self._take_use(place)
                    # At once, as orders for the new round may follow.
                    self._place, self._round = place, place.round
                    self._step = 0  # the training may go back in this round: see watch()
                    self._suspend, self._stop_asked = None, ""
                    self.note(None, 0, 0)
                    self._tells_steps, self._next_word, self._ends = place.placement.first_on_node, 0.0, False
                case c.Exit(use=use, sequence=sequence):
                    self._exit, self.writes_last = True, use is not None
                    self._use, self.sequence = use, sequence
                case c.Fetched(use=use, sequence=sequence):
                    self._use, self.sequence, self._fetching = use, sequence, False
                case c.Use(slot=use):
                    self._use = use
                case c.Copied() as copied:
                    self._copies.append(copied)
                case c.CommitAnswer() as commit:
                    self._commit = commit
                case c.Copying():
                    self._copying_at = time.monotonic()
                case c.Stop(cause=cause, ends=ends):
                    self._stop_asked, self._ends = cause, self._ends or ends
                case c.Save():
                    self._save_asked = True
                case c.Noted():
                    self._noted = True


def _peer(sock: socket.socket) -> int:
    """Return the pid of the process at the other end."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0])
