"""The options of a loop over steps, and what does not go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.parts import Stateful
from elastic_launch.training.data.epochs import Epochs
from elastic_launch.training.data.generators import generators_of_modules
from elastic_launch.training.evaluations import Evaluations
from elastic_launch.training.gradients.accumulation import Gradients
from elastic_launch.training.steps import Step
from elastic_launch.training.together import Optimizers
from elastic_launch.training.wrapped import check_elementwise, sharding_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of a loop over steps; see :meth:`elastic_launch.Run.steps`."""

    exact: bool = False
    verify: bool = False  # in exact mode, whether some micro-batches are given twice, see `purity`
    share: float = 0.0  # of the steps, in which each rank computes a micro-batch of another one, see `verification`
    buffers: Mapping[str, str] = field(default_factory=dict)  # rules, by pattern of the buffers' names
    parts: Mapping[str, Stateful | None] = field(default_factory=dict)  # of the state, besides model and optimizer
    scaler: torch.amp.GradScaler | None = None
    metrics: Sequence[str] = ()
    start: int = 0  # steps that this process has already done; if above 0, no checkpoint is restored
    redo: bool = False  # a step may be given up when memory runs out, and repeated with smaller micro-batches
    prepare: Callable[[int], None] | None = None  # called with the steps done, before the first step of a round
    evaluations: Evaluations  # done between a step and its boundary
    # Goes through a step as the loop over steps does. Called in a process that was started ahead, before it waits for
    # its place, with a step of one micro-batch, of which nothing remains.
    rehearse: Callable[[Step], None] | None = None
    gradients: Callable[[int, int], Gradients] | None = None  # by world size and rank, if they are not the loop's own
    stepper: Any = None  # steps in place of the optimizer, and has its state
    unwatched: Sequence[str] = ()  # names of the parts that the library alone changes, between steps

    def check(self, epochs: Epochs, model: nn.Module, optimizer: Any, *, several: bool, meshed: bool = False) -> None:
        """Refuse what does not go with these options.

        Args:
            optimizer: one, or several as one object.
            several: whether the model consists of several that the script has named.
            meshed: whether the script has a mesh of ``run.mesh()``.
        """
        if meshed or sharding_modules(model):
            self._check_sharded(optimizer, several=several)
        if self.share:
            self._check_verified(epochs, model, optimizer, meshed=meshed)
        if not self.exact:
            return
        epochs.check_exact()
        if found := generators_of_modules(model):
            raise UsageError(
                f"exact=True: the model has a generator of its own, which is not restored: {', '.join(found)}.",
                "Draw from the global generators, which are seeded for each micro-batch, or make one where you draw: "
                "torch.Generator().manual_seed(torch.initial_seed()).",
            )

    def _check_verified(self, epochs: Epochs, model: nn.Module, optimizer: Any, *, meshed: bool) -> None:
        given = {
            "a StatefulLoader of one rank's loader": bool(epochs.bound),
            "a sharded model": meshed or bool(sharding_modules(model)),
            "several optimizers": isinstance(optimizer, Optimizers),
            'micro="auto"': self.redo,
            "deepspeed_config": self.stepper is not None,
        }
        for what in [name for name, there in given.items() if there]:
            raise UsageError(f"verify=: micro-batches of other ranks cannot be computed with {what}.", "Leave out one.")

    def _check_sharded(self, optimizer: Any, *, several: bool) -> None:
        if several:
            raise UsageError("run.steps(model=...): of several models none may be sharded.", "Give one model.")
        if self.scaler is not None:
            raise UsageError("A scaler (fp16) does not work with a sharded model.", "Use bf16, which needs none.")
        if self.stepper is not None:
            raise UsageError("Trainer(deepspeed_config=...): the model is sharded already.", "Use one of the two.")
        if self.redo:
            raise UsageError('micro="auto" does not work with a sharded model.', "Give micro a number.")
        if self.exact:
            check_elementwise([*optimizer.optimizers.values()] if isinstance(optimizer, Optimizers) else [optimizer])
