"""Keeps track of the trainings of one script: one at a time, each with its own place for checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.checkpoint import Checkpoint

_TOGETHER = 'run.steps(loader, {"a": a, "b": b}, {"a": optimizer_a, "b": optimizer_b})'


class Trainings:
    """The training that is running in this process, and those before it.

    A saved state belongs to one training. If two ran at the same time, a fault would leave one a step ahead of the
    other.
    """

    def __init__(self) -> None:
        self.resumed = False  # whether the script's own training loop has restored its state
        self.over = False  # whether the session has ended
        self._looping = False
        self._swapped: set[int] = set()  # addresses of what is swapped at present
        self._last: tuple[weakref.ref[Any], ...] = ()
        self._places: dict[str, tuple[weakref.ref[Any], ...]] = {}

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Return the context in which a loop over steps runs."""
        self.refuse_after_end("run.steps() or Trainer.fit()")
        if self._looping:
            raise UsageError(
                "Two loops over steps at once: run.steps() or Trainer.fit() began before another one had ended.",
                f"Train the models in one loop, with a pass for each optimizer: {_TOGETHER}. "
                "If the other loop was left by a break, close() its iterator.",
            )
        self._looping = True
        try:
            yield
        finally:
            self._looping = False

    @property
    def models(self) -> list[nn.Module]:
        """The models of the last training that began."""
        found = [reference() for reference in self._last]
        return [model for model in found if isinstance(model, nn.Module)]

    @contextmanager
    def swapping(self, *what: object) -> Iterator[None]:
        """Return the context in which the weights of these objects are not those of the training."""
        mine = {*map(id, what)}
        if mine & self._swapped:
            raise UsageError("run.swapped() came within run.swapped() of the same model.", "Leave that block first.")
        self._swapped |= mine
        try:
            yield
        finally:
            self._swapped -= mine

    def refuse_swapped(self, what: str) -> None:
        """Refuse what would train or save within :meth:`swapping`."""
        if self._swapped:
            raise UsageError(f"{what} came within run.swapped().", "Leave its block first: it is for evaluations.")

    def refuse_beside_steps(self, what: str) -> None:
        """Refuse a call that saves or restores a state within a loop over steps, or after the session."""
        self.refuse_after_end(what)
        if self._looping:
            raise UsageError(
                f"{what} was called within run.steps() or a Trainer, which save by themselves.",
                "Leave it out. To save more than the model, call run.register(name, object) before.",
            )

    def refuse_after_end(self, what: str) -> None:
        """Refuse a call that needs the other processes of the run once the session has ended."""
        if self.over:
            raise UsageError(
                f"{what} came after the end of the session, when this process has left the others.",
                "Move it into the block of: with el.session() as run.",
            )

    @property
    def begun(self) -> bool:
        """Whether a state was restored already, or the script's steps have begun."""
        return self._looping or self.resumed

    def refuse_after_restoring(self, what: str) -> None:
        """Refuse a call that must come before a state is restored."""
        if self.begun:
            after = "run.steps() or Trainer.fit() had begun" if self._looping else "run.resume()"
            raise UsageError(
                f"{what} came after {after}, when the state was restored already: it would be left out.",
                "Call it earlier.",
            )

    def refuse_before_restoring(self, what: str, registered: Sequence[str]) -> None:
        """Refuse a step boundary with registered objects that were not restored at the loop's start."""
        if registered and not self._last:
            raise UsageError(
                f"{what} came without run.resume() before it: {', '.join(map(repr, registered))} would begin anew on "
                "every start.",
                "Before the loop: step = run.resume(el.Checkpoint(directory, every=...)).",
            )

    def begin(self, models: Sequence[object], checkpoint: Checkpoint | None) -> None:
        """Record that the training of some models begins; those of two trainings cannot save to the same place."""
        self._last = tuple(weakref.ref(model) for model in models)
        if checkpoint is None:
            return
        taken = self._places.setdefault(str(checkpoint.directory), self._last)
        if not _are(taken, models):
            raise UsageError(
                f"{checkpoint.directory} has the checkpoints of another training of this script, with another model.",
                f"Give each training its own directory. Models that are trained together need one loop: {_TOGETHER}.",
            )

    def was_last(self, models: Sequence[object]) -> bool:
        """Whether the last training that began was of these models."""
        return _are(self._last, models)


def _are(references: Sequence[weakref.ref[Any]], models: Sequence[object]) -> bool:
    return len(references) == len(models) and all(
        reference() is model for reference, model in zip(references, models, strict=True)
    )
