"""Checks whether a saved state fits the objects that are to load it, and describes the differences.

Torch silently loads the state of another optimizer class into an optimizer; where it does refuse a state, its message
names neither the checkpoint nor the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elastic_launch.system.plain_text import some

_LATER = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay", "param_names"}
"""Optimizer settings that newer versions of torch added; torch uses their defaults if they are missing."""

_LIKE_THE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}


def class_of(part: object) -> str:
    """Return the name of the class that a saved state fits; "" if its content shows whether it fits."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return type(part).__qualname__ if isinstance(part, kinds) else ""


def differences(part: object, saved: Any, kind: str) -> str:
    """Describe how an optimizer or scheduler differs from the one whose state was saved; "" if it fits.

    ``kind`` is the class that saved it; "": not known.
    """
    mine = class_of(part)
    if mine and kind and mine != kind:
        return f"it was saved by {kind}, and here is {mine}"
    if not isinstance(part, torch.optim.Optimizer):
        return ""
    if not isinstance(saved, Mapping) or "param_groups" not in saved:
        if "param_groups" not in part.state_dict():
            return ""  # an optimizer that wraps another has its own format
        names = f" ({_some(saved)})" if isinstance(saved, Mapping) else ""
        return f"it is of several optimizers{names}, and here is one, {mine}"
    there, here = saved["param_groups"], part.param_groups
    if len(there) != len(here):
        return (
            f"it has {len(there)} param_groups, and the {mine} here has {len(here)} (groups that the script adds in "
            "the loop must be there before it when the training goes on)"
        )
    for number, (old, new) in enumerate(zip(there, here, strict=True)):
        if len(old["params"]) != len(new["params"]):
            return f"its param_groups[{number}] has {len(old['params'])} parameters, and here {len(new['params'])}"
        if lacking := part.defaults.keys() - old.keys() - _LATER:
            return f"it is of another class of optimizers than the {mine} here: it has no {_some(sorted(lacking))}"
    return _other_shapes(part, saved)


def reordered(saved: Any, there: list[list[str]], here: list[list[str]]) -> tuple[Any, str]:
    """Return an optimizer's state with its parameters in this process' order, and differences or "".

    Torch matches parameters only by their order, which differs between processes if a script takes them from a set.
    ``there`` and ``here`` are their names by group, when it was saved and now.
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    alike = [list(map(len, names)) for names in (there, here)]
    if there == here or groups is None or alike[0] != alike[1] or set(chain(*there)) != set(chain(*here)):
        return saved, ""  # the model's parameters may have been renamed
    moved = []
    for number, (group, old, new) in enumerate(zip(groups, there, here, strict=True)):
        if lacking := sorted(set(new) - set(old)):
            return saved, f"its param_groups[{number}] has no {_some(lacking)}, and here it has"
        places = [old.index(name) for name in new]
        lists = {key: group[key] for key in ("params", "param_names") if key in group}
        moved.append({**group, **{key: [values[place] for place in places] for key, values in lists.items()}})
    return {**saved, "param_groups": moved}, ""


def _other_shapes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> str:
    there = [number for group in saved["param_groups"] for number in group["params"]]
    here = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(there, here, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if name in _LIKE_THE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
                shapes = f"{list(value.shape)}, and the parameter here {list(parameter.shape)}"
                return f"{name} of its parameter {number} has the shape {shapes}"
    return ""


def module_differences(module: nn.Module, saved: Any) -> tuple[str, str]:
    """Describe how a model's state differs from a saved one, and what to do about it; "" if not known."""
    if not isinstance(saved, Mapping):
        return "", ""
    own = module.state_dict()
    lacking, surplus = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    found = []
    if lacking:
        found.append(f"it has no {_some(lacking)}")
    if surplus:
        found.append(f"it has {_some(surplus)}, and the model here has not")
    for name in own.keys() & saved.keys():
        mine, other = own[name], saved[name]
        if isinstance(mine, Tensor) and isinstance(other, Tensor) and not is_lazy(mine) and mine.shape != other.shape:
            found.append(f"{name} has the shape {list(other.shape)}, and here {list(mine.shape)}")
            break
    hint = ""
    if {f"module.{name}" for name in own} == set(saved) or {f"module.{name}" for name in saved} == set(own):
        hint = "One of both is wrapped in DistributedDataParallel: register what it wraps, model.module."
    elif any(".parametrizations." in f".{name}" for name in [*lacking, *surplus]):
        hint = "If the loop makes or removes a parametrization, do that before the loop, where each process does it."
    return "; ".join(found), hint


def other_dtype(module: nn.Module, saved: Any) -> str:
    """Describe a tensor of a model's saved state that has another dtype here, to which torch would round it; or ""."""
    for name, mine in module.state_dict().items() if isinstance(saved, Mapping) else ():
        other = saved.get(name)
        if isinstance(mine, Tensor) and isinstance(other, Tensor) and not is_lazy(mine) and mine.dtype != other.dtype:
            return f"{name} is {other.dtype} in it, and {mine.dtype} here"
    return ""


def _some(names: Iterable[str]) -> str:
    return some(map(repr, names))
