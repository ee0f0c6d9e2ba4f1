"""``Trainer``: a complete training loop, for scripts that do not need their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch import snapshot
from elastic_launch.batch import GlobalBatch
from elastic_launch.errors import UsageError
from elastic_launch.training.callbacks import Callback, CheckpointEnd, Evaluation, Incident, RoundStart, StepEnd
from elastic_launch.training.checkpoints.checkpoint import Checkpoint, check_checkpoint
from elastic_launch.training.checkpoints.state import Stateful
from elastic_launch.training.data.evaluation import evaluate, evaluating
from elastic_launch.training.data.loader import Loader, check_loader
from elastic_launch.training.durations import total_steps
from elastic_launch.training.gradients.buffer_rules import checked_rules
from elastic_launch.training.kinds import check_kind
from elastic_launch.training.live.rehearsal import unchanged
from elastic_launch.training.loop import Loop, LoopOptions
from elastic_launch.training.precision import Precision, is_out_of_memory
from elastic_launch.training.ranks.same_arguments import check_same
from elastic_launch.training.session import Run
from elastic_launch.training.steps import RoundOverError, Step
from elastic_launch.training.together import as_part

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)

_SEVERAL = "several are trained together by run.steps()."

Measure = Callable[[Any, Any], Tensor]
"""``(output, target) -> scalar``: a mean over the micro-batch, as a tensor with one element."""

Forward = Callable[[Callable[..., Any], Any], tuple[Any, Any]]
"""``(model, micro_batch) -> (output, target)``; the micro-batch is collated and on the device."""


class Trainer:
    """Trains a model, and resumes where the last round of the run stopped.

    Every checkpoint holds the trainer's whole state: model, optimizer, scheduler, the fp16 gradient scaler, the
    micro-batch size found by ``micro="auto"``, and the evaluations so far.

    Args:
        run: the :class:`Run` of the current ``session()``.
        model: an unwrapped module on ``run.device``. The trainer leaves each of its modules in the mode, training or
            evaluation, that it is in.
        optimizer: the optimizer of the model's parameters.
        loader: loads the training data. With ``GlobalBatch(size, micro="auto")``, the first micro-batch size gives each
            rank one micro-batch; it is halved on all ranks whenever one of them runs out of memory. The step in which
            that happens is repeated, so the size of the global batch does not change.
        loss_fn: ``(output, target) -> scalar``, the mean loss over a micro-batch.
        scheduler: stepped after every optimizer step; a ``ReduceLROnPlateau`` is stepped after every evaluation, with
            its loss.
        precision: ``fp32``, ``bf16`` or ``fp16``. With ``bf16`` and ``fp16``, forward pass and loss run under autocast;
            ``fp16`` also scales the loss.
        clip_norm: maximum 2-norm of all gradients together, above 0; None: no clipping.
        eval_loader: loads the evaluation data; each rank evaluates its share of every global batch.
        eval_every: interval between evaluations: epochs (1 or ``"1ep"``) or steps (``"100ba"``). The end of training
            is always evaluated.
        metrics: further values to average besides the loss, in training and evaluation: ``(output, target) -> scalar``
            by name.
        weight_fn: ``(micro_batch) -> float``, the weight of a collated micro-batch in the means, for example its number
            of tokens; None: its number of samples.
        forward: ``(model, micro_batch) -> (output, target)``; needed if micro-batches are not ``(input, target)``
            pairs.
        checkpoint: where to save to and resume from.
        exact: whether the weights must be bitwise equal at every world size.
        buffers: rules for buffers that micro-batches change; see :meth:`elastic_launch.Run.steps`.
        callbacks: :class:`Callback` objects that receive the training's progress.

    Attributes:
        step: optimizer steps done.
        loss, metrics: of the last step; None and empty before the first.
        history: all evaluations so far, including those before a restart.

    Raises:
        UsageError: if an argument is invalid; the message names it.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        *,
        loss_fn: Measure,
        scheduler: Stateful | None = None,
        precision: str = "fp32",
        clip_norm: float | None = None,
        eval_loader: Loader | None = None,
        eval_every: int | str = "1ep",
        metrics: Mapping[str, Measure] | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        forward: Forward | None = None,
        checkpoint: Checkpoint | None = None,
        exact: bool = False,
        buffers: Mapping[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_kind("Trainer(run=...)", run, Run, "Give what `with el.session() as run:` gives.")
        check_kind("Trainer(model=...)", model, nn.Module, f"Give a torch.nn.Module; {_SEVERAL}")
        check_kind("Trainer(optimizer=...)", optimizer, torch.optim.Optimizer, f"Give one of torch.optim; {_SEVERAL}")
        check_loader("Trainer(loader=...)", loader)
        if checkpoint is not None:
            check_checkpoint("Trainer(checkpoint=...)", checkpoint)
        self.run = run
        self.model = model
        self.loader = loader
        self.step = 0
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.history: list[Evaluation] = []
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._scheduler = as_part("Trainer(scheduler=...)", scheduler)
        self._precision = Precision(precision, run.device)
        self._clip_norm = _positive("clip_norm", clip_norm)
        self._eval_loader = _checked_eval_loader(eval_loader) if eval_loader is not None else None
        if exact and self._eval_loader is not None:
            self._eval_loader.check_exact()
        steps = loader.steps_per_epoch
        self._eval_every = max(1, total_steps(eval_every, steps)) if eval_loader is not None else 0
        if metrics is not None:
            check_kind("Trainer(metrics=...)", metrics, Mapping, 'Give functions by name: {"accuracy": accuracy}.')
        self._metrics = dict(metrics or {})
        if "loss" in self._metrics:
            raise UsageError("metrics: the name 'loss' is the loss function's.", "Choose another.")
        best = None if checkpoint is None else checkpoint.keep_best
        if best is not None and (eval_loader is None or best.metric not in ("loss", *self._metrics)):
            has = "it has no eval_loader" if eval_loader is None else f"it has {', '.join(['loss', *self._metrics])}"
            raise UsageError(f"Checkpoint(keep_best={best}): the trainer evaluates no such metric, {has}.", "Add it.")
        self._weight_fn = weight_fn
        self._forward = forward or _forward_pair
        self._checkpoint = checkpoint
        self._exact = exact
        self._buffers = checked_rules(buffers)
        self._finds_micro = loader.batch.micro == "auto"
        check_kind("Trainer(callbacks=...)", callbacks, Sequence, "Give a list of them.")
        for callback in callbacks:
            check_kind("Trainer(callbacks=...): one of them", callback, Callback, "Give objects of el.Callback.")
        self._callbacks = list(callbacks)
        self._begun = False
        self._evaluated = 0  # the last step whose evaluation is done
        self._leaves = False  # whether an evaluation is left if the round ends

    def fit(self, until: int | str) -> None:
        """Train until the whole training has the given length, earlier rounds and earlier calls included.

        Args:
            until: total length: epochs (3 or ``"3ep"``) or steps (``"1000ba"``).

        Raises:
            UsageError: if ``until`` is not a valid length, or the checkpoint belongs to another training.
            NonFiniteLossError: on all ranks, if a loss is NaN or infinite.
            MemoryError: if a micro-batch of one sample does not fit.
        """
        with self.run._engine.saver.telling(self._on_checkpoint):
            self._fit(until)

    def _fit(self, until: int | str) -> None:
        for step in self._loop(until):
            started = time.monotonic()
            self._work(step)
            step.update(self._clip_norm)
            if step.too_large:
                self._tell_incident("out of memory", f"a micro-batch of {self.loader.batch.micro} samples")
                continue
            self.step, self.loss, self.metrics = step.number, step.loss, step.metrics
            if self._scheduler is not None and not self._by_plateau and not step.skipped:
                self._scheduler.step()  # type: ignore[attr-defined]
            self._tell_step(step, time.monotonic() - started)

    def evaluate(self, loader: Loader | None = None) -> dict[str, float]:
        """Return loss and metrics, averaged over all samples of the evaluation data. Call it on all ranks.

        Args:
            loader: loads the evaluation data; None: the trainer's ``eval_loader``.

        Returns:
            The means by name: ``"loss"`` and each metric.

        Raises:
            UsageError: if no loader was given and the trainer has no ``eval_loader``.
        """
        loader = self._eval_loader if loader is None else _checked_eval_loader(loader)
        if loader is None:
            raise UsageError("Trainer.evaluate() has no data.", "Give it a loader, or the trainer an eval_loader.")
        names, given = ["loss", *self._metrics], loader.batch
        if given.micro == "auto":
            micro = self.loader.batch.settled(self.run.world_size).micro_batches()[0]
            loader.batch = GlobalBatch(given.size, min(given.size, len(micro)))
        try:
            check_same(self.run.world, {**loader.identity, "metrics": list(self._metrics)})
            with evaluating(self.model):
                world_size, rank = self.run.world_size, self.run.rank
                means = evaluate(loader, self._measure_sample, len(names), world_size, rank, self._check_round)
        finally:
            loader.batch = given  # the training's micro-batches may become smaller, on all ranks
        return dict(zip(names, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's own state; model, optimizer and other parts are saved separately."""
        history = [{"step": x.step, "epoch": x.epoch, "metrics": dict(x.metrics)} for x in self.history]
        evaluated = {"history": history, "evaluated": self._evaluated}
        return {**evaluated, "loss": self.loss, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        self.history = [Evaluation(x["step"], x["epoch"], dict(x["metrics"])) for x in state["history"]]
        last = self.history[-1].step if self.history else 0  # checkpoints were made without "evaluated" once
        self._evaluated = state.get("evaluated", last)
        self.loss, self.metrics = state["loss"], dict(state["metrics"])

    def _loop(self, until: int | str) -> Loop:
        parts: dict[str, Stateful | None] = {
            "trainer": self,
            "scheduler": self._scheduler,
            "scaler": self._precision.scaler,
        }
        options = LoopOptions(
            exact=self._exact,
            buffers=self._buffers,
            parts={name: part for name, part in parts.items() if part is not None},
            scaler=self._precision.scaler,
            metrics=tuple(self._metrics),
            start=self.step,
            redo=self._finds_micro,
            prepare=self._begin,
            evaluations=self._evaluations(total_steps(until, self.loader.steps_per_epoch)),
            rehearse=self._rehearse,
        )
        return Loop(
            self.run._engine,
            self.loader,
            self.model,
            self._optimizer,
            until=until,
            checkpoint=self._checkpoint,
            options=options,
        )

    def _begin(self, step: int) -> None:
        self.step = step
        if self.loader.old_order and self._eval_loader is not None:
            self._eval_loader.use_old_order()
        run, batch = self.run, self.loader.batch
        start = RoundStart(
            round=run.world.round,
            world_size=run.world_size,
            rank=run.rank,
            restarts=run.restarts,
            resumed_step=step,
            micro=len(batch.micro_batches()[0]),
            grad_accum=run.grad_accum(batch),
            reason=run.start_reason,
        )
        for callback in self._callbacks:
            callback.on_round(start)
        if start.reason != "first" and not self._begun:
            self._tell_incident("restart", start.reason)
        self._begun = True

    def _work(self, step: Step) -> None:
        """Run the forward and backward passes of this rank's micro-batches; give the step up if memory runs out."""
        try:
            with closing(step.passes()) as samples:
                for sample in samples:
                    values, weight = self._measure_sample(sample, step.model)
                    loss, *metrics = values
                    assert isinstance(loss, Tensor)
                    step.backward(loss, weight, dict(zip(self._metrics, metrics, strict=True)))
        except (RuntimeError, MemoryError) as error:
            if not self._finds_micro or step.exchanged or not is_out_of_memory(error):
                raise
            _log.info("rank %d ran out of memory: %s", self.run.rank, error)
            # The traceback holds the tensors of the pass that failed.
            error.__traceback__ = None
            step.give_up()

    def _measure_sample(
        self, sample: Any, model: Callable[..., Any] | None = None
    ) -> tuple[list[Tensor | float], float | None]:
        """Return ``[loss, *metrics]`` of a micro-batch, and its weight (None: its number of samples)."""
        sample = _on_device(sample, self.run.device)
        output, target, loss = self._measure_loss(sample, model or self.model)
        with torch.no_grad():
            metrics: list[Tensor | float] = [metric(output, target) for metric in self._metrics.values()]
        return [loss, *metrics], None if self._weight_fn is None else float(self._weight_fn(sample))

    def _measure_loss(self, sample: Any, model: Callable[..., Any]) -> tuple[Any, Any, Tensor]:
        with self._precision.autocast():
            output, target = self._forward(model, sample)
            return output, target, self._loss_fn(output, target)

    def _rehearse(self, step: Step) -> None:
        functions = [getattr(each, "__self__", each) for each in (self._loss_fn, self._forward)]
        with unchanged(*functions), closing(step.passes()) as samples:
            sample = _on_device(next(samples), self.run.device)
            step.backward(self._measure_loss(sample, step.model)[-1])

    @property
    def _by_plateau(self) -> bool:
        return isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _evaluations(self, end: int) -> _Evaluations | None:
        if self._eval_loader is None:
            return None
        every = self._eval_every

        def due(step: int) -> bool:
            return step > self._evaluated and (step % every == 0 or step == end)

        def evaluate(step: int) -> None:
            self._leaves = True
            try:
                metrics = self.evaluate()
            finally:
                self._leaves = False
            if self._checkpoint is not None:
                self._checkpoint.record(metrics, step)  # on all ranks, since they save after this step
            if due(step):
                self._evaluated = step
                self._tell_evaluation(Evaluation(step, self.loader.position(step).epoch, metrics))

        return _Evaluations(due, evaluate)

    def _check_round(self) -> None:
        if self._leaves and self.run._engine.is_over:
            raise RoundOverError("the round is over")

    def _tell_evaluation(self, evaluation: Evaluation) -> None:
        self.history.append(evaluation)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(evaluation.metrics["loss"])
        for callback in self._callbacks:
            callback.on_evaluation(evaluation)

    def _tell_step(self, step: Step, seconds: float) -> None:
        end = StepEnd(step.number, step.position.epoch, step.samples, step.loss, step.metrics, seconds)
        for callback in self._callbacks:
            callback.on_step(end)

    def _tell_incident(self, kind: str, cause: str) -> None:
        for callback in self._callbacks:
            callback.on_incident(Incident(kind, self.step, cause))

    def _on_checkpoint(self, outcome: snapshot.WriteOutcome) -> None:
        path = None if outcome.info is None else outcome.info.path
        for callback in self._callbacks:
            callback.on_checkpoint(CheckpointEnd(outcome.step, outcome.seconds, path, outcome.error))
        if outcome.error is not None:
            self._tell_incident("checkpoint", str(outcome.error))


@dataclass(frozen=True, slots=True)
class _Evaluations:
    """The evaluations of a training, see :class:`elastic_launch.training.loop.Evaluations`."""

    due: Callable[[int], bool]
    evaluate: Callable[[int], None]


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise UsageError(f"{name}={value:g} is not above 0.", "Leave it out to have none.")
    return value


def _checked_eval_loader(loader: Loader) -> Loader:
    check_loader("Trainer(eval_loader=...)", loader)
    if loader.endless:
        raise UsageError(
            "Trainer(eval_loader=...) has no end.",
            "Give FunctionLoader(steps_per_epoch=...): an evaluation is an epoch.",
        )
    return loader


def _forward_pair(model: Callable[..., Any], sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise UsageError(
            f"Trainer: a micro-batch is a {type(sample).__name__}, not a pair of input and target.",
            "Give Trainer(forward=...), which takes the model and the micro-batch and returns output and target.",
        )
    return model(sample[0]), sample[1]


def _on_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in a collated micro-batch to a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_on_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_on_device(item, device) for item in value)
    return value
