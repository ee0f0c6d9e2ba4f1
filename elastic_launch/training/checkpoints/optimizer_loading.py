"""Loads the state of an optimizer into the tensors that it has, which compiled code and CUDA graphs may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state as ``load_state_dict`` does, but keep the tensors and dtypes.

    Torch makes new tensors, in the dtypes of the parameters; NAdam and ASGD, for example, have float32 numbers for
    parameters of any dtype. Here a tensor that the optimizer has already gets the saved values, without a second copy
    of it in memory. An optimizer that loads its state itself is left alone.

    Raises:
        ValueError: or another error of ``load_state_dict``, if the state does not fit.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(saved)  # type: ignore[arg-type] # which may have a format of its own
        return
    written: set[int] = set()
    before = {key: dict(state) for key, state in optimizer.state.items() if isinstance(state, dict)}
    options = [dict(group) for group in optimizer.param_groups]
    states = dict(saved["state"])
    for number, parameter in _pairs(optimizer, saved):
        own, there = before.get(parameter, {}), states.get(number)
        if own and isinstance(there, dict):
            states[number] = {key: into(own.get(key), value, written) for key, value in there.items()}
    optimizer.load_state_dict({**saved, "state": states})
    for number, parameter in _pairs(optimizer, saved):
        found, there = optimizer.state.get(parameter), saved["state"].get(number)
        if not isinstance(found, dict) or not isinstance(there, dict):
            continue
        own = before.get(parameter, {})
        found.update({k: _restored(own.get(k), value, there.get(k), parameter, written) for k, value in found.items()})
    for then, group in zip(options, optimizer.param_groups, strict=True):
        group.update({key: into(then.get(key), value, written) for key, value in group.items() if key != "params"})


def _restored(mine: object, value: Any, was: object, parameter: Tensor, written: set[int]) -> Any:
    """Return what torch has loaded for a parameter, with the dtypes that it was saved with, in the tensors there.

    ``mine`` and ``was`` are what the optimizer had before, and what was saved.
    """
    if type(value) is dict and isinstance(was, Mapping):
        own = mine if isinstance(mine, Mapping) else {}
        return {k: _restored(own.get(k), item, was.get(k), parameter, written) for k, item in value.items()}
    if type(value) in (list, tuple) and isinstance(was, list | tuple):
        before = mine if isinstance(mine, list | tuple) and len(mine) == len(value) else [None] * len(value)
        items = zip(before, value, was, strict=True)
        return type(value)(_restored(own, item, then, parameter, written) for own, item, then in items)
    if isinstance(value, Tensor) and isinstance(was, Tensor) and value.dtype != was.dtype:
        value = was.to(value.device, copy=True)
    dense = type(value) is Tensor and value.layout is parameter.layout is torch.strided
    if dense and value.shape == parameter.shape and value.stride() != parameter.stride():
        # A state has no strides, and fused optimizers go through memory: an optimizer makes its own like this.
        value = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return into(mine, value, written)


def _pairs(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter with its number in the state."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    yield from zip(numbers, (p for group in optimizer.param_groups for p in group["params"]), strict=True)


def into(mine: object, value: Any, written: set[int]) -> Any:
    """Return the tensor that was there, with the new values, if it can have them; else the new value.

    ``written`` are the addresses of those that have theirs. Several groups may have one tensor, as torch gives them one
    learning rate: it stays only where it has the right values already.
    """
    if mine is value or type(mine) is not Tensor or type(value) is not Tensor:
        return value
    if (mine.shape, mine.dtype, mine.layout) != (value.shape, value.dtype, value.layout) or mine.requires_grad:
        return value
    if mine.layout is not torch.strided or 0 in mine.stride() or mine.is_inference():  # torch could not write to it
        return value
    with torch.no_grad():
        if mine.data_ptr() in written:
            return mine if torch.equal(mine, value.to(mine.device)) else value
        written.add(mine.data_ptr())
        return mine.copy_(value)
