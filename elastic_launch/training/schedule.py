"""When a trainer steps its learning-rate schedulers: after steps, after epochs, or by an evaluation's metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.parts import Stateful
from elastic_launch.training.durations import Interval
from elastic_launch.training.together import as_part


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning-rate scheduler, and when a ``Trainer`` steps it.

    Args:
        scheduler: one of ``torch.optim.lr_scheduler``, or an object like them.
        every: interval between its steps: epochs (1 or ``"1ep"``) or optimizer steps (``"10ba"``); None: every step.
        metric: for a ``ReduceLROnPlateau``, which is stepped after each evaluation: the metric that it gets; None: the
            loss.
    """

    scheduler: Stateful
    every: int | str | None = None
    metric: str | None = None


class Schedules:
    """The learning-rate schedulers of a trainer.

    Args:
        given: the trainer's argument: a scheduler or a :class:`Schedule`, or a dict of several.
        metrics: names that evaluations have; empty: there are no evaluations.

    Attributes:
        part: the schedulers as a part of the state.

    Raises:
        UsageError: if one of them is not a scheduler, or cannot be stepped as it is to be.
    """

    def __init__(
        self,
        given: Stateful | Schedule | Mapping[str, Stateful | Schedule] | None,
        steps_per_epoch: int,
        metrics: Sequence[str],
    ) -> None:
        self._stepped: list[tuple[Any, int]] = []
        self._plateaus: list[tuple[ReduceLROnPlateau, str]] = []
        where = "Trainer(scheduler=...)"
        several = isinstance(given, Mapping)
        named = dict(given) if isinstance(given, Mapping) else {} if given is None else {"": given}
        schedules = {name: x if isinstance(x, Schedule) else Schedule(x) for name, x in named.items()}
        bare = {name: schedule.scheduler for name, schedule in schedules.items()}
        self.part = as_part(where, bare if several else bare.get(""))
        for schedule in schedules.values():
            scheduler, every, metric = schedule.scheduler, schedule.every, schedule.metric
            if isinstance(scheduler, ReduceLROnPlateau):
                metric = metric or "loss"
                if every is not None:
                    raise UsageError(f"{where}: a ReduceLROnPlateau is stepped after each evaluation.", "Omit every=.")
                if metric not in metrics:
                    has = ", ".join(metrics) or "no eval_loader"
                    raise UsageError(f"{where}: a ReduceLROnPlateau needs the metric {metric!r}; it has {has}.")
                self._plateaus.append((scheduler, metric))
                continue
            if metric is not None:
                raise UsageError(f"{where}: {type(scheduler).__name__} takes no metric.", "Omit metric=.")
            interval = Interval.in_training("1ba" if every is None else every, steps_per_epoch)
            if interval.steps is None:
                raise UsageError(f"{where}: every={every!r} is a duration.", 'Give epochs ("1ep") or steps ("10ba").')
            self._stepped.append((scheduler, interval.steps))

    def step_done(self, number: int, skipped: Callable[[], bool]) -> None:
        """Step the schedulers that follow an optimizer step.

        Args:
            skipped: returns whether the optimizer did not step because gradients overflowed; schedulers that follow
                every step are not stepped then. It may wait for a GPU, and is called only if there are such.
        """
        for scheduler, every in self._stepped:
            if number % every == 0 and not (every == 1 and skipped()):
                scheduler.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers that follow an evaluation."""
        for scheduler, metric in self._plateaus:
            scheduler.step(metrics[metric])
