"""How the gradients of micro-batches become those of the global batch.

``Gradients`` does it by DistributedDataParallel, which overlaps communication with the last backward pass; where a rank
has no micro-batch, whose DDP would wait for ever for its hooks, by one flat all-reduce. ``ExactGradients`` does it in
the fixed tree of :mod:`elastic_launch.training.reduction`.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_launch.batch import BatchPlan
from elastic_launch.errors import UsageError
from elastic_launch.training.buffers import Buffers
from elastic_launch.training.exchange import broadcast_tensors
from elastic_launch.training.reduction import ExactReduction

__all__ = ["ExactGradients", "Gradients", "check_model"]


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be the same at every world size.

    Raises:
        UsageError: naming the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"{name or 'the model'} is a SyncBatchNorm, whose statistics depend on the world size.",
                "Use BatchNorm, whose statistics here are per micro-batch at every world size.",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be added in a fixed order.",
                "Build it with sparse=False.",
            )


class Gradients:
    """One model's gradients by DDP.

    Args:
        model: on its device.
        world_size, rank: of the default process group.
        find_unused_parameters: as of DDP: to be set if some parameters get no gradient in a step's last micro-batch.
        flat: whether DDP, which talks in the middle of a step, is never used: a step can then be given up on one rank.
        buffers: rules for buffers, by pattern of their names.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        rank: int,
        *,
        find_unused_parameters: bool = False,
        flat: bool = False,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        self._find_unused_parameters = find_unused_parameters
        self._always_flat = flat
        self.model = model
        self.world_size = world_size
        self.rank = rank
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = Buffers(model, world_size, buffers)
        self._ddp = self._wrap()
        if world_size > 1 and self._ddp is None:
            # As DDP does: a script that seeds nothing builds another model on each rank.
            broadcast_tensors([*model.parameters(), *model.buffers()], 0)
        self._stale = False
        self._plan = BatchPlan((), 1, ())

    def _wrap(self) -> DistributedDataParallel | None:
        if self.world_size == 1 or not self.parameters or self._always_flat:
            return None
        with warnings.catch_warnings():
            # torch 2.13 has another name for it, which 2.11 does not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(
                self.model, broadcast_buffers=False, find_unused_parameters=self._find_unused_parameters
            )

    @property
    def module(self) -> Callable[..., Any]:
        """What the script calls for the forward pass."""
        return self._ddp if self._ddp is not None and not self._flat else self.model

    @property
    def _flat(self) -> bool:
        return self._always_flat or self._plan.total < self.world_size

    def begin(self, plan: BatchPlan) -> None:
        """Start a step."""
        self._plan = plan
        for parameter in self.parameters:
            parameter.grad = None
        self._renew()
        self._buffers.begin(plan)

    def _renew(self) -> None:
        """Wrap the model anew after steps that passed DDP by.

        In looking for unused parameters DDP remembers those of every backward pass, also of one that is not its own,
        and takes them for used in its next step: it would fail there, or give them zeros instead of no gradient.
        """
        if self._ddp is None or not self._find_unused_parameters:
            return
        if self._flat:
            self._stale = True
        elif self._stale:
            self._ddp, self._stale = self._wrap(), False

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """Surround forward and backward of this rank's number-th micro-batch; leave the buffers of the step's start."""
        last = number == self._plan.grad_accum - 1
        if self._ddp is not None and not self._flat and not last:
            with self._ddp.no_sync():
                yield
        else:
            yield
        self.take(number)
        self._buffers.restore()

    def take(self, number: int) -> None:
        """Take in what a micro-batch left."""
        if self._ddp is None or number < self._plan.grad_accum - 1:
            self._part_gradients()
        self._buffers.add(self._buffers.take(self._plan.micro_batches[number].index))

    @property
    def factor(self) -> float:
        """By which a loss is multiplied, beside its weight, before its backward pass: DDP divides by the world size."""
        return float(self.world_size) if self._ddp is not None and not self._flat else 1.0

    def finish(self) -> None:
        """Give every parameter its gradient over the global batch, and every buffer its new value, on all ranks."""
        if self._flat and self.world_size > 1:
            self._reduce_flat()
        self._buffers.finish(self._buffers.reduce())

    def _reduce_flat(self) -> None:
        """One all-reduce over all gradients; a parameter without one anywhere keeps None."""
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        present = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32, device=device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        for parameter, there in zip(self.parameters, present.tolist(), strict=True):
            if there:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                parameter.grad = gradient

    def _part_gradients(self) -> None:
        """Give each parameter memory of its own for its gradient: both terms of a sum may get one and the same."""
        seen = set()
        for parameter in self.parameters:
            if parameter.grad is not None:
                memory = parameter.grad.untyped_storage().data_ptr()
                if memory in seen:
                    parameter.grad = parameter.grad.clone()
                seen.add(memory)

    def discard(self) -> None:
        """Make the step undone: no gradients, and the buffers of its start."""
        for parameter in self.parameters:
            parameter.grad = None
        self._buffers.restore()

    @property
    def talks_in_between(self) -> bool:
        """Whether backward passes wait for other ranks, so that none of a step can be left out on one."""
        return self._ddp is not None and not self._flat

    def close(self) -> None:
        """Let go of DDP: destroying the process group with it alive hangs now and then."""
        if self._ddp is not None:
            self._ddp = None
            # It is part of a cycle.
            gc.collect()


class ExactGradients(Gradients):
    """One model's gradients in the fixed tree: the same bits at every world size.

    Raises:
        UsageError: if the model has parts that cannot be reduced so.
    """

    def __init__(
        self, model: nn.Module, world_size: int, rank: int, *, buffers: Mapping[str, str] | None = None
    ) -> None:
        check_model(model)
        super().__init__(model, world_size, rank, buffers=buffers)
        self._reduction = ExactReduction([*self.parameters, *self._buffers.summed], world_size, rank)
        self._taking = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, which))  # type: ignore[no-untyped-call]
            for which, parameter in enumerate(self.parameters)
        ]

    def _wrap(self) -> None:
        return None

    @property
    def factor(self) -> float:
        return 1.0

    def begin(self, plan: BatchPlan) -> None:
        super().begin(plan)
        self._reduction.reset()

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self._reduction.begin(self._plan.micro_batches[number].index)
        self._taking = True
        try:
            with super().micro_batch(number):
                yield
        finally:
            self._taking = False

    def discard(self) -> None:
        super().discard()
        self._reduction.reset()

    def _take_gradient(self, which: int, parameter: Tensor) -> None:
        """Take a parameter's gradient as soon as backward has it."""
        if self._taking and parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self._reduction.put(which, gradient)

    def take(self, number: int) -> None:
        moved = self._buffers.take(self._plan.micro_batches[number].index)
        for which, value in enumerate(moved, len(self.parameters)):
            self._reduction.put(which, value)
        self._reduction.end()

    def finish(self) -> None:
        sums = self._reduction.finish(self._plan.total)
        for parameter, gradient in zip(self.parameters, sums, strict=False):
            parameter.grad = gradient
        self._buffers.finish([value for value in sums[len(self.parameters) :] if value is not None])

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
