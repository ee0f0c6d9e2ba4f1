"""A node's simulated workers, as one process: they train until they finish, crash, are stopped, or miss their peers."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from elastic_agents.policy_types import WorkerGone
from elastic_launch.rendezvous.record import Round

if TYPE_CHECKING:
    from simulation.node import SimNode

__all__ = ["SimWorkers"]


class SimWorkers:
    """The workers of a node's current round.

    Attributes:
        round: the round whose workers live, or None.
        done: numbers of the rounds whose workers have finished here.
        deaf: SIGTERM does not end them.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.round: Round | None = None
        self.done: set[int] = set()
        self.deaf = False

    @property
    def training(self) -> int:
        """Number of the round whose workers live, 0 for none."""
        return self.round.number if self.round is not None else 0

    def start(self, formed: Round) -> None:
        assert self.round is None, "workers of two rounds on one node"
        self.round = formed

    def terminate(self) -> None:
        if not self.deaf:
            self._ends(self.node.kernel.random.choice((0.001, 0.1, 1.0)), -signal.SIGTERM)

    def kill(self) -> None:
        self._ends(0.01, -signal.SIGKILL)

    def crash(self) -> None:
        self._gone(1)

    def finish(self) -> None:
        self.done.add(self.training)
        self._gone(0)

    def die(self) -> None:
        """Die with the node: nothing is reported, but the peers' collectives break."""
        number, self.round = self.training, None
        if number:
            self.node.cluster.lost_peer(self.node, number)

    def miss_a_peer(self, number: int) -> None:
        """A collective fails because a peer is gone."""
        delay = self.node.kernel.random.choice((0.002, 0.05, 0.5, 30.0))
        self._ends(delay, 1, number)

    def _ends(self, delay: float, code: int, number: int | None = None) -> None:
        number = self.training if number is None else number
        self.node.kernel.call(delay, self.node, lambda: self._gone(code) if self.training == number else None)

    def _gone(self, code: int) -> None:
        if self.round is None:
            return
        number, self.round = self.training, None
        self.node.inbox.put(WorkerGone(number, 0, code))
        if code:
            self.node.cluster.lost_peer(self.node, number)
