"""Detects schedulers, averaged models and gradient scalers of a training that its checkpoints do not have."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from elastic_launch.training.checkpoints.parts import Stateful

_SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
"""Both are in use; the garbage collector finds objects by their own class only."""

_PLATEAU = {"optimizer", "num_bad_epochs", "cooldown_counter"}
"""Attributes of a ReduceLROnPlateau."""


def forgotten(parts: Sequence[Stateful]) -> list[torch.optim.Optimizer]:
    """Return those optimizers among ``parts`` that have a scheduler which is not in ``parts``.

    Torch's schedulers mark their optimizer's ``step``, except ReduceLROnPlateau. That one is found as an object that
    refers to the optimizer, and is looked for only if no part refers to it.
    """
    saved = {id(found) for part in parts for found in _scheduled(part)}
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    return [
        each
        for each in optimizers
        if id(each) not in saved and (hasattr(each.step, "_wrapped_by_lr_sched") or _has_plateau(each))
    ]


def has_forgotten_average(parts: Sequence[Stateful]) -> bool:
    """Whether the process has an AveragedModel that is neither in ``parts`` nor belongs to one of them."""
    saved: set[int] = set()
    for part in parts:
        for holder in (part, *getattr(part, "__dict__", {}).values()):
            saved |= set(map(id, holder.modules())) if isinstance(holder, nn.Module) else {id(holder)}
    # The garbage collector finds objects through their class, too.
    return _remains(
        lambda: any(type(x) is AveragedModel and id(x) not in saved for x in gc.get_referrers(AveragedModel))
    )


def has_forgotten_scaler(parts: Sequence[Stateful]) -> bool:
    """Whether the process has used a gradient scaler that is neither in ``parts`` nor belongs to one of them."""
    saved = {id(holder) for part in parts for holder in (part, *getattr(part, "__dict__", {}).values())}

    def found() -> bool:
        scalers = [x for x in gc.get_referrers(*_SCALERS) if type(x) in _SCALERS]
        return any(scaler.is_enabled() and scaler._scale is not None and id(scaler) not in saved for scaler in scalers)

    return _remains(found)


def _has_plateau(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the process has an optimizer's ReduceLROnPlateau; the garbage collector finds it or its ``__dict__``."""
    return _remains(
        lambda: any(
            isinstance(found, ReduceLROnPlateau) or (type(found) is dict and found.keys() >= _PLATEAU)
            for found in gc.get_referrers(optimizer)
        )
    )


def _remains(found: Callable[[], bool]) -> bool:
    """Whether an object is found that is in use: one that refers to itself stays until garbage is collected."""
    if not found():
        return False
    gc.collect()
    return found()


def _scheduled(part: object) -> Iterator[Any]:
    """Yield the optimizers of a scheduler, or of a scheduler held by one of the script's own objects."""
    for holder in (part, *getattr(part, "__dict__", {}).values()):
        for inner in (holder, *(holder if isinstance(holder, list | tuple) else ())):
            optimizer = getattr(inner, "__dict__", {}).get("optimizer")
            if isinstance(optimizer, torch.optim.Optimizer):
                yield optimizer
