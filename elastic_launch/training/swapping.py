"""Lends a model the weights of its average for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.errors import UsageError
from elastic_launch.training.kinds import found
from elastic_launch.training.wrapped import is_sharded, sharding_modules

_COMPILED = "_orig_mod."


@contextmanager
def weights_swapped(average: nn.Module, model: nn.Module) -> Iterator[None]:
    """Exchange the parameters and buffers of a model and of its average, in place; on exit once more."""
    mine, theirs = _tensors(model), _tensors(getattr(average, "module", average))
    for name in mine.keys() | theirs.keys():
        here, there = (_described(each.get(name)) for each in (mine, theirs))
        if here != there:
            raise UsageError(
                f"run.swapped(): {name!r} is {there} in the average, and {here} in the model.",
                "Give an average of this model, or the other model: run.swapped(average, model).",
            )
    done: list[str] = []
    try:
        for name in mine:
            _exchange(mine[name], theirs[name])
            done.append(name)
        torch.clear_autocast_cache()
        yield
    finally:
        _tensors(model), _tensors(average)  # which drops what the block has gathered of sharded ones
        for name in done:
            _exchange(mine[name], theirs[name])
        torch.clear_autocast_cache()


@contextmanager
def mode_swapped(optimizer: Any, models: Sequence[nn.Module]) -> Iterator[None]:
    """Call an optimizer's ``eval()``, and on exit its ``train()``; the weights are then the same to the bit."""
    if not (callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))):
        raise UsageError(
            f"run.swapped() got {found(optimizer)}, which has no train() and eval().",
            "Give an average of the model, or an optimizer with both, such as those of schedulefree.",
        )
    if any(group.get("train_mode") is False for group in optimizer.param_groups):
        raise UsageError("run.swapped(optimizer): it is in evaluation mode.", "Call optimizer.train() before the loop.")
    for model in models:
        _tensors(model)
    parameters = [_local(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.clone() for parameter in parameters]
    try:
        optimizer.eval()
        torch.clear_autocast_cache()
        yield
    finally:
        for model in models:
            _tensors(model)
        optimizer.train()
        for parameter, then in zip(parameters, kept, strict=True):
            parameter.copy_(then)  # it computes them, with rounding
        torch.clear_autocast_cache()


def _tensors(module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters and buffers by name; one that is sharded has shards afterwards, and no more."""
    for sharded in sharding_modules(module):
        sharded.reshard()
    named = chain(module.named_parameters(), module.named_buffers())
    return {name.removeprefix(_COMPILED): tensor for name, tensor in named}


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()


def _described(tensor: Any) -> str:
    if tensor is None:
        return "missing"
    shard = f" with a shard of shape {tuple(_local(tensor).shape)}" if is_sharded(tensor) else ""
    return f"a {tensor.dtype} of shape {tuple(tensor.shape)}{shard}"


def _exchange(mine: Any, theirs: Any) -> None:
    here, there = _local(mine), _local(theirs)
    kept = here.clone()
    here.copy_(there)
    there.copy_(kept)
