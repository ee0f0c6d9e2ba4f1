"""The start of a round's workers, one after the other, each as soon as there is a process for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from elastic_launch.clock import Clock
from elastic_launch.contract import Placement
from elastic_launch.system.descriptors import scarce

__all__ = ["StaggeredStart", "while_scarce"]

SCARCE = 3.0
"""Seconds for which a worker is tried to be started while no descriptors are left."""


@dataclass(slots=True)
class StaggeredStart:
    """A round of which workers are to be started.

    Attributes:
        cause: of their start.
        left: where those belong that are not started yet, in order.
        envs: by local rank.
    """

    number: int
    cause: str
    left: list[Placement]
    envs: dict[int, dict[str, str]]

    def ending(self, local_ranks: Collection[int] | None) -> list[int]:
        """Return those of some workers (None: of all) that are not started yet, by local rank."""
        return [place.local_rank for place in self.left if local_ranks is None or place.local_rank in local_ranks]


def while_scarce(start: Callable[[], int], clock: Clock) -> int:
    """Start a worker; try again for a moment where descriptors are lacking.

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
