"""The run's nodes as its leader sees them, for the pages of ``--http``.

The leader is asked as ``elasticctl status`` asks it, over a link that is not a node's, in a thread of its own for each
question: neither the agent nor a page waits for it. It is asked only while a page or the status is being read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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

OLD = 10.0
"""Seconds after which an answer is not shown at once, if there may be a new one in a moment."""

FRESH = 1.0
"""Seconds for which `/status` waits for that; then it shows what is known."""

CLOSE = 1.0
"""Seconds that the thread gets to end, which may be connecting to a host that does not answer."""


@dataclass(frozen=True, slots=True)
class LastStatus:
    """What the leader said last."""

    status: Status | None = None  # None if it has not answered yet
    at: float = 0.0  # when that was, by ``time.monotonic``
    problem: str = ""  # why it has not answered since; empty if it has


class Roster:
    """Asks the leader until it is closed. Thread-safe.

    Args:
        leader: returns where the leader is, or an empty text; called from the thread.
    """

    def __init__(self, config: LaunchConfig, leader: Callable[[], str]) -> None:
        self._config, self._leader = config, leader
        self._turn = threading.Condition()
        self._answer = LastStatus()
        self._asked = self._due = 0.0  # when the last question was settled, and when the next is due
        self._thread: VitalThread | None = None
        self._asking = False
        self._closing = False

    def look(self, wait: float = 0.0) -> LastStatus:
        """Return what the leader said last, and ask it again if that is due.

        Args:
            wait: seconds to wait for its answer, if the last one is old.
        """
        now = time.monotonic()
        with self._turn:
            if not self._asking and now >= self._due and not self._closing:
                thread = VitalThread(self._ask, "roster", owner=self._failed)
                try:
                    thread.start()
                    self._thread, self._asking = thread, True
                except RuntimeError as error:  # no more threads: the next look tries again
                    self._answer = replace(self._answer, problem=str(error))
            if now - self._asked > OLD:
                self._answer = replace(self._answer, problem="")
                self._turn.wait_for(lambda: not self._asking or self._closing, wait)
            return self._answer

    def close(self) -> None:
        """End the thread."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE)

    def _failed(self, died: ThreadDied) -> None:
        """Called from the thread that ends."""
        _log.error("the leader is not asked for its nodes: %s", died.error)
        self._settle(None, one_line(died.error), ASK_EVERY)

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            where = self._leader()
            if not where:
                raise ElasticLaunchError("this node has not reached the run's leader yet")
            # The leader answers at its own address with every backend; one that stepped down names the next one.
            address = Address(self._config.run_id, LaunchConfig.backend, (parse_endpoint(where),), self._config.token)
            with AdminClient(address) as client:
                status = client.status()
        except ElasticLaunchError as error:
            self._settle(None, one_line(error.message), ASK_EVERY)
        else:
            self._settle(status, "", min(max(ASK_EVERY, SHARE * (time.monotonic() - began)), LONGEST))

    def _settle(self, status: Status | None, problem: str, pause: float) -> None:
        with self._turn:
            self._asked = time.monotonic()
            self._answer = replace(self._answer, problem=problem) if status is None else LastStatus(status, self._asked)
            self._due, self._asking = self._asked + pause, False
            self._turn.notify_all()
