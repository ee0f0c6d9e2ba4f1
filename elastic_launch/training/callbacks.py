"""What a trainer tells of its progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from elastic_launch.snapshot.location import Place

__all__ = ["Callback", "CheckpointEnd", "Evaluation", "Incident", "Progress", "RoundStart", "StepEnd"]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """An optimizer step was made.

    Attributes:
        step: its number, from 1.
        epoch: in which it lies, from 0.
        samples: in its global batch.
        loss, metrics: means over the global batch, the same on all ranks.
        seconds: that it took this rank, waiting for others included.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Training begins or goes on in a world.

    Attributes:
        round: its number under ``elastic-launch``, else 0.
        world_size, rank: of this process.
        restarts: of the run so far.
        resumed_step: optimizer steps done before.
        micro: samples in a micro-batch.
        grad_accum: this rank's micro-batches in a full global batch.
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
        step: optimizer steps in it.
        seconds: that the writing took, beside the training.
        path: its directory or URL, None if it was not written.
        error: what went wrong, None if nothing did.
    """

    step: int
    seconds: float
    path: Place | None
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Incident:
    """Something went wrong that training survives.

    Attributes:
        kind: ``restart``, ``out of memory`` or ``checkpoint``.
        step: optimizer steps done then; after a restart those it resumes from.
        cause: for people.
    """

    kind: str
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation data were gone through.

    Attributes:
        step: optimizer steps done.
        epoch: epochs done, the present one not counted.
        metrics: means over all samples, ``loss`` among them, the same on all ranks.
    """

    step: int
    epoch: int
    metrics: dict[str, float]


class Callback:
    """Base of what a trainer tells; every rank calls its own, but ``on_checkpoint`` only where checkpoints are written.

    An error that a callback raises ends the training.
    """

    def on_round(self, start: RoundStart) -> None:
        """Training begins or goes on, and its state is restored."""

    def on_step(self, end: StepEnd) -> None:
        """A step was made; its checkpoint, if one is due, comes after this."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """The evaluation data were gone through."""

    def on_checkpoint(self, end: CheckpointEnd) -> None:
        """A checkpoint was written or failed; told at a step's end, or at the training's."""

    def on_incident(self, incident: Incident) -> None:
        """Something went wrong that training survives."""


class Progress(Callback):
    """Prints on rank 0.

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
