"""What a script with a loop of its own tells its agent, and learns from it, without a session."""

from __future__ import annotations

import functools

import torch.distributed as dist

from elastic_launch import faults
from elastic_launch.contract import Ready, Stopping
from elastic_launch.errors import UsageError
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.agreement import Agreement, Wishes
from elastic_launch.training.ranks.world import World, environment
from elastic_launch.training.stopping import StopSource, Termination


def report_step(step: int) -> None:
    """Tell the launcher how many optimizer steps of the whole training are done; for scripts with a loop of their own.

    The launcher then knows whether restarts advance the training, and shows steps in its events, status and ledger.
    The call exchanges nothing with other ranks, and costs about a microsecond. Call it on all ranks after each step,
    and with the restored step before the first. Without a launcher it has no effect.

    Args:
        step: optimizer steps done since the training began, not since this process started.

    Raises:
        UsageError: if the step is not a whole number from 0, or the environment describes the world only in part.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"report_step({step!r}) is not a number of steps.", "Give a whole number from 0.")
    _loop().report(step)


def should_stop() -> bool:
    """Return whether to save and exit now, because a node joins or leaves, or the run is stopped.

    All ranks call it equally often, for example after each :func:`report_step`: they agree, and it returns True on all
    of them in the same call, up to one call after the request. The script then saves its state and exits with 0 on all
    ranks, within 10 minutes, and the launcher continues the run with other processes. Without a launcher, or under
    torchrun, it returns True after SIGTERM.

    Raises:
        UsageError: if :func:`report_step` was not called before, there are several ranks and the process group was not
            joined, or the environment describes the world only in part.
    """
    return _loop().should_stop()


class PlainLoop:
    """One process' part in a training with a loop of its own."""

    def __init__(self, world: World, link: AgentLink) -> None:
        self._world = world
        self._link = link
        self._termination = Termination()
        self._agreement: Agreement | None = None
        self._step: int | None = None
        self._stops = False

    def report(self, step: int) -> None:
        """Report a step that is done."""
        begins, self._step = self._step is None, step
        if begins:
            self._link.say(Ready(step, drains=False))  # whether it can stop shows only when it asks
        else:
            self._link.step(step)
            faults.reached("step", step)

    def should_stop(self) -> bool:
        """Exchange with all ranks whether any is to stop; return what they agreed on."""
        if self._stops:
            return True
        if self._agreement is None:
            self._agreement = self._agree(self._step)
        agreed = self._agreement.exchange(Wishes(self._termination.wanted(self._link.stop_asked())))
        if agreed.stop is StopSource.NO:
            return False
        self._agreement.settle()
        self._stops = True
        self._link.say(Stopping(self._step or 0))
        return True

    def _agree(self, step: int | None) -> Agreement:
        world_size = self._world.world_size
        if step is None:
            raise UsageError(
                "should_stop() was called before report_step().",
                "Before the loop, and after each step: elastic_launch.report_step(steps done so far).",
            )
        if world_size > 1 and not dist.is_initialized():
            raise UsageError(
                f"should_stop() was called before the {world_size} ranks joined a process group.",
                "Call torch.distributed.init_process_group() first.",
            )
        agreement = Agreement(world_size)
        self._termination.watch()
        self._link.say(Ready(step))
        return agreement


@functools.cache
def _loop() -> PlainLoop:
    world = environment()
    return PlainLoop(world, AgentLink.connect(world, saves=False))
