"""The step as a transaction: micro-batches in, one optimizer step out.

Until :meth:`Step.update` has succeeded nothing has changed: parameters, buffers and optimizer are those of the step's
start, and the step can be thrown away and done again, in another world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.batch import BatchPlan, slice_of
from elastic_launch.errors import ElasticLaunchError, UsageError
from elastic_launch.training.gradients import Gradients
from elastic_launch.training.loader import Position
from elastic_launch.training.randomness import derive, seeded

__all__ = ["NonFiniteLossError", "Step"]


class NonFiniteLossError(ElasticLaunchError):
    """A loss is NaN or infinite; the message names step, rank and micro-batch."""


class Step:
    """One optimizer step; iterate over it for this rank's micro-batches.

    Attributes:
        position: where it lies in the training.
        plan: this rank's share of its global batch.
        model: to be called for the forward pass.
        loss: mean loss over the global batch, the same on all ranks; only after :meth:`update`.

    Args:
        batches: yields this rank's collated micro-batches.
        seed: from which the random state of each micro-batch derives.
        samples: in the step's global batch.
        scaler: of losses in half precision.
    """

    def __init__(
        self,
        position: Position,
        plan: BatchPlan,
        batches: Iterator[Any],
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int,
        samples: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.position = position
        self.plan = plan
        self.loss = math.nan
        self.updated = False
        self._batches = batches
        self._gradients = gradients
        self._optimizer = optimizer
        self._seed = seed
        self._samples = samples
        self._scaler = scaler
        self._current: int | None = None
        self._losses: list[tuple[Tensor, float | None]] = []

    @property
    def number(self) -> int:
        """Its number, from 1."""
        return self.position.step + 1

    @property
    def samples(self) -> int:
        """Samples in the step's global batch."""
        return self._samples

    @property
    def model(self) -> Callable[..., Any]:
        return self._gradients.module

    def __iter__(self) -> Iterator[Any]:
        self._gradients.begin(self.plan)
        for number, micro in enumerate(self.plan.micro_batches):
            sample = next(self._batches)
            seed = derive("micro-batch", self._seed, self.position.step, micro.index)
            with self._gradients.micro_batch(number), seeded(seed, devices=True):
                self._current = number
                yield sample
                if len(self._losses) != number + 1:
                    raise UsageError(
                        f"step {self.position.step}: micro-batch {micro.index} ended without step.backward(loss).",
                        "Call it once for each micro-batch.",
                    )
        self._current = None

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Do the backward pass of the present micro-batch.

        Args:
            loss: mean loss over the micro-batch, or over what ``weight`` counts in it; a scalar.
            weight: the micro-batch's share in the mean over the global batch, for example its number of tokens; None:
                its number of samples. To be given for all micro-batches of a step, or for none.

        Raises:
            UsageError: if loss is no scalar, or this is not the time.
        """
        if self._current is None or len(self._losses) != self._current:
            raise UsageError("step.backward() belongs once into each pass of `for sample in step`.")
        if loss.numel() != 1:
            raise UsageError(
                f"step.backward() got a loss of shape {tuple(loss.shape)}.", "Reduce it to one number, by its mean."
            )
        # A weight is scaled to about the size of a sample's; update() divides by what they sum up to.
        share = self.plan.weights[self._current] if weight is None else weight / self._samples
        scaled = loss.reshape(()) * (share * self._gradients.factor)
        self._losses.append((loss.detach().reshape(()), weight))
        (self._scaler.scale(scaled) if self._scaler is not None else scaled).backward()  # type: ignore[no-untyped-call]

    def update(self, clip_norm: float | None = None) -> None:
        """Reduce the gradients over the ranks and make the optimizer's step.

        Args:
            clip_norm: largest 2-norm of all gradients together, or None.

        Raises:
            UsageError: if micro-batches are left, or only some have a weight.
            NonFiniteLossError: on all ranks, if a loss on any is NaN or infinite; nothing has changed then.
        """
        if self.updated or len(self._losses) != self.plan.grad_accum:
            raise UsageError(
                f"step.update() came after {len(self._losses)} of {self.plan.grad_accum} micro-batches.",
                "Call it once, behind the loop over the step.",
            )
        correction = self._agree_on_loss()
        self._gradients.finish()
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        parameters = self._gradients.parameters
        if correction is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        self.updated = True

    def _agree_on_loss(self) -> float | None:
        """Find the loss over the global batch; return by what weighted gradients must be multiplied, None without.

        Each rank fills in its own places of a table of all micro-batches, so that adding the tables is exact and every
        rank sums in the same order.
        """
        table = torch.zeros(self.plan.total, 3, dtype=torch.float64)
        for micro, share, (loss, weight) in zip(self.plan.micro_batches, self.plan.weights, self._losses, strict=True):
            table[micro.index] = torch.tensor(
                [float(loss), share if weight is None else weight, 0.0 if weight is None else 1.0], dtype=torch.float64
            )
        world_size = self._gradients.world_size
        if world_size > 1:
            dist.all_reduce(table)
        losses, weights, weighted = table.unbind(1)
        for index in range(self.plan.total):
            if not math.isfinite(losses[index]):
                ranks = range(world_size)
                rank = next(r for r in ranks if index < slice_of(self.plan.total, world_size, r)[1])
                where = f"step {self.position.step}, rank {rank}, micro-batch {index}"
                raise NonFiniteLossError(
                    f"The loss is {float(losses[index])} at {where}.", "Nothing was updated by it."
                )
        given = int(weighted.sum())
        if given not in (0, self.plan.total):
            raise UsageError("step.backward() got a weight for some micro-batches only.", "Give it for all or none.")
        total = sum(weights.tolist())
        if total <= 0:
            raise UsageError(f"The weights of step {self.position.step} sum up to {total:g}.", "Give positive ones.")
        self.loss = sum((losses * weights).tolist()) / total
        return self._samples / total if given else None
