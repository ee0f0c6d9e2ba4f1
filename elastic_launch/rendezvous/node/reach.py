"""Tries whether this node can connect to where a round's workers meet, on its leader's order.

A firewall often lets nodes connect to the endpoint of the run, and to no other port of its hosts. The workers of such a
node would keep those of all others waiting.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.system.plain_text import one_line
from elastic_launch.system.threads import ThreadDied, VitalThread

CONNECT = 5.0
"""Seconds that connecting may take: two packets may be lost."""

AGAIN = 10.0
"""Seconds between two attempts."""


class ReachTest:
    """Connects until it succeeds, in a thread of its own, and reports the first result and each change.

    Args:
        report: called from that thread.
    """

    def __init__(self, report: Callable[[m.Reached], object]) -> None:
        self._report = report
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, order: m.Reach, *, asked: bool = True) -> None:
        """Try to connect to this address from now on, and no longer to an earlier one.

        Args:
            asked: whether to report a first success, which the leader awaits if it has given the order.
        """
        self.stop()
        over = self._over = threading.Event()

        def failed(died: ThreadDied) -> None:
            # Without a test the node counts as connected, as any does that joins before the first round.
            self._report(m.Reached(order.round, ""))

        self._thread = VitalThread(self._run, "reach", (order, over, asked), owner=failed)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            failed(ThreadDied("reach", str(error)))

    def stop(self) -> None:
        """Try no longer; an attempt that is under way is not reported."""
        self._over.set()

    def close(self) -> None:
        """Stop; an attempt that is under way may outlast this by seconds."""
        self.stop()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(0.1)

    def _run(self, order: m.Reach, over: threading.Event, asked: bool) -> None:
        said = None if asked else ""
        while not over.is_set():
            error = _connect(order.address, order.port)
            if error != said and not over.is_set():
                self._report(m.Reached(order.round, error))
                said = error
            if not error:
                return
            over.wait(AGAIN)


def _connect(address: str, port: int) -> str:
    """Connect and close; return why that failed, or nothing."""
    try:
        socket.create_connection((address, port), CONNECT).close()
    except (OSError, UnicodeError) as error:
        return one_line(getattr(error, "strerror", None) or str(error)) or type(error).__name__
    return ""
