"""Schedulers of the learning rate that a training has and its checkpoints have not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from elastic_launch.training.state import Group, Stateful

__all__ = ["forgotten"]


def forgotten(parts: Iterable[Stateful]) -> list[torch.optim.Optimizer]:
    """Return those optimizers among parts that have a scheduler which is not among them.

    A scheduler of torch's marks its optimizer's ``step``; ReduceLROnPlateau does not, and cannot be noticed.
    """
    flat = list(_members(parts))
    saved = {id(found) for part in flat for found in _scheduled(part)}
    optimizers = [part for part in flat if isinstance(part, torch.optim.Optimizer)]
    return [each for each in optimizers if hasattr(each.step, "_wrapped_by_lr_sched") and id(each) not in saved]


def _members(parts: Iterable[Stateful]) -> Iterator[Stateful]:
    for part in parts:
        if isinstance(part, Group):
            yield from part.members.values()
        else:
            yield part


def _scheduled(part: object) -> Iterator[Any]:
    """Yield the optimizers of a scheduler, or of one that an object of the script's own holds."""
    for holder in (part, *getattr(part, "__dict__", {}).values()):
        for inner in (holder, *(holder if isinstance(holder, list | tuple) else ())):
            optimizer = getattr(inner, "__dict__", {}).get("optimizer")
            if isinstance(optimizer, torch.optim.Optimizer):
                yield optimizer
