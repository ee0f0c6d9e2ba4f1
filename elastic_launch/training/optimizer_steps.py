"""The optimizers of a loop: which of them steps, with which gradients, and with a scaler if there is one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.accumulation import Gradients
from elastic_launch.training.together import Optimizers

_log = logging.getLogger(__name__)


class OptimizerSteps:
    """Chooses and steps the optimizers of a loop.

    Attributes:
        scaler: the gradient scaler; None: losses are not scaled.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | Optimizers, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.scaler = scaler
        self._optimizers = optimizer.optimizers if isinstance(optimizer, Optimizers) else {"": optimizer}
        self._unscaled: set[int] = set()  # optimizers and parameters, in the current pass

    @property
    def several(self) -> bool:
        """Whether a step may make several passes, each for other optimizers."""
        return len(self._optimizers) > 1

    def begin_pass(self) -> None:
        """New gradients follow, which are scaled."""
        self._unscaled.clear()

    def chosen(self, call: str, name: str | None) -> list[torch.optim.Optimizer]:
        """Return the optimizer of this name, or all; ``call`` names the step's method in errors."""
        if name is None:
            return list(self._optimizers.values())
        if name not in self._optimizers or name == "":
            known = ", ".join(map(repr, self._optimizers)) if self.several else "one, without a name"
            raise UsageError(
                f"step.{call}(optimizer={name!r}): the optimizers of this loop are {known}.",
                f"Give run.steps() a dict of optimizers, and {call}() one of its names.",
            )
        return [self._optimizers[name]]

    def parameters(self, chosen: Sequence[torch.optim.Optimizer], gradients: Gradients) -> list[Tensor]:
        """Return the parameters whose gradients count towards the norm when these optimizers step."""
        if not self.several:
            return gradients.parameters.trained
        # Two optimizers may share a parameter.
        return list({id(p): p for each in chosen for group in each.param_groups for p in group["params"]}.values())

    def unscale(self, chosen: Sequence[torch.optim.Optimizer], gradients: Gradients, where: str) -> None:
        """Unscale the gradients of these optimizers, once in each pass; ``where`` names the step in errors."""
        if self.scaler is None:
            return
        if not self._unscaled and (others := gradients.parameters.beside_optimizer()):
            # They count towards the norm of all gradients.
            torch._foreach_mul_([p.grad for p in others if p.grad is not None], 1 / self.scaler.get_scale())
        for each in chosen:
            if id(each) in self._unscaled:
                continue
            own = {id(p) for group in each.param_groups for p in group["params"]}
            if own & self._unscaled:
                raise UsageError(
                    f"{where}: two optimizers with a parameter in common are to step after the same pass, and the "
                    "scaler would unscale its gradient twice.",
                    "Give each optimizer a pass of its own, or leave out the scaler.",
                )
            self._unscaled |= own | {id(each)}
            self.scaler.unscale_(each)

    def step(self, chosen: Sequence[torch.optim.Optimizer]) -> bool:
        """Step these optimizers; return whether the scaler skipped that."""
        if self.scaler is None:
            for each in chosen:
                each.step()
            return False
        before = self.scaler.get_scale()
        for each in chosen:
            self.scaler.step(each)
        self.scaler.update()
        return self.scaler.get_scale() < before

    def warn_without_gradients(self, chosen: Sequence[torch.optim.Optimizer], gradients: Gradients, where: str) -> None:
        """Warn if some optimizers are chosen, and no parameter of theirs has a gradient."""
        if len(chosen) == len(self._optimizers) or gradients.rank != 0:
            return
        if all(p.grad is None for p in self.parameters(chosen, gradients)):
            name = next(name for name, each in self._optimizers.items() if each is chosen[0])
            _log.warning(
                "step.update(optimizer=%r): none of its parameters has a gradient in %s: is it the right optimizer for "
                "this pass, and is nothing detached that it trains?",
                name,
                where,
            )
