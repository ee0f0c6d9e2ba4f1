"""The step of a training, as a script sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from elastic_launch.batch import BatchPlan
from elastic_launch.training.data.epochs import Position
from elastic_launch.training.transaction import Transaction


class Step:
    """One optimizer step. Iterating over it yields this rank's micro-batches.

    ::

        for step in run.steps(loader, model, optimizer, until="3ep"):
            for x, y in step:
                step.backward(loss_fn(step.model(x), y))
            step.update()
    """

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    @property
    def position(self) -> Position:
        """The step's place in the training."""
        return self._transaction.position

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return self._transaction.number

    @property
    def plan(self) -> BatchPlan:
        """This rank's share of the global batch."""
        return self._transaction.share.plan

    @property
    def samples(self) -> int:
        """Number of samples in the step's global batch."""
        return self._transaction.samples

    @property
    def model(self) -> Any:
        """What the forward pass calls; with several models, ``step.model[name]``."""
        return self._transaction.model

    @property
    def loss(self) -> float:
        """Mean loss over the global batch in the last updated pass, equal on all ranks; NaN before :meth:`update`."""
        return self._transaction.loss

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics passed to :meth:`backward`, by name, over the same pass; empty before :meth:`update`."""
        return self._transaction.metrics

    @property
    def updated(self) -> bool:
        """Whether an optimizer has stepped and no pass has begun since."""
        return self._transaction.updated

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not step, since gradients overflowed (the scaler saw it) or all weights are 0."""
        return self._transaction.skipped

    @property
    def repeated(self) -> bool:
        """Whether this process has done the step before, or, after :meth:`update`, will do it again.

        On GPUs a fault takes the processes that go on back to the last snapshot in memory. They do the steps since then
        once more. The step that the fault has interrupted changes nothing, and is repeated, too. Where a script counts
        or logs steps, ``if not step.repeated`` does it once for each.
        """
        return self._transaction.repeated

    @property
    def checking(self) -> bool:
        """Whether the current micro-batch is given once more, with ``verify=True``; its results do not count."""
        return self._transaction.checking

    @property
    def clipped_norm(self) -> Tensor | None:
        """2-norm of the gradients before clipping, as a tensor with one element.

        None: they were not clipped by this rank.
        """
        return self._transaction.clipped_norm

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's collated micro-batches.

        Raises:
            UsageError: if the last pass has not ended with :meth:`update`; if the step has one optimizer and was
                iterated over already; or if a micro-batch ended without :meth:`backward`.
        """
        return self._transaction.micro_batches()

    def backward(
        self, loss: Tensor, weight: float | None = None, metrics: Mapping[str, Tensor | float] | None = None
    ) -> None:
        """Run the backward pass of the current micro-batch. Call it once for each.

        Args:
            loss: mean loss over the micro-batch, or over what ``weight`` counts in it; a tensor with one element.
            weight: weight of the micro-batch in the mean over the global batch, for example its number of tokens; None:
                its number of samples. Give it for all micro-batches of a step, or for none. With a weight of 0 the
                micro-batch counts as if its loss, its metrics and all its gradients were 0, even if they are NaN.
            metrics: further means over the micro-batch, each a number or a tensor with one element, by the names given
                to ``run.steps(metrics=...)``.

        Raises:
            UsageError: if ``loss`` or a metric has more than one element, ``loss`` does not require a gradient, the
                metrics have other names, no micro-batch is waiting for its backward pass, or a backward pass that the
                script has run itself has left a gradient.
        """
        self._transaction.backward(loss, weight, metrics or {})

    def update(self, clip_norm: float | None = None, *, optimizer: str | None = None) -> None:
        """Step the optimizer. Call it once, after the loop over the step.

        When that loop has ended, ``.grad`` holds the gradients of the global batch on all ranks. If all weights of the
        global batch are 0, nothing changes, and :attr:`skipped` is set.

        Args:
            clip_norm: maximum 2-norm of all gradients together; None: no clipping. With several optimizers, the norm is
                taken over the parameters of those that step.
            optimizer: with several optimizers, the name of the one to step; None: all of them.

        Raises:
            UsageError: if that loop has not ended, only some micro-batches have a weight, or no optimizer has the name.
            NonFiniteLossError: on all ranks, if a loss on any rank is NaN or infinite; nothing has changed then.
        """
        self._transaction.update(clip_norm, optimizer)

    def gradients(self, optimizer: str | None = None) -> dict[str, Tensor]:
        """Return the gradients of the global batch by parameter name; between the loop over the step and its update.

        They are the same on all ranks, and not scaled, also with a scaler. Changes in place take effect in
        :meth:`update`; make the same ones on all ranks. The names are those of ``model.named_parameters()``; a
        parameter that only an optimizer has is named by its place there. Parameters without a gradient are left out.
        The result is empty if other ranks have done this pass, and this one only receives its result.

        Args:
            optimizer: with several optimizers, the name of the one whose gradients to return; None: those of all.

        Raises:
            UsageError: if the loop over the step has not ended, the update is done, no optimizer has this name, or none
                of several is named and there is a scaler.
        """
        return self._transaction.gradients(optimizer)

    def grad_norm(self, optimizer: str | None = None) -> float:
        """Return the 2-norm of all :meth:`gradients` together: what ``update(clip_norm=...)`` limits.

        It is NaN if other ranks have done this pass, and this one only receives its result.

        Args:
            optimizer: as for :meth:`gradients`.

        Raises:
            UsageError: as :meth:`gradients`.
        """
        return self._transaction.grad_norm(optimizer)
