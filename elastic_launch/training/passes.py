"""One pass over a step's micro-batches: what this rank has of it, and its exchange with all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastic_launch.batch import BatchPlan, slice_of
from elastic_launch.errors import UsageError
from elastic_launch.training.engine import Engine
from elastic_launch.training.gradients.accumulation import Gradients
from elastic_launch.training.gradients.means import Means, MeanTable
from elastic_launch.training.verifying import Verifier


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank does of a step, in the current round."""

    plan: BatchPlan
    batches: Iterator[Any]  # its micro-batches
    gradients: Gradients
    verifier: Verifier | None = None  # of its steps, if some are verified


class Pass:
    """A pass: the losses and metrics of this rank's micro-batches, then their means over all ranks.

    Args:
        metrics: how many values there are besides the loss.

    Attributes:
        current: this rank's micro-batch that waits for its backward pass, by its place; None: none does.
        out_of_memory: whether this rank gives the pass up.
        too_large: after the exchange, whether any rank does.
        exchanged: whether all ranks have the losses and gradients.
        means: the result; None before it, and if a rank gives the pass up.
        told: whether other ranks, or the sums, have a part of a backward pass that failed.
        broken: the error by which an exchange within a backward pass failed.
    """

    def __init__(self, share: Share, metrics: int) -> None:
        self.current: int | None = None
        self.out_of_memory = self.too_large = self.exchanged = self.told = False
        self.means: Means | None = None
        self.broken: RuntimeError | None = None
        self._share = share
        self._columns = 1 + metrics
        self._rows: list[tuple[Tensor, list[float | Tensor], float | None]] = []  # loss, metrics, weight
        self._table: MeanTable | None = None

    @property
    def done(self) -> int:
        """Number of micro-batches whose backward pass was begun and has not failed."""
        return len(self._rows)

    def loss_of(self, number: int) -> Tensor:
        """Return the loss of this rank's number-th micro-batch."""
        return self._rows[number][0]

    def add(self, loss: Tensor, weight: float | None, metrics: list[float | Tensor]) -> None:
        """Add the current micro-batch, before its backward pass."""
        self._rows.append((loss if loss.dim() == 0 else loss.reshape(()), metrics, weight))

    def fail(self) -> None:
        """The backward pass of the current micro-batch has failed: it is not done."""
        self._rows.pop()
        self.told = self._table is not None or self._share.gradients.took

    def clear(self) -> None:
        """Give the pass up, since this rank has no memory for a micro-batch."""
        self.out_of_memory = True
        self._rows.clear()
        self._share.gradients.discard()

    def abandon(self) -> None:
        """Drop what was posted: the round is over."""
        if self._table is not None:
            self._table.give_up()

    def post(self, engine: Engine) -> MeanTable:
        """Start sending the losses and metrics of this rank's micro-batches to all ranks, once."""
        if self._table is None:
            plan, gradients = self._share.plan, self._share.gradients
            self._table = table = MeanTable(
                plan.total,
                self._columns,
                engine.agreement.leave(),
                signature=gradients.parameters.signature,
                marked=self.out_of_memory,
                whole=gradients.whole,
            )
            mine = self._rows if gradients.speaks else []
            rows = zip(plan.micro_batches, plan.weights, mine, strict=False)
            for micro, share, (loss, metrics, weight) in rows:
                table.fill(micro.index, [loss, *metrics], share, weight)
            gradients.post(table)
        return self._table

    def exchange(self, engine: Engine, samples: int, where: str) -> None:
        """Exchange losses and gradients with all ranks.

        Args:
            samples: number of samples in the global batch.
            where: names the step in errors.
        """
        gradients = self._share.gradients
        if self._table is None and not gradients.on_cpu:
            # Keeps the order of ranks whose backward passes have already sent something.
            gradients.send()
        table = self.post(engine)
        gradients.wait(table)
        engine.agreement.arrive(table.carried)
        if table.marked:
            self.too_large = True
            gradients.discard()
            return
        self.exchanged = True
        if not gradients.agreed(table):
            gradients.disagree(where)
        gradients.finish(table.any_whole)
        engine.rounds.confirm(gradients.gpus)
        try:
            self.means = table.means(samples, where)
        except UsageError:
            gradients.discard()
            raise
        if self.means.correction != 1:
            gradients.multiply(self.means.correction)

    def not_finite(self) -> tuple[int, float, int] | None:
        """Return the first micro-batch whose loss is not finite, that loss, and the rank that has computed it."""
        assert self._table is not None
        if (found := self._table.not_finite()) is None:
            return None
        index, loss = found
        total, peers = self._share.plan.total, self._share.gradients.peers
        place = next(place for place in range(peers.size) if index < slice_of(total, peers.size, place)[1])
        return index, loss, peers.rank(place)
