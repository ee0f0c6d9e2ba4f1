"""Several models and optimizers that one loop trains together: a GAN, an actor with its critics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.parts import Group, Stateful, is_stateful
from elastic_launch.training.gradients.accumulation import Gradients
from elastic_launch.training.kinds import found
from elastic_launch.training.wrapped import check_trainable

_log = logging.getLogger(__name__)


class Optimizers(Group):
    """Several optimizers, by name."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__(members)
        self.optimizers = dict(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers.values()))

    @property
    def state(self) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        for name, optimizer in self.optimizers.items():
            key: Any
            for key, state in optimizer.state.items():
                if key in merged and isinstance(key, Tensor):  # two optimizers share a parameter
                    state = {**merged[key], **{f"{inner} ({name})": value for inner, value in state.items()}}
                elif key in merged:  # such as a count
                    key = f"{key} ({name})"
                merged[key] = state
        return merged


class OptimizerSteps:
    """Chooses and steps the optimizers of a loop.

    Attributes:
        scaler: the gradient scaler; None: losses are not scaled.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | Optimizers, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizers = optimizer.optimizers if isinstance(optimizer, Optimizers) else {"": optimizer}
        self._unscaled: set[int] = set()  # optimizers and parameters, in the current pass

    @property
    def several(self) -> bool:
        """Whether a step may make several passes, each for other optimizers."""
        return len(self._optimizers) > 1

    def complete(self) -> None:
        """The gradients of a pass are complete, and scaled."""
        self._unscaled.clear()
        if self.scaler is not None:
            # It forgets what it has unscaled when it is updated, which it is not if that pass was left or not counted.
            # What the script has unscaled by it before were other gradients.
            self.scaler._per_optimizer_states.clear()

    def refuse_scaled(self, loss: Tensor) -> None:
        """Refuse a loss that the script has scaled already.

        Raises:
            UsageError: if it is what the scaler's ``scale`` has returned.
        """
        if self.scaler is None or self.scaler._scale is None:
            return
        if getattr(loss.grad_fn, "_saved_other", None) is self.scaler._scale:  # by which it was multiplied
            raise UsageError(
                "step.backward() got a loss that scaler.scale() has scaled, and would scale it again.",
                "Give it the loss itself: step.backward(loss).",
            )

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
            return [*gradients.parameters.trained.values()]
        # Two optimizers may share a parameter.
        return list({id(p): p for each in chosen for group in each.param_groups for p in group["params"]}.values())

    def unscale(self, chosen: Sequence[torch.optim.Optimizer], gradients: Gradients, where: str) -> None:
        """Unscale the gradients of these optimizers, once in each pass, unless the script has done so.

        Args:
            where: names the step in errors.
        """
        if self.scaler is None:
            return
        others = gradients.parameters.beside_optimizer() if not self._unscaled else []
        if others and self.scaler._scale is not None:
            # They count towards the norm of all gradients. On the device, as the scaler does it: no number is read.
            inverse = self.scaler._scale.double().reciprocal().float()
            for gradient in (p.grad for p in others if p.grad is not None):
                gradient.mul_(inverse.to(gradient.device))
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
            if self.scaler._per_optimizer_states[id(each)]["stage"] is not OptState.UNSCALED:
                self.scaler.unscale_(each)

    def step(self, chosen: Sequence[torch.optim.Optimizer]) -> list[Tensor | bool]:
        """Step these optimizers; return values of which one is not zero if the scaler skipped that."""
        if self.scaler is None:
            for each in chosen:
                each.step()
            return []
        found: list[Tensor | bool] = []
        for each in chosen:
            overflows = [*self.scaler._per_optimizer_states[id(each)]["found_inf_per_device"].values()]
            if getattr(each, "_step_supports_amp_scaling", False):
                # Reading them would wait for the device. update() adds to them in place.
                found += [overflow.clone() for overflow in overflows]
            else:
                found.append(any(overflow.item() for overflow in overflows))  # as the scaler does next
            self.scaler.step(each)
        self.scaler.update()
        return found

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


def as_model(model: nn.Module | Mapping[str, nn.Module], *, meshed: bool = False) -> nn.Module:
    """Return a model, or several models by name as one module; ``meshed`` is as for :func:`check_trainable`."""
    if isinstance(model, nn.Module):
        check_trainable(model, meshed=meshed)
        return model
    _check("model", model, nn.Module, "a torch.nn.Module")
    try:
        models = nn.ModuleDict(dict(model))
    except KeyError as error:
        raise UsageError(f"run.steps(model=...): {error.args[0]}.", "Choose another name.") from error
    check_trainable(models, meshed=meshed)
    return models


def as_optimizer(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
) -> torch.optim.Optimizer | Optimizers:
    """Return an optimizer, or several optimizers by name as one object."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        _check("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    for each in optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]:
        _check_one_pass(each)
    return Optimizers(optimizer) if isinstance(optimizer, Mapping) else optimizer


def as_part(where: str, part: Stateful | Mapping[str, Stateful] | None) -> Stateful | None:
    """Return a stateful object, or several by name as one object; ``where`` names the argument in the error."""
    for one in part.values() if isinstance(part, Mapping) else [part]:
        if one is not None and not is_stateful(one):
            raise UsageError(f"{where} is {found(one)}.", "Give an object that has state_dict and load_state_dict.")
    return Group(part) if isinstance(part, Mapping) else part


def _check_one_pass(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise UsageError(
            f"{name} has two steps for each batch, and here an optimizer has one pass.",
            "Make it two optimizers, each with its own pass; docs/how-to/two-step-optimizers.md has the code.",
        )
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{name} goes through the batch several times in a step, by a closure, and here an optimizer has one pass.",
            "Use another optimizer, or a loop of your own with run.resume() and run.boundary().",
        )


def _check(argument: str, given: object, kind: type, name: str) -> None:
    if isinstance(given, Mapping) and given and all(isinstance(value, kind) for value in given.values()):
        if all(isinstance(key, str) and key for key in given):
            return
        raise UsageError(f"run.steps({argument}=...): the names are {list(given)}.", "Names are strings.")
    what = found(given)
    if isinstance(given, Mapping):
        what = f"a dict of {', '.join(type(value).__name__ for value in given.values()) or 'nothing'}"
    raise UsageError(
        f"run.steps({argument}=...) is {what}.",
        f"Give {name}, or a dict of several by the names that they are to have in checkpoints.",
    )
