"""Evaluation over data divided among the ranks, with the same result at every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.training.data.loader import Loader
from elastic_launch.training.gradients.means import MeanTable
from elastic_launch.training.randomness import derive, seeded
from elastic_launch.training.wrapped import sharding_modules

Measure = Callable[[Any], tuple[list[Tensor | float], float | None]]
"""``(micro_batch) -> (values, weight)``: the values to average, and their weight (None: the number of samples)."""


def evaluate(
    loader: Loader,
    measure: Measure,
    columns: int,
    world_size: int,
    rank: int,
    check: Callable[[], None] = lambda: None,
    *,
    together: bool = False,
) -> list[float]:
    """Return the means of the measured values over all samples of one epoch; called by all ranks.

    Args:
        measure: called for each micro-batch under ``no_grad``, with a random state derived from the loader's seed and
            the micro-batch.
        columns: number of values that ``measure`` returns.
        check: called before each micro-batch; may raise an error that ends the evaluation.
        together: whether all ranks call ``measure`` equally often, since a sharded model needs all of them; the results
            of further calls are not used.
    """
    steps = loader.steps_per_epoch
    # All global batches but the last have as many micro-batches as the first.
    each, last = (loader._plan(step, world_size, rank).total for step in (0, steps - 1))
    measured: list[tuple[int, list[Tensor | float], float, float | None]] = []
    latest: list[Any] = []
    with torch.no_grad(), closing(loader._epoch_from(0, world_size, rank)) as batches:
        for step in range(steps):
            plan = loader._plan(step, world_size, rank)
            for micro in plan.micro_batches:
                check()
                latest = [next(batches)]
                with seeded(derive("evaluation", loader.seed, step, micro.index), devices=True):
                    values, weight = measure(latest[0])
                measured.append((step * each + micro.index, values, float(len(micro)), weight))
            for _ in range(plan.grad_accum, -(-plan.total // world_size) if together else 0):
                latest = latest or [loader._spare(step)]
                with seeded(0, devices=True):
                    measure(latest[0])
    table = MeanTable((steps - 1) * each + last, columns)
    for place, values, samples, weight in measured:
        table.fill(place, values, samples, weight)
    table.post(world_size)
    table.wait()
    return table.means(loader.length, "evaluation").values


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; on exit, restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for sharded in sharding_modules(model):
            sharded.reshard()
