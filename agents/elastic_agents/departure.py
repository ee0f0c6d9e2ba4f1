"""Why this node leaves the run before its end, and how much time it has: signals, orders, notices."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from elastic_agents import policy_types as v
from elastic_agents.inbox import REPEAT
from elastic_agents.node_state import NodeState
from elastic_agents.notices import Notice
from elastic_agents.timers import StepTimer
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import ExitCode
from elastic_launch.events.types import EventSink, NoticeReceived, OrderReceived
from elastic_launch.rendezvous.leader.rounds import MOST_SECONDS
from elastic_launch.rendezvous.wire import messages as m

_log = logging.getLogger("elastic_launch.agent")

MARGIN = 2.0
"""Seconds of a notice's time reserved for what follows the drain: killing what is left, and exiting."""


class Departure:
    """Turns signals, orders and notices to leave into policy events; used by the agent's thread.

    Args:
        later: puts an event into the agent's inbox after a number of seconds.

    Attributes:
        notice: the notice that makes the node leave, or None.
    """

    def __init__(
        self,
        config: LaunchConfig,
        state: NodeState,
        clock: Clock,
        step_timer: StepTimer,
        events: EventSink,
        later: Callable[[float, object], None],
    ) -> None:
        self._config = config
        self._state = state
        self._clock = clock
        self._step_timer = step_timer
        self._events = events
        self._later = later
        # If two sources use the same signal, the one that states the remaining time wins.
        sources = sorted(config.notices, key=lambda source: source.seconds is not None)
        self._signals = {source.number: source for source in sources if source.number is not None}
        self._until: float | None = None
        self._signalled: float | None = None  # when the first of several signals that count as one came
        self._forgiven = False
        self.notice: Notice | None = None

    @property
    def left(self) -> float:
        """Seconds until this node must be gone: those of a notice or order, else ``--shutdown-timeout``."""
        if self._until is None:
            return self._config.shutdown_timeout
        return max(0.0, self._until - self._clock.now())

    @property
    def grace(self) -> float:
        """Seconds between a worker's termination signal and SIGKILL."""
        return min(self._config.shutdown_timeout, self.left)

    def by_signal(self, number: int, at: float | None = None) -> v.Leave | None:
        """Handle a signal that is not forwarded to the workers.

        Args:
            at: when it was received, by this clock; None: now.
        """
        name, view = signal.Signals(number).name, self._state.view
        now = self._clock.now() if at is None else at
        if self._signalled is not None and now - self._signalled < REPEAT:
            _log.debug("%s received again", name)
            return None
        self._signalled = now
        source = self._signals.get(signal.Signals(number))
        if source is not None:
            return self.by_notice(Notice("signal", "request", name, source.seconds), now)
        if self.notice is not None and view.leaving is not None and not self._forgiven:
            # On a machine that is being taken away, the init system sends SIGTERM at about the time of the notice.
            self._forgiven = True
            _log.info("%s received: this node is already leaving; a second signal kills its workers", name)
            return None
        _log.info("%s received", name)
        if self._until is None:
            self._until = now + self._config.shutdown_timeout
        return v.Leave(name, 128 + number, self._to_drain(min(self._config.shutdown_timeout, self.left)), number)

    def by_order(self, order: m.Depart) -> v.Leave | None:
        """The leader wants this node to leave."""
        view = self._state.view
        self._events.emit(OrderReceived("depart", view.round, order.term, order.reason))
        if view.leaving is not None:
            return None  # it already leaves; a second Leave would skip the drain
        _log.info("%s: this node leaves the run", order.reason)
        if order.seconds < MOST_SECONDS:
            self._until = self._clock.now() + order.seconds
        return v.Leave(order.reason, int(ExitCode.TERMINATED), self._to_drain(order.seconds))

    def by_notice(self, notice: Notice, at: float | None = None) -> v.Leave | None:
        """This machine, or this node's part of it, will be taken away.

        Args:
            at: from when its seconds count, by this clock; None: from now.
        """
        view = self._state.view
        if view.leaving is not None and notice == self.notice:
            return None  # schedulers send a signal twice, to the group and to the process
        known = None if notice.seconds is None else round(notice.seconds, 1)
        self._events.emit(NoticeReceived(notice.source, notice.kind, notice.why, known, notice.leaves))
        within = "" if known is None else f", in {known:g} s"
        if not notice.leaves:
            _log.warning("%s%s; this node stays", notice.reason, within)
            return None
        if view.leaving is not None and known is None:
            _log.warning("%s; this node is already leaving", notice.reason)
            return None
        now = self._clock.now()
        until = (now if at is None else at) + (self._config.shutdown_timeout if known is None else known - MARGIN)
        seconds = max(0.0, until - now)
        self._until = until if self._until is None else min(self._until, until)
        if view.leaving is not None:
            _log.warning("%s%s; this node is already leaving", notice.reason, within)
            self._later(seconds, v.DrainOver(view.round))
            return None
        _log.warning("%s%s; this node leaves the run", notice.reason, within)
        self.notice = notice
        return v.Leave(notice.reason, int(ExitCode.TERMINATED), self._to_drain(seconds))

    def _to_drain(self, left: float) -> float:
        """Return the seconds left, or 0 if a drain certainly takes longer."""
        needed = self._step_timer.drain_seconds()
        if left >= needed:
            return left
        if self._state.view.phase is v.Phase.RUNNING:
            _log.warning(
                "no time to stop after a step: %.1f s are left, steps and saving take %.1f s; "
                "the last snapshot in memory is saved instead",
                left,
                needed,
            )
        return 0.0
