"""Callbacks of a trainer, and the events that they receive."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from elastic_launch.snapshot.location import Place


@dataclass(frozen=True, slots=True)
class StepEnd:
    """An optimizer step was made.

    Attributes:
        step: its number, from 1.
        epoch: the epoch that it belongs to, from 0.
        samples: number of samples in its global batch.
        loss, metrics: means over the global batch, the same on all ranks.
        seconds: its duration on this rank, including time spent waiting for other ranks.
        lrs: the learning rate of each parameter group in this step.
        repeated: whether the step was made before, see :attr:`elastic_launch.Step.repeated`.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    lrs: tuple[float, ...] = ()
    norm: Tensor | None = field(default=None, repr=False)
    repeated: bool = False

    @property
    def grad_norm(self) -> float | None:
        """2-norm of all gradients before clipping; None without ``clip_norm``, and if other ranks made the step.

        Reading it on a GPU waits for the step.
        """
        return None if self.norm is None else float(self.norm)


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Training starts or resumes in a round.

    Attributes:
        round: the round's number under ``elastic-launch``, else 0.
        world_size, rank: this process' world size and rank.
        restarts: restarts of the run so far.
        resumed_step: optimizer steps done before.
        micro: samples in a micro-batch.
        grad_accum: number of this rank's micro-batches in a full global batch.
        reason: ``first``, or what ended the last round.
    """

    round: int
    world_size: int
    rank: int
    restarts: int
    resumed_step: int
    micro: int
    grad_accum: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointEnd:
    """A checkpoint was written, or could not be.

    Attributes:
        step: optimizer steps done when its state was taken.
        seconds: duration of the write, which runs in the background.
        path: the checkpoint's directory or URL; None if it was not written.
        error: why it failed; None if it succeeded.
    """

    step: int
    seconds: float
    path: Place | None
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure that training survives, or a later round in which this process has begun.

    Attributes:
        kind: ``restart`` (this process has begun in a later round than the first; one that goes on in another round
            gets :meth:`Callback.on_round` alone, with the reason), ``out of memory`` or ``checkpoint``.
        step: optimizer steps done at that time; after a restart, the step that training resumes from.
        cause: a description for people.
    """

    kind: str
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation.

    Attributes:
        step: optimizer steps done.
        epoch: complete epochs done.
        metrics: means over all samples, including ``loss``; the same on all ranks.
    """

    step: int
    epoch: int
    metrics: dict[str, float]


class Callback:
    """Base class for a trainer's callbacks.

    Every rank calls its own callbacks; ``on_checkpoint`` is called only on ranks that write checkpoints. An exception
    raised by a callback ends the training.
    """

    def on_round(self, start: RoundStart) -> None:
        """Called in each round of the process, when training begins or resumes, after its state is restored."""

    def on_step(self, end: StepEnd) -> None:
        """Called after each optimizer step, before its checkpoint if one is due."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called once for each evaluation that ends while this process takes part in the training."""

    def on_checkpoint(self, end: CheckpointEnd) -> None:
        """Called at the end of a step, or of the training, after a checkpoint was written or failed."""

    def on_incident(self, incident: Incident) -> None:
        """Called after a failure that training survives, see :class:`Incident`."""


class Progress(Callback):
    """Prints the training's progress on rank 0.

    Args:
        every: steps between two lines.
    """

    def __init__(self, every: int = 20) -> None:
        self._every = max(1, every)
        self._speaks = False

    def on_round(self, start: RoundStart) -> None:
        self._speaks = start.rank == 0
        accumulation = f"{start.grad_accum} micro-batches of {start.micro} each"
        begun = f"resumed at step {start.resumed_step}" if start.resumed_step else "started"
        self._say(f"{begun}: world size {start.world_size}, {accumulation}, restart {start.restarts}")

    def on_step(self, end: StepEnd) -> None:
        if end.step % self._every == 0 or end.step == 1:
            self._say(f"step {end.step} loss {end.loss:.4f}{_listed(end.metrics)}")

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._say(f"evaluation at step {evaluation.step}{_listed(evaluation.metrics)}")

    def on_incident(self, incident: Incident) -> None:
        self._say(f"incident at step {incident.step}: {incident.kind}: {incident.cause}")

    def _say(self, text: str) -> None:
        if self._speaks:
            with suppress(OSError):  # a full disk must not stop training
                print(text, flush=True)


def _listed(metrics: dict[str, float]) -> str:
    return "".join(f" {name} {value:.4f}" for name, value in metrics.items())
