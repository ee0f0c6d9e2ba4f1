"""Several models and optimizers that one loop trains together: a GAN, an actor with its critics."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import nn

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.parts import Group, Stateful, is_stateful
from elastic_launch.training.kinds import found
from elastic_launch.training.wrapped import check_trainable


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
            for parameter, state in optimizer.state.items():
                if parameter in merged:  # two optimizers share it
                    state = {**merged[parameter], **{f"{key} ({name})": value for key, value in state.items()}}
                merged[parameter] = state
        return merged


def as_model(model: nn.Module | Mapping[str, nn.Module]) -> nn.Module:
    """Return a model, or several models by name as one module."""
    if isinstance(model, nn.Module):
        check_trainable(model)
        return model
    _check("model", model, nn.Module, "a torch.nn.Module")
    try:
        models = nn.ModuleDict(dict(model))
    except KeyError as error:
        raise UsageError(f"run.steps(model=...): {error.args[0]}.", "Choose another name.") from error
    check_trainable(models)
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
            'Make it two optimizers, each with its own pass; "Closures" in docs/training.md has the code.',
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
