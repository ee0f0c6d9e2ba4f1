"""A worker's end of the socket to its agent."""

from __future__ import annotations

import logging
import os
import socket
import time

from elastic_launch import contract as c
from elastic_launch.training.world import World

__all__ = ["AgentLink"]

_log = logging.getLogger(__name__)

NOTED_TIMEOUT = 2.0
"""Seconds for which a drained worker waits until its agent knows that it is."""

BUSY_TIMEOUT = 2.0
"""Seconds for which a message waits for an agent that does not read."""


class AgentLink:
    """Tells the agent how training goes, and learns what it asks; nothing here can fail the training.

    What the agent says is read at step boundaries, by :meth:`stop_asked`: no thread of the worker's waits for it.

    Args:
        sock: connected to the agent; taken over.
    """

    def __init__(self, sock: socket.socket, world: World) -> None:
        self._sock: socket.socket | None = sock
        self._world = world
        self._pending = b""
        self._stop_asked = ""

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
        return AgentLink(sock, world)

    def ready(self, step: int) -> None:
        """Training begins with so many steps done."""
        self._say(c.Ready(self._world.round, self._world.rank, self._world.local_rank, step))

    def step(self, step: int) -> None:
        """A step is done."""
        self._say(c.StepDone(step))

    def stop_asked(self) -> str:
        """Why the agent asks for a stop; empty if it does not. Does not wait."""
        self._hear(0.0)
        return self._stop_asked

    def drained(self, step: int, seconds: float) -> None:
        """All ranks have stopped after this step, and saving took so long; returns once the agent knows."""
        self._say(c.Drained(step, seconds))
        deadline = time.monotonic() + NOTED_TIMEOUT
        while self._sock is not None and not self._hear(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                _log.warning("the agent did not hear that this worker is drained")
                return

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _say(self, message: c.Message) -> None:
        if self._sock is None:
            return
        try:
            self._sock.settimeout(BUSY_TIMEOUT)
            self._sock.sendall(c.pack(message))
        except OSError:
            self.close()  # it is gone, and whoever guards its workers ends this one

    def _hear(self, timeout: float) -> bool:
        """Take in what comes within the seconds; whether the agent has noted what was said to it last."""
        if self._sock is None:
            return False
        try:
            self._sock.settimeout(max(0.0, timeout))
            data = self._sock.recv(4096)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        messages = [c.unpack(line) for line in lines]
        for message in messages:
            if isinstance(message, c.Stop):
                self._stop_asked = message.cause
        return any(isinstance(message, c.Noted) for message in messages)
