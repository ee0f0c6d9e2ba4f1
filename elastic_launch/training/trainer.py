"""``Trainer``: a complete training loop, for scripts that do not need their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch import snapshot
from elastic_launch.batch import GlobalBatch, settled
from elastic_launch.errors import UsageError
from elastic_launch.training.callbacks import Callback, CheckpointEnd, Evaluation, Incident, RoundStart, StepEnd
from elastic_launch.training.checkpoints.checkpoint import Checkpoint, check_checkpoint
from elastic_launch.training.checkpoints.parts import Stateful
from elastic_launch.training.data.loader import Loader, check_loader, epochs_of
from elastic_launch.training.deepspeed import DeepSpeed, EngineGradients
from elastic_launch.training.deepspeed_config import checked, clip_norm_of, completed, precision_of
from elastic_launch.training.durations import Interval
from elastic_launch.training.evaluations import (
    Evaluations,
    checked_eval_loader,
    evaluated,
    evaluating,
    keeping_buffers,
)
from elastic_launch.training.gradients.buffer_rules import checked_rules
from elastic_launch.training.kinds import check_function, check_kind, found
from elastic_launch.training.live.rehearsal import unchanged
from elastic_launch.training.loop import Loop
from elastic_launch.training.loop_options import LoopOptions
from elastic_launch.training.schedule import Schedule, Schedules
from elastic_launch.training.session import Run, engine_of
from elastic_launch.training.steps import Step
from elastic_launch.training.transaction import Transaction
from elastic_launch.training.verification import share_of
from elastic_launch.training.wrapped import sharding_modules

_log = logging.getLogger(__name__)

_SEVERAL = "several are trained together by run.steps()."

Measure = Callable[[Any, Any], Tensor]
"""``(output, target) -> scalar``: a mean over the micro-batch, as a tensor with one element."""

Forward = Callable[[Callable[..., Any], Any], tuple[Any, Any]]
"""``(model, micro_batch) -> (output, target)``; the micro-batch is collated and on the device."""

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a model, and resumes where the last round of the run stopped.

    Every checkpoint holds the trainer's whole state: model, optimizer, scheduler, the fp16 gradient scaler, the
    micro-batch size found by ``micro="auto"``, and the evaluations so far.

    In a process that is started while others train, ``fit`` rehearses before it waits for its place, so that what
    ``torch.compile`` compiles in its first pass is compiled by then: it does the forward and backward pass of one
    micro-batch. Parameters, optimizer, random numbers, gradients, buffers, modes, hooks and other attributes of the
    model's modules (also tensors, lists, dicts and sets in them) are as before afterwards. Callbacks and metrics are
    not called. The dataset, ``forward`` and ``loss_fn`` are called once more, with the first micro-batch of the
    training. An error ends the rehearsal with a warning. With ``micro="auto"`` there is none.

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
            its loss. A :class:`Schedule` steps it at other times, or with another metric. Several are given as a dict.
        precision: ``fp32``, ``bf16`` or ``fp16``; None: that of ``deepspeed_config``, else ``fp32``. With ``bf16`` and
            ``fp16``, forward pass and loss run under autocast; ``fp16`` also scales the loss.
        clip_norm: maximum 2-norm of all gradients together, above 0; None: no clipping. ``math.inf`` measures the norm
            for callbacks and clips nothing.
        eval_loader: loads the evaluation data; each rank evaluates its share of every global batch.
        eval_every: interval between evaluations: epochs (1 or ``"1ep"``), steps (``"100ba"``) or a duration
            (``"10min"``). The end of training is always evaluated.
        metrics: further values to average besides the loss, in training and evaluation: ``(output, target) -> scalar``
            by name.
        weight_fn: ``(micro_batch) -> float``, the weight of a collated micro-batch in the means, for example its number
            of tokens; None: its number of samples.
        forward: ``(model, micro_batch) -> (output, target)``; needed if micro-batches are not ``(input, target)``
            pairs.
        checkpoint: where to save to and resume from.
        exact: whether the weights must be bitwise equal at every world size.
        verify: with ``exact=True``, the share of the steps, such as ``"1%"``, in which each rank also computes a
            micro-batch of another rank, to find hardware that computes wrong; see docs/training/corruption.md.
        buffers: rules for buffers that micro-batches change; see :meth:`elastic_launch.Run.steps`.
        callbacks: :class:`Callback` objects that receive the training's progress.
        deepspeed_config: trains with DeepSpeed, by a configuration as in its documentation. What it leaves out, such as
            batch sizes, accumulation, precision and clipping, is taken from the other arguments; ``{}`` is valid. The
            optimizer is DeepSpeed's from the first ``fit`` on.

    Attributes:
        step: optimizer steps done.
        loss, metrics: loss and metrics of the last step; None and empty before the first.
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
        scheduler: Stateful | Schedule | Mapping[str, Stateful | Schedule] | None = None,
        precision: str | None = None,
        clip_norm: float | None = None,
        eval_loader: Loader | None = None,
        eval_every: int | str = "1ep",
        metrics: Mapping[str, Measure] | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        forward: Forward | None = None,
        checkpoint: Checkpoint | None = None,
        exact: bool = False,
        verify: str | None = None,
        buffers: Mapping[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
        deepspeed_config: Mapping[str, Any] | None = None,
    ) -> None:
        check_kind("Trainer(run=...)", run, Run, "Give what `with el.session() as run:` gives.")
        check_kind("Trainer(model=...)", model, nn.Module, f"Give a torch.nn.Module; {_SEVERAL}")
        check_kind("Trainer(optimizer=...)", optimizer, torch.optim.Optimizer, f"Give one of torch.optim; {_SEVERAL}")
        check_loader("Trainer(loader=...)", loader)
        check_function("Trainer(loss_fn=...)", loss_fn, "Give a function (output, target) -> scalar, or MSELoss().")
        if checkpoint is not None:
            check_checkpoint("Trainer(checkpoint=...)", checkpoint)
        self.run = run
        self.model = model
        self.loader = loader
        self.step = 0
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._config = None if deepspeed_config is None else checked(deepspeed_config)
        self._deepspeed: DeepSpeed | None = None
        self._spare: Any = None  # a micro-batch for passes that only keep the ranks together
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm={clip_norm:g} is not above 0.", "Leave it out to have none.")
        self._clip_norm = clip_norm
        if self._config is None:
            self._precision = precision or "fp32"
        else:
            self._precision = precision_of(self._config, precision)
            self._clip_norm = clip_norm_of(self._config, clip_norm)
            refused = {"exact": exact, "weight_fn": weight_fn is not None, 'micro="auto"': loader.batch.micro == "auto"}
            for name in [name for name, given in refused.items() if given]:
                raise UsageError(f"Trainer(deepspeed_config=...) does not support {name}.", "Leave out one of them.")
        if self._precision not in _AUTOCAST:
            known = ", ".join(_AUTOCAST)
            raise UsageError(f"precision={self._precision!r} is not a known precision.", f"Give one of {known}.")
        scales = self._precision == "fp16" and self._config is None
        self._scaler = torch.amp.GradScaler(run.device.type) if scales else None
        where = "Trainer(eval_loader=...)"
        self._eval_loader = checked_eval_loader(where, eval_loader) if eval_loader is not None else None
        if exact and self._eval_loader is not None:
            epochs_of(self._eval_loader).check_exact()
        if metrics is not None:
            check_kind("Trainer(metrics=...)", metrics, Mapping, 'Give functions by name: {"accuracy": accuracy}.')
        self._metrics = dict(metrics or {})
        for name, measure in self._metrics.items():
            check_function(f"Trainer(metrics=...): {name!r}", measure, "Give a function (output, target) -> scalar.")
        if "loss" in self._metrics:
            raise UsageError("metrics: the name 'loss' is the loss function's.", "Choose another.")
        names = ["loss", *self._metrics] if eval_loader is not None else []
        steps = loader.steps_per_epoch
        interval = Interval.in_training(eval_every, steps) if names else None
        self._schedules = Schedules(scheduler, steps, names)
        self._evaluations = Evaluations(interval, self.evaluate, self._tell_evaluation)
        self.history = self._evaluations.history
        best = None if checkpoint is None else checkpoint.keep_best
        if best is not None and best.metric not in names:
            has = f"it has {', '.join(names) or 'no eval_loader'}"
            hint = (
                "Add the metric to Trainer(metrics=...), or name another."
                if names
                else "Give Trainer(eval_loader=...)."
            )
            raise UsageError(f"Checkpoint(keep_best={best}): the trainer evaluates no such metric, {has}.", hint)
        self._weight_fn = weight_fn
        self._forward = forward or _forward_pair
        self._checkpoint = checkpoint
        self._exact = exact
        self._share = 0.0 if verify is None else share_of(verify, "Trainer(verify=...)")
        if self._share and not exact:
            raise UsageError(f"Trainer(verify={verify!r}) checks what only exact=True promises.", "Give both.")
        self._buffers = checked_rules(buffers)
        self._finds_micro = loader.batch.micro == "auto"
        check_kind("Trainer(callbacks=...)", callbacks, Sequence, "Give a list of them.")
        for callback in callbacks:
            check_kind("Trainer(callbacks=...): one of them", callback, Callback, "Give objects of el.Callback.")
        self._callbacks = list(callbacks)
        self._begun = False

    def fit(self, until: int | str) -> None:
        """Train until the whole training has the given length, earlier rounds and earlier calls included.

        Args:
            until: total length: epochs (3 or ``"3ep"``) or steps (``"1000ba"``).

        Raises:
            UsageError: if ``until`` is not a valid length, or the checkpoint belongs to another training.
            NonFiniteLossError: on all ranks, if a loss is NaN or infinite.
            MemoryError: if a micro-batch of one sample does not fit.
        """
        if self._config is not None and self._deepspeed is None:
            world_size = self.run.world_size
            full = completed(self._config, self.loader.batch, world_size, self._precision, self._clip_norm)
            self._deepspeed = DeepSpeed(self.model, self._optimizer, full, world_size)
        with engine_of(self.run).saver.telling(self._on_checkpoint):
            self._fit(until)

    def _fit(self, until: int | str) -> None:
        for step in self._loop(until).transactions():
            started = time.monotonic()
            lrs = self._learning_rates()
            self._work(step)
            engine = self._deepspeed
            step.update(None if engine is not None and engine.clips else self._clip_norm, None)
            if engine is not None:
                step.clipped_norm = engine.norm if engine.clips and self._clip_norm is not None else step.clipped_norm
            if step.too_large:
                self._tell_incident("out of memory", f"a micro-batch of {self.loader.batch.micro} samples")
                continue
            if step.broken_off:
                continue
            self.step, self.loss, self.metrics = step.number, step.loss, step.metrics
            self._schedules.step_done(step.number, partial(self._skipped, step))
            self._tell_step(step, time.monotonic() - started, lrs)

    def _learning_rates(self) -> tuple[float, ...]:
        """Return those that callbacks get: one that is a tensor on a GPU has to be waited for."""
        groups = self._optimizer.param_groups if self._callbacks else []
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def _skipped(self, step: Transaction) -> bool:
        return step.skipped if self._deepspeed is None else self._deepspeed.skipped

    def evaluate(self, loader: Loader | None = None) -> dict[str, float]:
        """Return loss and metrics, averaged over all samples of the evaluation data. Call it on all ranks.

        Args:
            loader: loads the evaluation data; None: the trainer's ``eval_loader``.

        Returns:
            The means of ``"loss"`` and of each metric, by name.

        Raises:
            UsageError: if no loader was given and the trainer has no ``eval_loader``.
        """
        loader = self._eval_loader if loader is None else checked_eval_loader("Trainer.evaluate(loader)", loader)
        if loader is None:
            raise UsageError("Trainer.evaluate() has no data.", "Give it a loader, or the trainer an eval_loader.")
        given = loader.batch
        if given.micro == "auto":
            micro = settled(self.loader.batch, self.run.world_size).micro_batches()[0]
            loader.batch = GlobalBatch(given.size, min(given.size, len(micro)))
        try:
            with evaluating(self.model), keeping_buffers(self.model, self._buffers):
                names = ["loss", *self._metrics]
                world, together = self.run.world, bool(sharding_modules(self.model))
                check = self._check_round
                return evaluated(world, loader, names, self._measure_sample, check, together=together)
        finally:
            loader.batch = given  # the training's micro-batches may become smaller, on all ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's own state; model, optimizer and other parts are saved separately."""
        return {**self._evaluations.state_dict(), "loss": self.loss, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        self._evaluations.load_state_dict(state)
        self.loss, self.metrics = state["loss"], dict(state["metrics"])

    def _loop(self, until: int | str) -> Loop:
        parts: dict[str, Stateful | None] = {
            "trainer": self,
            "scheduler": self._schedules.part,
            "scaler": self._scaler,
        }
        engine, gradients = self._deepspeed, None
        if engine is not None:
            gradients = partial(EngineGradients, engine, buffers=self._buffers, spare=self._spare_loss)
        options = LoopOptions(
            exact=self._exact,
            verify=self._exact and not self._share,
            share=self._share,
            buffers=self._buffers,
            parts=parts,
            scaler=self._scaler,
            metrics=tuple(self._metrics),
            start=self.step,
            redo=self._finds_micro,
            prepare=self._begin,
            evaluations=self._evaluations,
            rehearse=self._rehearse if engine is None else None,
            gradients=gradients,
            stepper=None if engine is None else engine.optimizer,
            unwatched=["trainer"],
        )
        return Loop(
            engine_of(self.run),
            epochs_of(self.loader),
            self.model,
            self._optimizer,
            until=until,
            checkpoint=self._checkpoint,
            options=options,
        )

    def _spare_loss(self, model: Callable[..., Any]) -> Tensor:
        """Return the loss of a micro-batch that this rank has, or of one that it loads: its value does not count."""
        if self._spare is None:
            self._spare = _on_device(epochs_of(self.loader).spare(self.step), self.run.device)
        return self._measure_loss(self._spare, model)[-1]

    def _begin(self, step: int) -> None:
        self.step = step
        if self._deepspeed is not None:
            self._deepspeed.optimizer.follow_model()
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

    def _work(self, step: Transaction) -> None:
        """Run the forward and backward passes of this rank's micro-batches; give the step up if memory runs out."""
        try:
            with closing(step.micro_batches()) as samples:
                for sample in samples:
                    if step.checking:
                        self._work_again(step, sample)
                        continue
                    values, weight = self._measure_sample(sample, step.model)
                    loss, *metrics = values
                    if not isinstance(loss, Tensor):
                        raise UsageError(f"Trainer: what loss_fn returned is {found(loss)}.", "Return a tensor.")
                    step.backward(loss, weight, dict(zip(self._metrics, metrics, strict=True)))
        except (RuntimeError, MemoryError) as error:
            if not self._finds_micro or step.exchanged or not _is_out_of_memory(error):
                raise
            _log.info("rank %d ran out of memory: %s", self.run.rank, error)
            # The traceback holds the tensors of the pass that failed.
            error.__traceback__ = None
            step.give_up()

    def _work_again(self, step: Transaction, sample: Any) -> None:
        """Compute a micro-batch's loss and gradients once more; metrics may count their calls."""
        sample = _on_device(sample, self.run.device)
        weight = None if self._weight_fn is None else float(self._weight_fn(sample))
        with unchanged(*self._functions()):
            step.backward(self._measure_loss(sample, step.model)[-1], weight, {})

    def _functions(self) -> list[Any]:
        return [getattr(each, "__self__", each) for each in (self._loss_fn, self._forward)]

    def _measure_sample(
        self, sample: Any, model: Callable[..., Any] | None = None
    ) -> tuple[list[Tensor | float], float | None]:
        """Return ``[loss, *metrics]`` of a micro-batch, and its weight (None: its number of samples)."""
        sample = _on_device(sample, self.run.device)
        output, target, loss = self._measure_loss(sample, self.model if model is None else model)
        if self._deepspeed is not None and model is not None:
            self._spare = sample
        with torch.no_grad():
            metrics: list[Tensor | float] = [metric(output, target) for metric in self._metrics.values()]
        return [loss, *metrics], None if self._weight_fn is None else float(self._weight_fn(sample))

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST[self._precision]
        return nullcontext() if dtype is None else torch.autocast(self.run.device.type, dtype)

    def _measure_loss(self, sample: Any, model: Callable[..., Any]) -> tuple[Any, Any, Tensor]:
        if self._config is not None:
            output, target = self._forward(model, sample)  # DeepSpeed's model has the precision itself
        with self._autocast():
            if self._config is None:
                output, target = self._forward(model, sample)
            return output, target, self._loss_fn(output, target)

    def _rehearse(self, step: Step) -> None:
        with unchanged(*self._functions()):
            for sample in step:
                step.backward(self._measure_loss(_on_device(sample, self.run.device), step.model)[-1])

    def _check_round(self) -> None:
        if self._evaluations.running:
            engine_of(self.run).rounds.check_over()

    def _tell_evaluation(self, evaluation: Evaluation) -> None:
        self._schedules.evaluated(evaluation.metrics)
        for callback in self._callbacks:
            callback.on_evaluation(evaluation)

    def _tell_step(self, step: Transaction, seconds: float, lrs: tuple[float, ...]) -> None:
        epoch, norm = step.position.epoch, step.clipped_norm
        end = StepEnd(step.number, epoch, step.samples, step.loss, step.metrics, seconds, lrs, norm, step.repeated)
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


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, or the CPU's allocator, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
