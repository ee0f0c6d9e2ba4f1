"""Planned changes for training loops that use accelerate: a call after each step."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator

from elastic_launch.integrations.drain import Drain
from elastic_launch.training.stopping import DrainedExit


class DrainCallback:
    """Saves with the script's own function, and ends the process, once all ranks have agreed to stop.

    Make it when training begins, after resuming, and call it on all ranks after each step::

        drain = DrainCallback(accelerator, save, step, total)
        for batch in loader:
            with accelerator.accumulate(model):
                ...
            drain()

    A call while gradients accumulate does nothing. The process ends with ``SystemExit``.

    Args:
        accelerator: the script's ``Accelerator``.
        save: ``save(step)``, called on all ranks with the optimizer steps done, saves a state from which the script
            resumes.
        step: optimizer steps done so far.
        total: optimizer steps of the whole training; 0: not known.
    """

    def __init__(self, accelerator: Accelerator, save: Callable[[int], object], step: int = 0, total: int = 0) -> None:
        self._accelerator = accelerator
        self._save = save
        self._step = step
        self._total = total
        self._drain = Drain()
        self._drain.begin(step, total)

    def __call__(self) -> None:
        if not self._accelerator.sync_gradients:
            return
        self._step += 1
        stops = self._drain.boundary(self._step, end=self._step == self._total)
        if stops or self._drain.save:
            self._save(self._step)
            self._drain.saved(self._step)
        if self._step == self._total:
            self._drain.end()
        if stops:
            code = self._drain.leave()
            self._accelerator.end_training()
            raise DrainedExit(code)
