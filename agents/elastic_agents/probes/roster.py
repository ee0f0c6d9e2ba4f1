"""The run's nodes as its leader sees them, for the pages of ``--http``.

The leader is asked as ``elasticctl status`` asks it, over a link that is not a node's, in a thread of its own: neither
the agent nor the server of the pages waits for it. It is asked only while a page or the status is being read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_launch.config.endpoints import parse_endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ElasticLaunchError
from elastic_launch.rendezvous.admin.client import Address, AdminClient
from elastic_launch.rendezvous.admin.messages import Status
from elastic_launch.system.plain_text import one_line
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger("elastic_launch.http")

ASK_EVERY, SHARE, LONGEST = 2.0, 20.0, 20.0
"""Seconds between two questions; so many times as long as the last answer took, if that is more: a leader of many nodes
is not kept busy; but at most so many."""

LOOKED = 10.0
"""Seconds since the last look after which the leader is not asked any more, and its link is closed."""

FRESH = 1.0
"""Seconds for which `/status` waits for the first answer; then it shows what is known."""

CLOSE = 1.0
"""Seconds that the thread gets to end, which may be connecting to a host that does not answer."""


@dataclass(frozen=True, slots=True)
class LastStatus:
    """What the leader said last.

    Attributes:
        status: None if it has not answered yet.
        at: when that was, by ``time.monotonic``.
        problem: why it has not answered since; empty if it has.
    """

    status: Status | None = None
    at: float = 0.0
    problem: str = ""


class Roster:
    """Asks the leader until it is closed. Thread-safe.

    Args:
        leader: returns where the leader is, or an empty text; called from the thread.
    """

    def __init__(self, config: LaunchConfig, leader: Callable[[], str]) -> None:
        self._config, self._leader = config, leader
        self._turn = threading.Condition()
        self._answer = LastStatus()
        self._looked: float | None = None
        self._asked_since = 0.0
        self._closing = False
        self._thread: VitalThread | None = None

    def look(self, wait: float = 0.0) -> LastStatus:
        """Return what the leader said last.

        Args:
            wait: seconds to wait for its answer, if it was not being asked.
        """
        now = time.monotonic()
        with self._turn:
            if self._looked is None or now - self._looked > LOOKED:
                self._asked_since, self._answer = now, LastStatus(self._answer.status, self._answer.at)
                self._turn.notify_all()
            self._looked = now
            if self._thread is None and not self._closing:
                thread = VitalThread(self._run, "roster", owner=self._failed)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # no more threads: the next look tries again
                    self._answer = LastStatus(self._answer.status, self._answer.at, str(error))
            self._turn.wait_for(self._answered, wait)
            return self._answer

    def _answered(self) -> bool:
        return self._answer.at >= self._asked_since or bool(self._answer.problem) or self._closing

    def close(self) -> None:
        """End the thread."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE)

    def _failed(self, died: ThreadDied) -> None:
        """Called from the thread that ends: the next look starts another one."""
        _log.error("the leader is not asked for its nodes: %s", died.error)
        with self._turn:
            self._answer = LastStatus(self._answer.status, self._answer.at, one_line(died.error))
            self._thread = None
            self._turn.notify_all()

    def _run(self) -> None:
        while self._wanted():
            try:
                self._ask_while_wanted()
            except ElasticLaunchError as error:
                with self._turn:
                    self._answer = LastStatus(self._answer.status, self._answer.at, one_line(error.message))
                    self._turn.notify_all()
                    self._turn.wait_for(lambda: self._closing, ASK_EVERY)

    def _ask_while_wanted(self) -> None:
        """Ask again and again over one link.

        Raises:
            ElasticLaunchError: if the leader does not answer, or the run has ended.
        """
        where = self._leader()
        if not where:
            raise ElasticLaunchError("this node has not reached the run's leader yet")
        # The leader answers at its own address with every backend; a leader that stepped down names the next one.
        address = Address(self._config.run_id, LaunchConfig.backend, (parse_endpoint(where),), self._config.token)
        with AdminClient(address) as client:
            while True:
                began = time.monotonic()
                status = client.status()
                now = time.monotonic()
                with self._turn:
                    self._answer = LastStatus(status, now)
                    self._turn.notify_all()
                    pause = min(max(ASK_EVERY, SHARE * (now - began)), LONGEST)
                    self._turn.wait_for(lambda: self._closing, pause)
                    if self._closing or self._idle():
                        return

    def _wanted(self) -> bool:
        """Wait until there is a reader; return False once this is closed."""
        with self._turn:
            while not self._closing and self._idle():
                self._turn.wait(60.0)
            return not self._closing

    def _idle(self) -> bool:
        return self._looked is None or time.monotonic() - self._looked > LOOKED
