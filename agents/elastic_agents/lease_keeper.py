"""Renews the guard's lease as long as the agent carries out orders, and has stopped workers go on when it may."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from elastic_agents.inbox import Inbox
from elastic_agents.node_state import NodeState
from elastic_agents.workers.guard import Guard
from elastic_agents.workers.lease import Renewal
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import EventSink, WorkersHeld
from elastic_launch.rendezvous.node.membership import Membership

_log = logging.getLogger("elastic_launch.agent")


@dataclass(frozen=True, slots=True)
class StoppedByGuard:
    """The guard has stopped processes of the workers, at a time by this host's clock."""

    at: float
    pids: tuple[int, ...]


@dataclass(eq=False, repr=False)
class LeaseKeeper:
    """The agent's side of :mod:`elastic_agents.workers.lease`; used by the agent's thread."""

    _renewal: Renewal
    _guard: Guard
    _workers: RoundWorkers
    _membership: Membership
    _state: NodeState
    _events: EventSink
    _inbox: Inbox[object]
    _held_since: float = field(default=0.0, init=False)  # when the guard has stopped the workers

    def wake(self) -> None:
        """Have the main loop turn often enough to renew the lease, from now on."""
        self._inbox.put_later(self._renewal.wait, self.wake)

    def renew(self) -> None:
        """Renew the lease, unless the others may have continued without this node."""
        membership, now = self._membership, self._inbox.clock.now()
        until = self._renewal.turn(now, replaceable=membership.replaceable, heard=membership.belongs_since)
        if until is not None:
            self._guard.lease(until)
            if self._workers.resume():
                event = WorkersHeld(self._state.view.round, round(now - self._held_since, 3))
                self._events.emit(event)
                _log.info("%s", sentence(event))

    def stopped(self, stopped: StoppedByGuard) -> None:
        """The guard has stopped processes of the workers."""
        if not self._workers.held:
            self._held_since = stopped.at
            text = "this agent did not run for %g s or longer, and the others may have continued without this node: %s"
            _log.warning(text, self._renewal.term, "its guard has stopped the workers until the leader answers")
        self._workers.hold(stopped.pids)
        self._renewal.doubt(self._inbox.clock.now())
