"""The positions of a training at which its state can be handed on, and what the script does between them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping

from elastic_launch.errors import UsageError
from elastic_launch.system.plain_text import some
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.checkpoints.step_start import Start, StepStart
from elastic_launch.training.rounds import WorkerRounds

_log = logging.getLogger(__name__)

FIRST = 3
"""Number of passes at the beginning in which all is looked at."""

SHARE = 0.002
"""Fraction of the time that it may cost to look what passes change, except in exact mode."""

_REMEDY = (
    "Change it after step.update(), once for each step. If a registered module changes its buffers in training mode "
    "(BatchNorm), give it to run.steps() as one of the models, or call its eval()"
)


class Positions:
    """Follows the state of a loop: the start of each step, or of a pass in it, is a position.

    Args:
        exact: whether a step's result must not depend on how many ranks share its micro-batches.
        unwatched: names of the parts of the state that the library alone changes, between steps; None: nothing is
            watched.
    """

    def __init__(
        self, rounds: WorkerRounds, state: TrainingState, *, exact: bool, unwatched: Collection[str] | None
    ) -> None:
        self._rounds = rounds
        self._exact = exact
        self._unwatched = unwatched
        self._state = state
        self._start: StepStart | None = None
        self._warned = False
        self._passes = 0  # that have begun
        self._looks = False  # whether the current pass is looked at
        self._looked = -math.inf
        self._cost = 0.0
        self.allowed: Collection[str] = ()
        """Names of parameters that a pass may change, and that are put back when it is given up."""

    def follow(self, state: TrainingState) -> None:
        """Follow this state from its next position on."""
        self._state, self._start = state, None

    def begin(self, trained: Mapping[str, bool], passes: int = 0) -> None:
        """A step begins, or its pass that follows so many updated ones: the script's next code is its head.

        Args:
            trained: whether each parameter needs a gradient, by name.
        """
        if self._unwatched is None:
            return
        if self._start is None:
            self._start = self._state.follow_steps(self._unwatched)
        self._start.hands_on = self._rounds.lives
        self._start.take(trained, passes)

    def end(self) -> None:
        """The step has ended, or the state of another one was received."""
        if self._start is not None:
            self._start.close()

    def go_on(self) -> None:
        """The step continues in another round, with the state that this process has."""
        if self._start is not None:
            self._start.go_on()

    def load(self, start: Start) -> None:
        """Set what is small to what it was at a pass's start in another process."""
        if self._start is None:
            self._start = self._state.follow_steps(self._unwatched or ())
        self._start.load(start)

    @property
    def trained(self) -> dict[str, bool]:
        """Whether each parameter needed a gradient at the current position, by name; empty between two steps."""
        return self._start.trained if self._start is not None and self._start.open else {}

    def spoiled(self) -> list[str]:
        """Return the names of what has changed since the position, so that its state is gone."""
        found = [] if self._start is None else self._start.spoiled()
        return [name for name in found if name not in self.allowed]

    def pass_begins(self) -> None:
        """The head has ended. If it has changed what is too large to be copied, this process ends with its round."""
        if self._start is None or not self._start.open:
            return
        lives, began = self._rounds.lives, time.monotonic()
        due = self._exact or self._passes < FIRST or (began - self._looked) * SHARE >= self._cost
        self._looks, self._passes = due, self._passes + 1
        if not lives and not self._looks:
            return
        found = self._start.pass_begins(look=due)
        if due:
            self._looked = time.monotonic()
            self._cost = 2 * (self._looked - began)  # here and when the pass ends
        if not lives:
            return
        if found:
            self._ends_with_round(
                f"the script changed {some(found)} between the start of a step and its first micro-batch",
                "Do it right after step.update()",
            )
        elif self._start.blind:
            self._ends_with_round(
                f"what the script does to {some(self._start.blind)} between the start of a step and its first "
                "micro-batch is not known, since its state_dict() is slow, or returns other tensors each time",
                "Return the tensors themselves",
            )

    def _ends_with_round(self, why: str, remedy: str) -> None:
        if self._rounds.world.rank == 0:
            _log.warning(
                "%s: in a step, the state of its start cannot be handed on to other processes. So each process ends "
                "with its round, and a fault costs the steps since the last snapshot. %s",
                why,
                remedy,
            )
        self._rounds.end_with_round()

    def pass_ends(self, number: int, refuse: Callable[[], None]) -> None:
        """The last micro-batch of a pass has ended.

        Args:
            refuse: raises an error that describes some of the changes better.

        Raises:
            UsageError: in exact mode, if the script has changed the state since the first one began.
        """
        found = self._start.changed_in_pass(self.allowed) if self._start is not None and self._looks else []
        if not found:
            return
        refuse()
        what = f"step {number}: between its micro-batches, the script or the model changed {some(found)}"
        if self._exact:
            raise UsageError(
                f"exact=True: {what}, so the result would depend on how many ranks share them.",
                f"{_REMEDY}. What a model changes by design and does not train needs a rule, such as "
                "buffers={name: 'last'}.",
            )
        if not self._warned and self._rounds.world.rank == 0:
            self._warned = True
            _log.warning(
                "%s: the result depends on how many ranks share them, and the ranks may have different values. %s",
                what,
                _REMEDY,
            )
