"""Evaluations between a training's steps: when they are due, what they measure, and what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elastic_launch.errors import UsageError
from elastic_launch.training.callbacks import Evaluation
from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.data.loader import Loader, check_loader, epochs_of
from elastic_launch.training.durations import ENDLESS, Interval
from elastic_launch.training.gradients.buffer_rules import buffers_of, tensors_of
from elastic_launch.training.gradients.means import MeanTable
from elastic_launch.training.randomness import derive, seeded
from elastic_launch.training.ranks.same_arguments import check_same
from elastic_launch.training.ranks.world import World
from elastic_launch.training.wrapped import sharding_modules, whole

if TYPE_CHECKING:
    from elastic_launch.training.engine import Engine

Measure = Callable[[Any], tuple[list[Tensor | float], float | None]]
"""``(micro_batch) -> (values, weight)``: the values to average, and their weight (None: the number of samples)."""


class Evaluations:
    """The evaluations of one training, which are a part of its state.

    The loop asks after each step whether one is due. All ranks then do it before the step's boundary, so the saved
    state contains it.

    Args:
        every: interval between two evaluations; None: none is due.
        measure: evaluates the present state; called by all ranks.
        report: called once with each evaluation, on all ranks.
    """

    def __init__(
        self, every: Interval | None, measure: Callable[[], dict[str, float]], report: Callable[[Evaluation], None]
    ) -> None:
        self.history: list[Evaluation] = []  # all evaluations so far
        self.running = False  # whether one is being done between two steps
        self.every = every
        self._measure = measure
        self._report = report
        self._last = time.monotonic()
        self._asked = False
        self._agreed: int | None = None  # the step after which all ranks evaluate because of a clock

    @property
    def _evaluated(self) -> int:
        return self.history[-1].step if self.history else 0

    def due(self, step: int, *, end: bool) -> bool:
        """Whether the state after a step lacks its evaluation."""
        if self.every is None or step <= self._evaluated:
            return False
        return end or step == self._agreed or (self.every.steps is not None and step % self.every.steps == 0)

    def wanted(self) -> bool:
        """Whether an evaluation is due by this rank's clock; True once for each."""
        if self.every is None or self.every.seconds is None or self._asked:
            return False
        self._asked = time.monotonic() - self._last >= self.every.seconds
        return self._asked

    def agree(self, step: int) -> None:
        """Record that all ranks agreed on an evaluation after a step."""
        self._agreed = step

    def begin_round(self, step: int | None) -> None:
        """Take over what the ranks of a new round agreed on; a wish of a former one may not have reached all of them.

        Args:
            step: the step that all evaluate; None: none.
        """
        self._asked, self._agreed = False, step

    def evaluate(
        self,
        step: int,
        epoch: int,
        checkpoint: CheckpointManager | None,
        within: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        """Evaluate the state after a step; called by all ranks.

        A rank whose state has this evaluation already only takes part in it.

        Args:
            within: the context of the measurement; what the script does with its results follows.
        """
        self.running = True
        try:
            with within:
                metrics = self._measure()
        finally:
            self.running = False
        self._asked = False
        self._last = time.monotonic()
        if checkpoint is not None:
            checkpoint.record(metrics, step)  # on all ranks, since they save after this step
        if step > self._evaluated:
            self.history.append(Evaluation(step, epoch, metrics))
            self._report(self.history[-1])

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"history": [asdict(x) for x in self.history]}
        if self.every is not None and self.every.seconds is not None:
            state["age"] = time.monotonic() - self._last  # so that frequent faults do not postpone the next one
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history[:] = [Evaluation(**x) for x in state["history"]]
        self._last = time.monotonic() - state.get("age", 0.0)


class Evaluator:
    """Evaluates the training of a loop over steps: at intervals, and at its end.

    Each rank evaluates its share of the data between two steps. The results are the same on all ranks, and a part of
    the training's state.

    ::

        def measure(batch):
            output = model(batch["x"])
            return {"loss": loss_fn(output, batch["y"]), "accuracy": accuracy(output, batch["y"])}

        evaluator = el.Evaluator(held_out, measure, metrics=["loss", "accuracy"], every="500ba")
        for step in run.steps(loader, model, optimizer, until="3ep", evaluator=evaluator):
            ...

    Args:
        loader: loads the evaluation data; an evaluation is an epoch of it.
        measure: ``(micro_batch) -> means by name``: means over a collated micro-batch, each a number or a tensor with
            one element. It is called without gradients, with the models in evaluation mode.
        metrics: the names of these means.
        every: interval between evaluations: epochs (1 or ``"1ep"``), steps (``"100ba"``) or a duration (``"10min"``).
            The end of training is always evaluated.
        weight_fn: ``(micro_batch) -> float``, its weight in the means; None: its number of samples.
        within: makes the context in which each evaluation is done, such as ``lambda: run.swapped(average)``.
        on_result: called once with each :class:`Evaluation`, on all ranks, before the state is saved: here a
            ``ReduceLROnPlateau`` is stepped. It must not exchange data with other ranks.

    Attributes:
        history: all evaluations so far, including those before a restart.

    Raises:
        UsageError: if an argument is invalid.
    """

    def __init__(
        self,
        loader: Loader,
        measure: Callable[[Any], Mapping[str, Tensor | float]],
        *,
        metrics: Sequence[str] = ("loss",),
        every: int | str = "1ep",
        weight_fn: Callable[[Any], float] | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        on_result: Callable[[Evaluation], None] = lambda evaluation: None,
    ) -> None:
        self.loader = checked_eval_loader("Evaluator(loader=...)", loader)
        loader.batch.micro_batches()
        if isinstance(metrics, str) or not metrics:
            raise UsageError(
                f"Evaluator(metrics={metrics!r}): it must be a list of one name or more.",
                'Give a list of names: ["loss"].',
            )
        self.metrics = tuple(metrics)
        self.history: list[Evaluation] = []
        self._measure = measure
        self._every = every
        self._weight_fn = weight_fn
        self._on_result = on_result
        self._within = within

    def _values(self, sample: Any) -> tuple[list[Tensor | float], float | None]:
        means = self._measure(sample)
        if not isinstance(means, Mapping) or means.keys() != set(self.metrics):
            given = sorted(means) if isinstance(means, Mapping) else type(means).__name__
            raise UsageError(
                f"Evaluator(measure=...) returned {given}; its metrics are {list(self.metrics)}.",
                "Name them all in Evaluator(metrics=...): a rank that has no micro-batch must know them, too.",
            )
        return [means[name] for name in self.metrics], None if self._weight_fn is None else self._weight_fn(sample)


def evaluations_of(
    evaluator: Evaluator, engine: Engine, steps_per_epoch: int, checkpoint: Checkpoint | None, *, exact: bool
) -> Evaluations:
    """Return the evaluations of a training that begins."""
    loader, metrics = evaluator.loader, evaluator.metrics
    if exact:
        epochs_of(loader).check_exact()
    best = None if checkpoint is None else checkpoint.keep_best
    if best is not None and best.metric not in metrics:
        has = ", ".join(metrics)
        raise UsageError(
            f"Checkpoint(keep_best={best}): the evaluator has no such metric, it has {has}.",
            "Add the metric to Evaluator(metrics=...), or name another.",
        )

    def measure() -> dict[str, float]:
        check, together = engine.rounds.check_over, engine.sharded
        with evaluator._within():
            return evaluated(engine.world, loader, metrics, evaluator._values, check, together=together)

    evaluations = Evaluations(Interval.in_training(evaluator._every, steps_per_epoch), measure, evaluator._on_result)
    evaluator.history = evaluations.history
    return evaluations


def evaluated(
    world: World,
    loader: Loader,
    metrics: Sequence[str],
    measure: Measure,
    check: Callable[[], None],
    *,
    together: bool,
) -> dict[str, float]:
    """Return the means of metrics over all samples of one epoch, the same at every world size; called by all ranks.

    Args:
        measure: called for each micro-batch under ``no_grad``, with a random state derived from the loader's seed and
            the micro-batch.
        check: called before each micro-batch; may raise an error that ends the evaluation.
        together: whether all ranks call ``measure`` equally often, since a sharded model needs all of them; the results
            of further calls are not used.
    """
    epochs = epochs_of(loader).evaluated()
    epochs.check_lengths()
    check_same(world, {**epochs.identity, "metrics": list(metrics)})
    steps, size, place = loader.steps_per_epoch, world.data_size, world.data_rank
    # All global batches but the last have as many micro-batches as the first.
    each, last = (epochs.plan(step, size, place).total for step in (0, steps - 1))
    measured: list[tuple[int, list[Tensor | float], float, float | None]] = []
    latest: list[Any] = []
    with torch.no_grad(), closing(epochs.epoch_from(0, size, place)) as batches:
        for step in range(steps):
            plan = epochs.plan(step, size, place)
            for micro in plan.micro_batches:
                check()
                latest = [next(batches)]
                with seeded(derive("evaluation", loader.seed, step, micro.index), devices=True):
                    found, weight = measure(latest[0])
                values = [whole(value) if isinstance(value, Tensor) else value for value in found]
                measured.append((step * each + micro.index, values, float(len(micro)), weight))
            for _ in range(plan.grad_accum, -(-plan.total // size) if together else 0):
                latest = latest or [epochs.spare(step)]
                with seeded(0, devices=True):
                    measure(latest[0])
    table = MeanTable((steps - 1) * each + last, len(metrics))
    for row, values, samples, weight in measured if world.speaks else ():
        table.fill(row, values, samples, weight)
    table.post(world.world_size)
    table.wait()
    return dict(zip(metrics, table.means(loader.length, "evaluation").values, strict=True))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; on exit, restore the mode of each of its modules.

    By ``train()``, since a module may do more in it than set the mode: a LoRA layer merges its weights in evaluation
    mode, and separates them again.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
            module.training = mode  # its train() may set another one
        for sharded in sharding_modules(model):
            sharded.reshard()


def works_in_train(model: nn.Module) -> bool:
    """Whether a change of the model's mode may change its weights: a module has a ``train()`` of its own."""
    return any("train" in vars(each) or type(each).train is not nn.Module.train for each in model.modules())


@contextmanager
def keeping_buffers(model: nn.Module, rules: Mapping[str, str]) -> Iterator[None]:
    """On exit, put back the values of a model's buffers that are saved, unless their rule is to ignore them.

    Modules such as torch's FakeQuantize change theirs in evaluation, too, by what this rank evaluates.
    """
    saved = [each for each in buffers_of(model, rules) if each.saved and each.rule != "ignore"]
    before = [(each, *_state_of(each.tensor)) for each in saved]
    try:
        yield
    finally:
        for buffer, version, value in before:
            for module, name in buffer.homes:
                if (tensors := tensors_of(module, name))[name] is not buffer.tensor:
                    tensors[name] = buffer.tensor
            if version is None or buffer.tensor._version != version:
                with torch.no_grad():
                    buffer.tensor.copy_(value)


def _state_of(tensor: Tensor) -> tuple[int | None, Tensor]:
    """Return a tensor's version, None if it has none, and a copy of it."""
    return None if tensor.is_inference() else tensor._version, tensor.detach().clone()


def checked_eval_loader(where: str, loader: Loader) -> Loader:
    """Return a loader of evaluation data; refuse anything else, one without an end, and one that has one place."""
    check_loader(where, loader)
    if loader.steps_per_epoch == ENDLESS:
        raise UsageError(f"{where} has no end.", "Give FunctionLoader(steps_per_epoch=...): an evaluation is an epoch.")
    if epochs_of(loader).bound:
        raise UsageError(
            f"{where}: a loader that was made for one rank has one place, which is that of a training.",
            "Give el.StatefulLoader a function (shard, shards) -> loader; or give an el.ElasticLoader.",
        )
    return loader
