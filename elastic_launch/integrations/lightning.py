"""Planned changes for Lightning: ``Trainer(..., callbacks=[DrainCallback()])``."""

from __future__ import annotations

import os
import signal
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # older name of the package
    from pytorch_lightning import Callback, LightningModule, Trainer

from elastic_launch.errors import UsageError
from elastic_launch.integrations.drain import Drain
from elastic_launch.training.stopping import DrainedExit


class DrainCallback(Callback):
    """Saves a checkpoint and ends the process once all ranks have agreed to stop.

    ``Trainer.fit`` then raises ``SystemExit`` after the step. Resume with ``fit(..., ckpt_path="last")``. During
    training, SIGTERM to this process is a stop request. Lightning's own SIGTERM handler, which joins a collective out
    of turn, is replaced until training ends.

    Args:
        path: where to save. None: as the last checkpoint of the ``ModelCheckpoint`` with ``save_last``, which is where
            ``"last"`` is looked for. Give that ModelCheckpoint a directory: its default directory differs at every
            start.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._drain = Drain()
        self._step = self._total = 0
        self._put_aside: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is None:
            self._last_saver(trainer)  # raises before the first step, not at the first stop
        self._step = trainer.global_step
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
        if not stops and not self._drain.save:
            return
        self._save(trainer)
        self._drain.saved(self._step)
        if stops:
            # At once: Lightning would run the epoch's end with half an epoch. It leaves the process group by itself.
            raise DrainedExit(self._drain.leave())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
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


def _lightnings(handler: Any) -> bool:
    """Whether a signal handler is Lightning's, without a handler of the script or for Slurm in it."""
    names = [getattr(part, "__name__", "") for part in getattr(handler, "signal_handlers", [])]
    return names == ["_sigterm_notifier_fn"]
