"""A worker's part in planned changes, for a loop that a framework owns and whose state the framework saves."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import torch.distributed as dist

from elastic_launch.contract import ENV_ROUND
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.agreement import Agreement, Wishes
from elastic_launch.training.ranks.world import World, environment
from elastic_launch.training.stopping import Stop, Termination

__all__ = ["Drain"]


class Drain:
    """Has all ranks stop after the same step when a node comes or goes, or on SIGTERM.

    Nothing is saved or restored here, and nothing kept in memory: where :attr:`stops` or :attr:`save` is set, the
    framework writes its own checkpoint, and it resumes from that.

    Attributes:
        stops: whether all ranks have agreed to stop here, so that other processes go on.
        save: whether a checkpoint is asked for after the last step, by ``elasticctl checkpoint`` for example.
    """

    def __init__(self) -> None:
        self.stops = False
        self.save = False
        self._world = World()
        self._link: AgentLink | None = None
        self._agreement: Agreement | None = None
        self._termination = Termination()
        self._stop = Stop.NO
        self._step = 0
        self._reached = 0.0

    def begin(self, step: int, total: int = 0) -> None:
        """Training begins with so many steps done of so many (0: not known): from now on it can be stopped."""
        self.end()
        self._world, self._stop, self._step = _world(), Stop.NO, step
        self.stops = self.save = False
        self._link = AgentLink.connect(self._world)
        self._termination = Termination()
        self._termination.watch()
        if self._link is not None:
            self._link.ready(step, total, 0.0)

    def boundary(self, step: int, *, end: bool = False) -> bool:
        """Come to the boundary behind an optimizer step; called by all ranks, equally often.

        Args:
            step: optimizer steps done.
            end: whether the training ends here, so that there is nothing left to stop.

        Returns:
            :attr:`stops`: the state is to be saved, then :meth:`leave` called.
        """
        if self._agreement is None:
            self._agreement = Agreement(self._world.world_size)
        self._step, self._reached = step, time.monotonic()
        save = False
        if self._link is not None:
            self._link.step(step)
            save = self._world.rank == 0 and self._link.save_asked()
        agreed = self._agreement.exchange(Wishes(stop=self._wanted(), save=save))
        self._stop = max(self._stop, agreed.stop)
        self.stops = self._stop.drains and not end
        self.save = agreed.save
        return self.stops

    def saved(self, step: int, error: str = "") -> None:
        """Tell the agent that the framework has written a checkpoint, or could not."""
        if self._link is not None and self._world.rank == 0:
            self._link.saved(step, error)

    def end(self) -> None:
        """Training has ended: give back the signal's handler and the agent's socket."""
        if self._agreement is not None:
            self._agreement.settle()
            self._agreement = None
        self._termination.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    def leave(self) -> int:
        """Tell the agent that all have stopped and this process' state is saved; called by all ranks.

        Returns:
            the code of the :class:`~elastic_launch.training.stopping.Drained` by which the process is to end now.
        """
        # The agent counts on what it was told; whoever sent a signal to the process alone expects its code.
        code = 0 if self._link is not None or self._stop is Stop.AGENT else 128 + signal.SIGTERM
        if self._agreement is not None:
            self._agreement.settle()
        if self._link is not None:
            self._link.drained(self._step, time.monotonic() - self._reached)
        self.end()
        return code

    def _wanted(self) -> Stop:
        asked = self._link is not None and bool(self._link.stop_asked())
        return Stop.SIGNAL if self._termination.asked else Stop.AGENT if asked else Stop.NO


def _world() -> World:
    """This process' place: by the process group that the framework has joined, if it has."""
    world = environment() if os.environ.get(ENV_ROUND) else World()
    if dist.is_available() and dist.is_initialized():
        return replace(world, rank=dist.get_rank(), world_size=dist.get_world_size(), alone=False)
    return replace(world, rank=0, world_size=1)
