"""A worker's part in planned changes, for training loops of frameworks that save their own state."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch.distributed as dist

from elastic_launch.contract import ENV_ROUND, Ready
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.agreement import Agreement, Wishes
from elastic_launch.training.ranks.world import World, environment
from elastic_launch.training.stopping import UNCONFIRMED, StopSource, Termination


class Drain:
    """Makes all ranks stop after the same step when a node joins or leaves, or on SIGTERM.

    It saves and restores nothing and keeps nothing in memory: when :attr:`stops` or :attr:`save` is set, the framework
    writes its own checkpoint, and later resumes from it.

    Attributes:
        stops: whether all ranks have agreed to stop here, so that other processes can continue.
        save: whether a checkpoint was requested after the last step, for example by ``elasticctl checkpoint``.
    """

    def __init__(self) -> None:
        self.stops = False
        self.save = False
        self._world = World()
        self._link = AgentLink()
        self._agreement: Agreement | None = None
        self._termination = Termination()
        self._stop = StopSource.NO
        self._step = 0
        self._reached = 0.0

    def begin(self, step: int, total: int = 0) -> None:
        """Mark the training as begun; from now on it can be stopped.

        Args:
            step: optimizer steps done.
            total: optimizer steps of the whole training; 0: not known.
        """
        self.end()
        self._world, self._stop, self._step = _world(), StopSource.NO, step
        self.stops = self.save = False
        self._link = AgentLink.connect(self._world)
        self._termination = Termination()
        self._termination.watch()
        self._link.say(Ready(step, total))

    def boundary(self, step: int, *, end: bool = False) -> bool:
        """Mark the boundary after an optimizer step. All ranks must call it equally often.

        Args:
            step: optimizer steps done.
            end: whether the training ends here, so that nothing is left to stop.

        Returns:
            :attr:`stops`. If True, save the state, then call :meth:`leave`.
        """
        if self._agreement is None:
            self._agreement = Agreement(self._world.world_size)
        self._step, self._reached = step, time.monotonic()
        self._link.step(step)
        save = self._world.rank == 0 and self._link.save_asked()
        agreed = self._agreement.exchange(Wishes(stop=self._termination.wanted(self._link.stop_asked()), save=save))
        self._stop = max(self._stop, agreed.stop)
        self.stops = self._stop.drains and not end
        self.save = agreed.save
        return self.stops

    def saved(self, step: int, error: str = "") -> None:
        """Report to the agent that the framework has written a checkpoint, or that it failed.

        Args:
            step: optimizer steps done when the state was taken.
            error: why it failed; empty if it did not.
        """
        if self._world.rank == 0:
            self._link.saved(step, error)

    def end(self) -> None:
        """End the training: restore the signal handler, and close the agent's socket."""
        if self._agreement is not None:
            self._agreement.settle()
            self._agreement = None
        self._termination.close()
        self._link.close()
        self._link = AgentLink()

    def leave(self) -> int:
        """Report to the agent that all ranks have stopped and this process' state is saved; called by all ranks.

        Returns:
            The exit code. The process must now end by raising
            :class:`~elastic_launch.training.stopping.DrainedExit` with it.
        """
        if self._agreement is not None:
            self._agreement.settle()
        confirmed = self._link.drained(self._step, time.monotonic() - self._reached)
        code = self._stop.exit_code(agent=self._link.present) if confirmed else UNCONFIRMED
        self.end()
        return code


def _world() -> World:
    """Return this process' world, from the process group that the framework has joined, if any."""
    world = environment() if os.environ.get(ENV_ROUND) else World()
    if dist.is_available() and dist.is_initialized():
        return replace(world, rank=dist.get_rank(), world_size=dist.get_world_size(), alone=False)
    return replace(world, rank=0, world_size=1)
