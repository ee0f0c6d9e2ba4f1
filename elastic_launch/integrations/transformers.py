"""Planned changes for transformers' Trainer: ``Trainer(..., callbacks=[DrainCallback()])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elastic_launch.integrations.drain import Drain
from elastic_launch.training.ranks.world import leave
from elastic_launch.training.stopping import DrainedExit


class DrainCallback(TrainerCallback):
    """Saves a ``checkpoint-N`` and ends the process once all ranks have agreed to stop.

    ``Trainer.train`` then raises ``SystemExit`` after its own end. The script resumes as after a fault, with
    ``train(resume_from_checkpoint=...)``. ``elasticctl checkpoint`` makes the Trainer save too.
    """

    def __init__(self) -> None:
        self._drain = Drain()
        self._owes = False  # whether a checkpoint was asked for and none was written since

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._owes = False
        self._drain.begin(state.global_step, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        stops = self._drain.boundary(state.global_step, end=state.global_step >= state.max_steps)
        self._owes = self._owes or stops or self._drain.save
        control.should_save = control.should_save or self._owes
        control.should_training_stop = control.should_training_stop or stops
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        # An evaluation after the step drops the wish where only the best state is saved. The Trainer calls this and
        # saves here also when it stops within an epoch.
        control.should_save = control.should_save or self._owes
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._owes = False
        self._drain.saved(state.global_step)
        if self._drain.stops:
            # This training has not ended: at an end, the Trainer with a limit of 1 deletes all but the best checkpoint.
            args.save_total_limit, args.load_best_model_at_end = None, False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._drain.stops:
            self._drain.end()
            return
        code = self._drain.leave()
        leave()
        raise DrainedExit(code)
