"""How the buffers of micro-batches become those of the global batch.

BatchNorm's statistics for example. Every micro-batch starts from the buffers of the step's start. The new
floating-point ones are the mean over the micro-batches of what each left, computed as the start plus the mean way from
there, so that buffers that nobody changes stay as they are; the others are those that the last micro-batch left.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.batch import BatchPlan
from elastic_launch.errors import UsageError

__all__ = ["Buffers"]


class Buffers:
    """One model's buffers during a step.

    Args:
        world_size: of the default process group.

    Attributes:
        floats: the floating-point ones.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.floats = [b for b in model.buffers() if b.is_floating_point()]
        self._others = [b for b in model.buffers() if not b.is_floating_point()]
        self._homes = [(m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None]
        self._world_size = world_size
        self._total = 1
        self._at_start: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._last: list[Tensor] = []

    def begin(self, plan: BatchPlan) -> None:
        """Start a step."""
        self._total = plan.total
        self._at_start = [b.detach().clone() for b in self._all()]
        self._sums = [torch.zeros_like(b) for b in self.floats]
        self._last = [torch.zeros_like(b) for b in self._others]

    def take(self, index: int) -> list[Tensor]:
        """Take in what a micro-batch left, and return what it adds to each floating-point buffer.

        The way from the step's start and not the value, so that what nobody changes, a mask or a table of positions,
        stays what it is: the mean of equal numbers is not always that number. With a single micro-batch the value, so
        that the step is plain PyTorch's.
        """
        self._take_back_assigned()
        if index == self._total - 1:
            self._last = [b.detach().clone() for b in self._others]
        buffers = [buffer.detach() for buffer in self.floats]
        if self._total == 1:
            return [buffer.clone() for buffer in buffers]
        zero = torch.zeros(())
        return [
            # Infinities, as masks have, are no distance apart either.
            torch.where(buffer == start, zero.to(buffer), (buffer - start) / self._total)
            for buffer, start in zip(buffers, self._at_start, strict=False)
        ]

    def add(self, moved: list[Tensor]) -> None:
        """Add what a micro-batch adds, in the order of micro-batches of this rank."""
        for total, value in zip(self._sums, moved, strict=True):
            total.add_(value)

    def reduce(self) -> list[Tensor]:
        """Return the sums over all ranks of what was added."""
        if self._world_size > 1:
            for tensor in self._sums:
                dist.all_reduce(tensor)
        return self._sums

    def finish(self, floats: list[Tensor]) -> None:
        """Give every buffer its new value, on all ranks.

        Args:
            floats: sums over the micro-batches of all ranks of what each added.
        """
        with torch.no_grad():
            if self._world_size > 1:
                self._last = [_from_the_one_that_has_it(value) for value in self._last]
            for buffer, start, moved in zip(self.floats, self._at_start, floats, strict=False):
                buffer.copy_(moved if self._total == 1 else start + moved)
            for buffer, value in zip(self._others, self._last, strict=True):
                buffer.copy_(value)

    def restore(self) -> None:
        """Give the buffers the values of the step's start."""
        with torch.no_grad():
            for buffer, start in zip(self._all(), self._at_start, strict=True):
                buffer.copy_(start)

    def _all(self) -> list[Tensor]:
        return [*self.floats, *self._others]

    def _take_back_assigned(self) -> None:
        """Give a module that has put another tensor in a buffer's place the old one with the new values.

        Raises:
            UsageError: if they do not fit.
        """
        for module, name, buffer in self._homes:
            current = module._buffers[name]
            if current is buffer:
                continue
            if current is None or current.shape != buffer.shape or current.dtype != buffer.dtype:
                raise UsageError(
                    f"{type(module).__name__} has changed the shape or dtype of its buffer {name!r} in a step.",
                    "Write to the buffer in place, and leave its shape and dtype as they are.",
                )
            with torch.no_grad():
                buffer.copy_(current)
            module._buffers[name] = buffer


def _from_the_one_that_has_it(value: Tensor) -> Tensor:
    """Give all ranks a tensor that is zero on all but one."""
    if value.is_complex():
        dist.all_reduce(torch.view_as_real(value))
        return value
    numbers = value.to(torch.int64)
    dist.all_reduce(numbers)
    return numbers.to(value.dtype)
