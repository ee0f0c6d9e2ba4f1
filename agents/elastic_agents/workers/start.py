"""Starts a round's workers one after the other, each as soon as a process is available for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from elastic_launch.clock import Clock
from elastic_launch.contract import Placement
from elastic_launch.system.descriptors import scarce

__all__ = ["StaggeredStart", "while_scarce"]

T = TypeVar("T")

SCARCE = 3.0
"""Seconds for which starting a worker is retried while no descriptors are left."""


@dataclass(slots=True)
class StaggeredStart:
    """A round whose workers are being started.

    Attributes:
        cause: why they are started.
        left: placements of the workers that are not started yet, in order.
        envs: environments by local rank.
    """

    number: int
    cause: str
    left: list[Placement]
    envs: dict[int, dict[str, str]]

    def ending(self, local_ranks: Collection[int] | None) -> list[int]:
        """Return the local ranks of the given workers (None: all) that are not started yet."""
        return [place.local_rank for place in self.left if local_ranks is None or place.local_rank in local_ranks]


def while_scarce(start: Callable[[], T], clock: Clock) -> T:
    """Start a worker, or open what a round needs; retry for a moment while descriptors are lacking.

    Raises:
        OSError: if that is impossible.
    """
    until = clock.now() + SCARCE
    while True:
        try:
            return start()
        except OSError as error:
            if not scarce(error) or clock.now() >= until:
                raise
            time.sleep(0.1)
