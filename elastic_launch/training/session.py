"""The session: this process' part in a training run, from joining the world to leaving it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from elastic_launch.batch import GlobalBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoint import Checkpoint, Resumed
from elastic_launch.training.durations import total_steps
from elastic_launch.training.gradients import ExactGradients, Gradients
from elastic_launch.training.loader import ElasticLoader
from elastic_launch.training.randomness import derive
from elastic_launch.training.steps import Step
from elastic_launch.training.world import World, environment, join, leave

__all__ = ["Run", "Stateful", "session"]

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """What has a state to be saved, as torch's modules, optimizers and schedulers do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Run:
    """What a training script knows of the run it is part of.

    Attributes:
        world: this process' place.
        device: to train on.
        resumed_step: optimizer steps that were done when this process began; known once steps have begun.
        worlds: the world sizes of all rounds that the training went through, this one's last.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device
        self.resumed_step = 0
        self.worlds: list[int] = [world.world_size]
        self._stateful: dict[str, Stateful] = {}
        self._on_save: list[Callable[[], None]] = []
        self._on_restore: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def restarts(self) -> int:
        """Restarts of the run so far."""
        return self.world.restarts

    def register(self, name: str, stateful: Stateful) -> None:
        """Save and restore a further object with every checkpoint.

        Raises:
            UsageError: if the name is taken.
        """
        if name in self._stateful or name in ("model", "optimizer", "scheduler", "scaler"):
            raise UsageError(f"run.register({name!r}): the name is taken.", "Choose another.")
        self._stateful[name] = stateful

    def on_save(self, function: Callable[[], None]) -> None:
        """Call function on every rank before a checkpoint takes the state."""
        self._on_save.append(function)

    def on_restore(self, function: Callable[[], None]) -> None:
        """Call function on every rank after a checkpoint was restored."""
        self._on_restore.append(function)

    def grad_accum(self, batch: GlobalBatch) -> int:
        """Return how many micro-batches of a full global batch are this rank's."""
        return batch.plan(self.world_size, self.rank).grad_accum

    def steps(
        self,
        loader: ElasticLoader,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        until: int | str,
        checkpoint: Checkpoint | None = None,
        exact: bool = False,
        find_unused_parameters: bool = False,
        scheduler: Stateful | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Iterator[Step]:
        """Yield the optimizer steps that are still to be done, after restoring the newest checkpoint.

        Args:
            loader: its micro-batches are shared out over the ranks.
            model: on its device, not wrapped; call ``step.model``.
            until: length of the whole training: epochs (3 or ``"3ep"``) or steps (``"1000ba"``).
            checkpoint: where to save to and resume from.
            exact: whether the weights are to be the same to the bit at every world size.
            find_unused_parameters: as of DistributedDataParallel; exact mode needs no such hint.
            scheduler, scaler: saved and restored with the rest; the scheduler is the script's to step.

        Raises:
            UsageError: if a step is left without ``update``, or the checkpoint belongs to another training.
        """
        self._warn_of_idle_ranks(loader.batch)
        parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, **self._stateful}
        parts |= {name: x for name, x in (("scheduler", scheduler), ("scaler", scaler)) if x is not None}
        resumed = self._resume(checkpoint, loader, parts)
        step, end = resumed.step, total_steps(until, loader.steps_per_epoch)
        gradients = (
            ExactGradients(model, self.world_size, self.rank)
            if exact
            else Gradients(model, self.world_size, self.rank, find_unused_parameters=find_unused_parameters)
        )
        try:
            while step < end:
                position = loader.position(step)
                batches = loader.epoch_from(step, self.world_size, self.rank)
                for number in range(step, min(end, step + loader.steps_per_epoch - position.step_in_epoch)):
                    torch.manual_seed(derive("step", loader.seed, number))
                    current = Step(
                        loader.position(number),
                        loader.plan(number, self.world_size, self.rank),
                        batches,
                        gradients,
                        optimizer,
                        seed=loader.seed,
                        samples=loader.samples_in(number),
                        scaler=scaler,
                    )
                    yield current
                    if not current.updated:
                        raise UsageError(f"step {number} ended without step.update().", "Call it once for each step.")
                    step = number + 1
                    if checkpoint is not None and checkpoint.due(step, final=step == end):
                        self._save(checkpoint, step, loader, parts)
        finally:
            gradients.close()
            if checkpoint is not None:
                checkpoint.finish(complete=step >= end)

    def _resume(self, checkpoint: Checkpoint | None, loader: ElasticLoader, parts: dict[str, Stateful]) -> Resumed:
        if checkpoint is None:
            return Resumed()
        resumed = checkpoint.open(self.world, _identity(loader))
        self.resumed_step = resumed.step
        if resumed.state is not None:
            missing = parts.keys() ^ resumed.state.keys()
            if missing:
                raise UsageError(
                    f"The checkpoint at step {resumed.step} and this script differ in their parts: {sorted(missing)}.",
                    "Resume with the same parts, or start in another directory.",
                )
            for name, part in parts.items():
                part.load_state_dict(resumed.state[name])
            for function in self._on_restore:
                function()
        self.worlds = [*resumed.worlds, self.world_size]
        return resumed

    def _save(self, checkpoint: Checkpoint, step: int, loader: ElasticLoader, parts: dict[str, Stateful]) -> None:
        for function in self._on_save:
            function()
        if self.rank == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            checkpoint.save(state, step, _identity(loader), self.worlds)

    def _warn_of_idle_ranks(self, batch: GlobalBatch) -> None:
        idle = batch.idle_ranks(self.world_size)
        if idle and self.rank == 0:
            advised = batch.micro_for(self.world_size)
            remedy = f"micro={advised} would use all" if advised else "the global batch has fewer samples than ranks"
            _log.warning("%d of %d ranks have no micro-batch to compute; %s", idle, self.world_size, remedy)


def _identity(loader: ElasticLoader) -> dict[str, int]:
    """What must not change between a checkpoint and its resumption."""
    return {
        "global batch": loader.batch.size,
        "micro-batch": loader.batch.micro,
        "seed": loader.seed,
        "dataset length": loader.length,
    }


@contextmanager
def session(*, threads: int = 1, deterministic: bool = True) -> Iterator[Run]:
    """Take part in a training run: join the world on entering, leave it on leaving.

    Args:
        threads: of each CPU operation; results depend on their number to the bit, so it must be the same everywhere.
        deterministic: whether torch is told to use deterministic algorithms, and to warn where it has none.
    """
    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    world = environment()
    device = join(world)
    yield Run(world, device)
    # Not after an error: the others may never come to the end, and this process is to fail at once.
    leave()
