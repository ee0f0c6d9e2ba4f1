"""A worker's end of the socket to its agent."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time

from elastic_launch import contract as c
from elastic_launch.shared_progress import SharedProgress
from elastic_launch.snapshot.memory.slot import Slot
from elastic_launch.training.ranks.world import World

__all__ = ["AgentLink"]

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 2.0
"""Seconds for which the agent's answer is waited for."""

BUSY_TIMEOUT = 2.0
"""Seconds for which a message waits for an agent that does not read."""

START_TIMEOUT = 60.0
"""Seconds for which the agent's first answer is waited for."""

PATIENCE = 600.0
"""Seconds for which an agent that is slow is waited for where a state must not be lost."""

COMMIT_TIMEOUT = 30.0
"""Seconds within which the agent says whether a checkpoint may appear; else it does not."""

FETCH_TIMEOUT = 600.0
"""Seconds for which a snapshot that the agent fetches from another node is waited for."""

SILENCE = 1.0
"""Seconds after which the agent is told of a step, beside the first one."""

_DESCRIPTORS = 16

LONGEST_ERROR = 1000
"""Characters of an error that the agent is told."""


class AgentLink:
    """Tells the agent how training goes, and learns what it asks; nothing here can fail the training.

    What the agent says is read when something is asked of this object, at step boundaries mostly: no thread waits
    for it. One thread asks; any may tell of snapshots, and the one that writes checkpoints asks :meth:`may_commit`.

    Args:
        sock: connected to the agent; taken over.

    Attributes:
        slots: of the node's snapshots; empty if the agent did not answer.
        sequence: highest number of a snapshot in them, before this worker wrote any.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.slots: list[Slot] = []
        self.sequence = 0
        sock.settimeout(BUSY_TIMEOUT)
        self._sock: socket.socket | None = sock
        self._sending = threading.Lock()  # held while a message is sent, and to hang up
        self._hearing = threading.Lock()  # held by who reads
        self._pending = b""
        self._stop_asked = ""
        self._use: int | None = None
        self._silent = False  # when it was last asked for the slot to use
        self._commit = c.Commit(0, allowed=False)
        self._fetching = False
        self._noted = False
        self._copies: list[c.Copied] = []
        self._copying_at = 0.0  # when the agent last said so
        self._save_asked = False
        self._tells_steps = True
        self._round = 0
        self._progress: SharedProgress | None = None
        self._next_word = 0.0  # when the agent is told of a step again

    @staticmethod
    def connect(world: World) -> AgentLink | None:
        """Connect to the agent that the environment names; None if there is none, or it is not to be reached."""
        address = os.environ.get(c.ENV_SOCKET, "")
        if not address or not world.round:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(BUSY_TIMEOUT)
        try:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            sock.close()
            _log.warning("the agent cannot be reached at %s (%s): planned changes will cost steps", address, error)
            return None
        link = AgentLink(sock)
        link._round = world.round
        link._tells_steps = world.local_rank == 0  # all take the same steps: one worker's word is enough
        link._say(c.Hello(world.round, world.rank, world.local_rank))
        link._take_slots()
        return link

    def ready(self, step: int, total: int, restore_s: float) -> None:
        """Training begins with so many steps done of so many (0: not known), after restoring for so many seconds."""
        self._say(c.Ready(step, total, restore_s))

    def step(self, step: int) -> None:
        """A step is done: written where the agent looks when it wants to know, and said now and then."""
        if not self._tells_steps:
            return
        if self._written(step) and time.monotonic() < self._next_word:
            return
        self._next_word = time.monotonic() + SILENCE
        self._say(c.StepDone(step))

    def _written(self, step: int) -> bool:
        """Whether the agent finds the step where it looks."""
        if self._progress is None:
            return False
        try:
            self._progress.write(self._round, step)
        except OSError:
            self._progress = None  # its number is somebody else's by now, or there is no memory
            return False
        return True

    def stop_asked(self) -> str:
        """Why the agent asks for a stop; empty if it does not. Does not wait."""
        self._hear(0.0)
        return self._stop_asked

    def wait_fetched(self) -> None:
        """Wait until the slots hold what the agent is fetching from another node, if it is."""
        deadline = time.monotonic() + FETCH_TIMEOUT
        while self._fetching and self._sock is not None and time.monotonic() < deadline:
            self._hear(deadline - time.monotonic())

    def slot_to_use(self, *, patient: bool = False) -> int | None:
        """The slot to write next, to be asked once for each snapshot; None if the agent does not say.

        Args:
            patient: wait for an agent that is slow; else it is waited for once, and then no more until it has answered.
        """
        deadline = time.monotonic() + (PATIENCE if patient else 0.0 if self._silent else ANSWER_TIMEOUT)
        while self._use is None and self._sock is not None:
            self._hear(deadline - time.monotonic())
            if time.monotonic() >= deadline:
                break
        use, self._use = self._use, None
        self._silent = use is None
        return use

    @property
    def silent(self) -> bool:
        """Whether the agent is there, and has not answered when it was last asked for a slot. Does not wait."""
        self._hear(0.0)
        return self._silent and self._use is None and self._sock is not None

    def may_commit(self) -> bool:
        """Whether a checkpoint that this process has written may appear: the agent knows what has become of the node.

        For one thread, beside the one that asks all else. Without an answer it may not.
        """
        number = self._commit.number + 1
        self._say(c.MayCommit(number))
        deadline = time.monotonic() + COMMIT_TIMEOUT
        while self._commit.number < number and self._sock is not None and time.monotonic() < deadline:
            self._hear(0.1)
        return self._commit.number == number and self._commit.allowed

    def stored(self, stored: c.Stored) -> None:
        """A snapshot is in a slot."""
        self._say(stored)

    def copies(self) -> list[c.Copied]:
        """How copies ended since the last call. Does not wait."""
        self._hear(0.0)
        copies, self._copies = self._copies, []
        return copies

    def wait_copied(self, timeout: float) -> bool:
        """Wait until a copy has ended, or the agent is gone.

        Args:
            timeout: seconds, anew whenever the agent says that a copy makes progress.

        Returns:
            False if the time was up, or the agent is gone.
        """
        self._copying_at = time.monotonic()
        while not self._copies and self._sock is not None:
            left = self._copying_at + timeout - time.monotonic()
            if left <= 0:
                return False
            self._hear(left)
        return bool(self._copies)

    @property
    def alive(self) -> bool:
        """Whether the agent is there."""
        return self._sock is not None

    def save_asked(self) -> bool:
        """Whether the agent has asked for a checkpoint since the last call. Does not wait."""
        self._hear(0.0)
        asked, self._save_asked = self._save_asked, False
        return asked

    def saved(self, step: int, error: str = "") -> None:
        """A checkpoint is written, or could not be."""
        self._say(c.Saved(step, error[:LONGEST_ERROR]))

    def drained(self, step: int, seconds: float) -> None:
        """All ranks have stopped after this step, and saving took so long; returns once the agent knows."""
        self._say(c.Drained(step, seconds))
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while not self._noted and self._sock is not None:
            self._hear(deadline - time.monotonic())
            if time.monotonic() >= deadline:
                _log.warning("the agent did not hear that this worker is drained")
                return

    def close(self) -> None:
        """Hang up; the slots' descriptors are closed too."""
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
        self._progress = SharedProgress(last) if last >= 0 else None
        self._understand(data)

    def _say(self, message: c.Message) -> None:
        data = c.pack(message)
        with self._sending:
            if self._sock is None:
                return
            try:
                self._sock.sendall(data)
            except OSError:
                # It is gone, and whoever guards its workers ends this one. Who asks next finds that out, and hangs up.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _hear(self, timeout: float) -> None:
        """Take in what comes within the seconds."""
        sock = self._sock
        if sock is None or (number := sock.fileno()) < 0:
            return
        # Not by the socket's own timeout, which is for those who send.
        arrivals = select.poll()
        arrivals.register(number, select.POLLIN)
        if not arrivals.poll(max(0.0, timeout) * 1000):
            return
        with self._hearing:
            if self._sock is None or not arrivals.poll(0):
                return  # another thread has heard it
            try:
                data = self._sock.recv(65536)
            except OSError:
                data = b""
            if data:
                self._understand(data)
            else:
                self._hang_up()

    def _understand(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            match c.unpack(line):
                case c.Slots(use=use, sequence=sequence, fetching=fetching):
                    self._use, self.sequence, self._fetching = use if use >= 0 else None, sequence, fetching
                case c.Fetched(use=use, sequence=sequence):
                    self._use, self.sequence, self._fetching = use, sequence, False
                case c.Use(slot=use):
                    self._use = use
                case c.Copied() as copied:
                    self._copies.append(copied)
                case c.Commit() as commit:
                    self._commit = commit
                case c.Copying():
                    self._copying_at = time.monotonic()
                case c.Stop(cause=cause):
                    self._stop_asked = cause
                case c.Save():
                    self._save_asked = True
                case c.Noted():
                    self._noted = True
