"""Which of a training's states is the newest, and under which number those that follow from it are saved. Pure but for
:func:`within`.

States are ordered by (round, step). The round is not that of the run, which begins at 1 in every run: each start of
the training saves under a number of its own, higher than those of all states that it knows. Two starts of one run never
have the same number, also where they go on from the same state and know nothing of each other: the number is ahead of
the run's round by as much as it was when the state was taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_launch.errors import ElasticLaunchError

__all__ = ["Branch", "following", "within"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Branch:
    """What one start of the training saves under.

    Attributes:
        round: in the names of checkpoints, and in snapshots.
        ahead: of the run's own round, by so many.
        since: number of the run's first start: what has a lower one was saved by other runs.
    """

    round: int = 0
    ahead: int = 0
    since: int = 0

    def meta(self, run: str) -> dict[str, Any]:
        """What a state keeps of it, for :func:`following`."""
        return {"run": run, "ahead": self.ahead, "since": self.since}


def following(world_round: int, run: str, meta: dict[str, Any], highest: int) -> Branch:
    """Return what a start saves under.

    Args:
        world_round: number of the run's round, from 1; 0 where nobody counts them.
        run: the run's id.
        meta: of the state that it goes on from; empty if there is none.
        highest: round of all states that are known, whether it goes on from them or not.
    """
    known = meta.get("branch", {})
    same = world_round > 1 and known.get("run") == run
    number = max(world_round + (int(known["ahead"]) if same else 0), highest + 1)
    return Branch(number, number - world_round, int(known["since"]) if same else number)


def within(seconds: float, what: str, function: Callable[[], T]) -> T:
    """Return what a function returns that may hang, as one that asks a file system whose server is gone.

    Args:
        what: it does, for the error.

    Raises:
        TimeoutError: if it does; its thread stays.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except (ElasticLaunchError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="storage", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"{what} took more than {seconds:g} s")
    if errors:
        raise errors[0]
    if not results:
        raise ElasticLaunchError(f"{what} failed; the traceback is above")
    return results[0]
