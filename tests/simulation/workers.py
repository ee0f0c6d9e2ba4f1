"""A node's simulated workers, as one process: they train until they finish, crash, are stopped, or miss their peers.

In a live run they also leave a round and wait, suspended, for a place in the next one, and start ahead of a place.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_agents import policy_types as v
from elastic_launch import contract as c
from elastic_launch.rendezvous.record import Round

if TYPE_CHECKING:
    from simulation.node import SimNode

__all__ = ["SUSPENSION", "SimWorkers"]

SUSPENSION = 2.0
"""Seconds that workers have to leave a round."""


class SimWorkers:
    """The workers of a node's current round.

    Attributes:
        round: the round whose workers train, or None.
        suspended: number of the round that living workers have left; 0 for none.
        kept: how often suspended workers got a place.
        done: numbers of the rounds whose workers have finished here.
        deaf: SIGTERM does not end them, nor do they leave a round when they are told to.
        ahead: whether workers were started ahead, and have no place in a round yet.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.round: Round | None = None
        self.suspended = 0
        self.kept = 0
        self.done: set[int] = set()
        self.deaf = False
        self.ahead = False
        self._starts_ahead = 0  # how many were started
        self._unplaced = False  # those of the round have not come, and have no place yet
        self._drained = self._killed = False

    @property
    def training(self) -> int:
        """Number of the round whose workers train, 0 for none."""
        return self.round.number if self.round is not None else 0

    def start(self, formed: Round, *, kept: bool, waiting: bool, coming: bool) -> None:
        assert self.round is None, "workers of two rounds on one node"
        assert self.ahead == (waiting or coming), "workers beside those that start ahead"
        self.ahead, self._unplaced = False, coming
        assert kept == bool(self.suspended), "a suspended worker is left, or revived twice"
        assert formed.number > self.suspended, "a suspended worker is revived for a round that it has left"
        self.kept += kept
        self.round, self.suspended = formed, 0
        self._drained = self._killed = False
        if not coming:
            self._begin()

    def _begin(self) -> None:
        number = self.training
        if self.node.cluster.live:
            self._later(self._delay(), lambda: self._tell(v.Reported(number, 0, c.Ready(0, live=True))))

    def start_ahead(self) -> None:
        """Start workers ahead of a place; they come to their first use of the world, or are killed before."""
        assert self.round is None or self._killed, "workers ahead beside workers"
        assert not self.ahead
        assert not self.suspended
        self.ahead = True
        self._starts_ahead += 1
        number, random = self._starts_ahead, self.node.kernel.random

        def end() -> None:
            code = random.choice((-9, -9, 1))
            if number == self._starts_ahead and self.ahead:
                self.ahead = False
                self._tell(v.WorkerExit(0, 0, code))
            elif number == self._starts_ahead and self._unplaced and self.round is not None:
                self._unplaced = False
                self._gone(code)

        def come() -> None:
            if number == self._starts_ahead and (self.ahead or self._unplaced):
                self._tell(v.Reported(0, 0, c.Ahead()))

        self.node.kernel.call(random.choice((0.01, 1.0, 8.0)), self.node, random.choice((come, come, come, end)))

    def kill_ahead(self) -> None:
        self.ahead = False

    def give_place(self) -> None:
        """The round was formed before they had come."""
        if self._unplaced and self.round is not None:
            self._unplaced = False
            self._begin()

    def terminate(self) -> None:
        if not self.deaf:
            self._ends(self._delay(), -signal.SIGTERM)

    def kill(self) -> None:
        """End all workers; suspended ones have no state that counts."""
        if self.suspended:
            number, self.suspended = self.suspended, 0
            self.node.kernel.call(0.01, self.node, lambda: self._tell(v.WorkerExit(number, 0, -signal.SIGKILL)))
        self._killed = True
        self._ends(0.01, -signal.SIGKILL)

    def crash(self) -> None:
        self._gone(1)

    def finish(self) -> None:
        self.done.add(self.training)
        self._gone(0)

    def die(self) -> None:
        """Die with the node: nothing is reported, but the peers' collectives break."""
        number, self.round, self.suspended, self.ahead = self.training, None, 0, False
        if number:
            self.node.cluster.lost_peer(self.node, number)

    def miss_a_peer(self, number: int) -> None:
        """A collective fails because a peer is gone."""
        delay = self.node.kernel.random.choice((0.002, 0.05, 0.5, 30.0))
        if not self.node.cluster.live:
            self._ends(delay, 1, number)
        elif not self._drained:
            patience = self.node.cluster.timing.dead_after + 2
            self._later(delay, lambda: self._tell(v.DisconnectedOver(number, 0, "connection closed")), number)
            self._ends(delay + patience, 1, number)

    # Suspended workers.

    def suspend(self) -> None:
        """They are told to leave the round, unless they have just ended."""
        if self.training and not self.deaf:
            self._later(self._delay(), self._leave)

    def dismiss(self) -> None:
        """Suspended workers are told to exit."""
        number, self.suspended = self.suspended, 0
        if number:
            self._tell(v.WorkerExit(number, 0, 0))

    def ask_stop(self) -> None:
        """They are to stop after the same step as all others: as soon as all of them train and reach each other."""
        if not self.training or self._drained:
            return
        if self.deaf or not self.node.cluster.drain(self.training):
            self._later(0.1, self.ask_stop)

    def drain(self) -> None:
        """All ranks have agreed on the step."""
        self._drained = True
        self._tell(v.Reported(self.training, 0, c.Drained(1, 0.0)))
        self._later(self._delay(), self._leave if self.node.cluster.live else lambda: self._gone(0))

    def _leave(self) -> None:
        if self._killed:
            return
        number, self.round = self.training, None
        self.suspended = number
        self._tell(v.Reported(number, 0, c.Suspended(0)))
        if not self._drained:
            self.node.cluster.lost_peer(self.node, number)

    def _delay(self) -> float:
        return self.node.kernel.random.choice((0.001, 0.1, 1.0))

    def _tell(self, event: v.Event) -> None:
        self.node.inbox.put(event)

    def _later(self, delay: float, function: Callable[[], None], number: int | None = None) -> None:
        """Call a function unless the round's workers are gone by then."""
        number = self.training if number is None else number
        self.node.kernel.call(delay, self.node, lambda: function() if self.training == number else None)

    def _ends(self, delay: float, code: int, number: int | None = None) -> None:
        self._later(delay, lambda: self._gone(code), number)

    def _gone(self, code: int) -> None:
        if self.round is None:
            return
        number, self.round = self.training, None
        self._tell(v.WorkerExit(number, 0, code))
        if code:
            self.node.cluster.lost_peer(self.node, number)
