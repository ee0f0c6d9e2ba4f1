"""Planned changes for Lightning: ``Trainer(..., callbacks=[DrainCallback()])``."""

from __future__ import annotations

import os
import signal
from copy import deepcopy
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # older name of the package
    from pytorch_lightning import Callback, LightningModule, Trainer

from elastic_launch.errors import UsageError
from elastic_launch.integrations.drain import Drain
from elastic_launch.training.stopping import DrainedExit

_METRICS = "elastic_launch_metrics"
"""The key of a checkpoint under which the metrics of the last step are, which Lightning does not save."""


class DrainCallback(Callback):
    """Saves a checkpoint and ends the process once all ranks have agreed to stop.

    ``Trainer.fit`` then raises ``SystemExit`` before the next batch: after a validation or an epoch's end that is due
    at the step. Resume with ``fit(..., ckpt_path="last")``. During training, SIGTERM to this process is a stop request.
    Lightning's own SIGTERM handler, which joins a collective out of turn, is replaced until training ends.

    Args:
        path: where to save. None: as the last checkpoint of the ``ModelCheckpoint`` with ``save_last``, which is where
            ``"last"`` is looked for. Give that ModelCheckpoint a directory: its default directory differs at every
            start.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._drain = Drain()
        self._step = self._total = 0
        self._owes = False  # whether all ranks have agreed to save before the next batch
        self._loaders: dict[str, Any] = {}  # the states of the loaders after the last step, by Lightning's key
        self._metrics: dict[str, float] = {}  # those of the training that is resumed
        self._put_aside: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is None:
            self._last_saver(trainer)  # raises before the first step, not at the first stop
        self._step, self._owes = trainer.global_step, False
        if _is_before_batch(trainer):
            progress = trainer.fit_loop.epoch_loop.batch_progress
            progress.reset_on_restart()
            progress.total.ready, progress.is_last_batch = progress.total.started, False
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics.items()})
        if _lightnings(signal.getsignal(signal.SIGTERM)):
            self._put_aside = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        total = trainer.estimated_stepping_batches
        self._total = int(total) if total != float("inf") else 0
        self._drain.begin(self._step, self._total)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:
            return  # gradients accumulate
        self._step = trainer.global_step
        stops = self._drain.boundary(self._step, end=self._step == self._total)
        if stops or self._drain.save:
            self._owes, self._loaders = True, deepcopy(trainer.fit_loop.on_save_checkpoint())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        # Not after the step: a validation or an epoch's end that is due there would be left out on the resume.
        if not self._owes:
            return
        if batch_idx == 0:
            self._loaders = {}  # an epoch begins, and a loader may have been saved at the end of the one before
        self._save(trainer)
        if self._drain.stops:
            # At once: Lightning would run the epoch's end with half an epoch. It leaves the process group by itself.
            raise DrainedExit(self._drain.leave())

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._owes and _is_before_batch(trainer):
            # The loaders have already given the batch that is trained next.
            state = checkpoint["loops"]["fit_loop"]
            state["state_dict"].pop("combined_loader", None)
            state["state_dict"].update(self._loaders)
            # Lightning adds 1 on the resume, as for a save in a validation.
            state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
            # For a ReduceLROnPlateau or a ModelCheckpoint at the end of the epoch, which may come without a validation.
            checkpoint[_METRICS] = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._metrics = checkpoint.get(_METRICS, {})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # At the end of an epoch that was resumed, Lightning steps no ReduceLROnPlateau: its metric may be missing.
        monitors = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
        if monitors <= trainer.callback_metrics.keys():
            trainer.fit_loop.on_iteration_done()  # it forgets that it resumed, a moment early

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._owes and self._drain.save:
            self._save(trainer)
        self._drain.end()
        if self._put_aside is not None:
            signal.signal(signal.SIGTERM, self._put_aside)
            self._put_aside = None

    def _last_saver(self, trainer: Trainer) -> Any:
        """Return the ModelCheckpoint that saves the last checkpoint.

        Raises:
            UsageError: if there is none.
        """
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None):
                return callback
        raise UsageError(
            "DrainCallback() finds no ModelCheckpoint that saves a last checkpoint, from which the next start resumes.",
            "Give the Trainer a ModelCheckpoint(directory, save_last=True), or say DrainCallback(path).",
        )

    def _save(self, trainer: Trainer) -> None:
        path = self._path
        if path is None:
            saver = self._last_saver(trainer)
            path = os.path.join(saver.dirpath, saver.CHECKPOINT_NAME_LAST + saver.FILE_EXTENSION)
            saver.last_model_path = path  # else it would not know this file, and number its next one
        if trainer.is_global_zero and os.path.islink(path):
            os.unlink(path)  # ModelCheckpoint(save_last="link"): the link's target is another checkpoint
        trainer.save_checkpoint(path)
        self._owes = self._drain.stops  # a ModelCheckpoint may save once more by the exception
        self._drain.saved(self._step)


def _is_before_batch(trainer: Trainer) -> bool:
    """Whether a batch is loaded and not begun, or was when the state was saved; Lightning itself never saves then."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    return bool(total.ready > total.started)


def _lightnings(handler: Any) -> bool:
    """Whether a signal handler is Lightning's, without a handler of the script or for Slurm in it."""
    names = [getattr(part, "__name__", "") for part in getattr(handler, "signal_handlers", [])]
    return names == ["_sigterm_notifier_fn"]
