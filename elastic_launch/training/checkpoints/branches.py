"""Decides which of a training's states is the newest, and the round number under which its successors are saved. Does
no I/O, except for :func:`within`.

States are ordered by (round, step). This round is not the run's round, which begins at 1 in every run: each start of
the training saves under its own number, higher than the numbers of all states that it knows. Two starts of one run
never have the same number, even if they resume from the same state and do not know of each other: the number is ahead
of the run's round by as much as it was when the state was taken.
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
    """The round number that one start of the training saves under.

    Attributes:
        round: the number in the names of checkpoints, and in snapshots.
        ahead: how far it is ahead of the run's own round.
        since: number of the run's first start; states with a lower number were saved by other runs.
    """

    round: int = 0
    ahead: int = 0
    since: int = 0

    def meta(self, run: str) -> dict[str, Any]:
        """Return what a saved state records of the branch, for :func:`following`."""
        return {"run": run, "ahead": self.ahead, "since": self.since}


def following(world_round: int, run: str, meta: dict[str, Any], highest: int) -> Branch:
    """Return the branch that a start of the training saves under.

    Args:
        world_round: number of the run's round, from 1; 0 if rounds are not counted.
        run: the run's id.
        meta: meta of the state that it resumes from; empty if there is none.
        highest: highest round of all known states, whether or not it resumes from them.
    """
    known = meta.get("branch", {})
    same = world_round > 1 and known.get("run") == run
    number = max(world_round + (int(known["ahead"]) if same else 0), highest + 1)
    return Branch(number, number - world_round, int(known["since"]) if same else number)


def within(seconds: float, what: str, function: Callable[[], T]) -> T:
    """Run a function that may hang, for example on a file system whose server is gone, and return its result.

    Args:
        seconds: maximum time to wait.
        what: what the function does, for the error.
        function: runs in a thread.

    Raises:
        TimeoutError: if it takes longer; its thread remains.
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
