"""Parses lengths of training and intervals."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from elastic_launch.errors import UsageError

ENDLESS = 2**62
"""``steps_per_epoch`` of a loader without epochs."""

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


def total_steps(until: int | str, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps in a length of training.

    Args:
        until: epochs as a number or ``"3ep"``, or steps as ``"1000ba"`` (Composer's notation: a step is a batch).
        steps_per_epoch: optimizer steps in an epoch, or :data:`ENDLESS`.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(ep|ba|)\s*", str(until))
    if not match or isinstance(until, bool):
        raise UsageError(
            f"until={until!r} is not a length of training.", 'Write epochs as 3 or "3ep", steps as "1000ba".'
        )
    number = int(match[1])
    if match[2] != "ba" and steps_per_epoch == ENDLESS:
        raise UsageError(
            f"{until!r} are epochs, and this loader has none.",
            'Write steps as "1000ba", or give the loader steps_per_epoch.',
        )
    return number if match[2] == "ba" else number * steps_per_epoch


@dataclass(frozen=True, slots=True)
class Interval:
    """How often to do something: an interval in steps or in seconds."""

    steps: int | None
    seconds: float | None

    def __str__(self) -> str:
        return f"{self.seconds:g} s" if self.steps is None else f"{self.steps} steps"

    @staticmethod
    def parse(every: int | str) -> Interval:
        """Parse steps, 50 or ``"50ba"``, or a duration, ``"30s"``, ``"5min"`` or ``"2h"``."""
        number, unit = _parsed(every)
        if unit in ("", "ba") and number >= 1 and number.is_integer():
            return Interval(int(number), None)
        if unit in _UNITS and number > 0:
            return Interval(None, number * _UNITS[unit])
        raise UsageError(
            f"every={every!r} is not an interval.", 'Write steps as 50 or "50ba", a duration as "30s", "5min" or "2h".'
        )

    @staticmethod
    def in_training(every: int | str, steps_per_epoch: int) -> Interval:
        """Parse epochs, 1 or ``"1ep"``, steps, ``"50ba"``, or a duration, ``"30s"``, ``"5min"`` or ``"2h"``."""
        number, unit = _parsed(every)
        if unit in _UNITS:
            return Interval.parse(every)
        if unit in ("", "ep", "ba") and number >= 1 and "." not in str(every):
            return Interval(total_steps(every, steps_per_epoch), None)
        raise UsageError(
            f"every={every!r} is not an interval.", 'Write epochs as "1ep", steps as "50ba", a duration as "5min".'
        )

    def due(self, steps: int, seconds: float) -> bool:
        """Whether it is time, given the steps and seconds since the last time."""
        if self.steps is not None:
            return steps >= self.steps
        assert self.seconds is not None
        return seconds >= self.seconds


def seconds_of(duration: float | str) -> float:
    """Return the seconds of a duration: a number of seconds, or ``"30s"``, ``"5min"`` or ``"2h"``."""
    if isinstance(duration, int | float) and not isinstance(duration, bool) and 0 < duration < math.inf:
        return float(duration)
    number, unit = _parsed(duration) if isinstance(duration, str) else (0.0, "")
    if unit not in _UNITS or number <= 0:
        raise UsageError(f"{duration!r} is not a duration.", 'Write seconds as 30, or "30s", "5min" or "2h".')
    return number * _UNITS[unit]


def _parsed(text: object) -> tuple[float, str]:
    """Return a number and its unit; 0 if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text))
    return (float(match[1]), match[2]) if match else (0.0, "")
