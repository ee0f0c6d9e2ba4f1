"""Decides the round number under which a training's states are saved, so that the newest is known. Does no I/O.

States are ordered by (round, step). This round is not the run's round, which begins at 1 in every run: each start of
the training saves under its own number, higher than the numbers of all states that it knows. Two starts of one run
never have the same number, even if they resume from the same state and do not know of each other: the number is ahead
of the run's round by as much as it was when the state was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Branch:
    """The round number that one start of the training saves under."""

    round: int = 0  # the number in the names of checkpoints, and in snapshots
    ahead: int = 0  # how far it is ahead of the run's own round
    since: int = 0  # number of the run's first start; states with a lower number were saved by other runs

    def meta(self, run: str) -> dict[str, Any]:
        """Return what a saved state records of the branch, for :func:`following`."""
        return {"run": run, "ahead": self.ahead, "since": self.since}


def following(world_round: int, run: str, meta: dict[str, Any], highest: int) -> Branch:
    """Return the branch that a start of the training saves under.

    Args:
        world_round: number of the run's round, from 1; 0 if rounds are not counted.
        meta: meta of the state that it resumes from; empty if there is none.
        highest: highest round of all known states, whether or not it resumes from them.
    """
    known = meta.get("branch", {})
    same = world_round > 1 and known.get("run") == run
    number = max(world_round + (int(known["ahead"]) if same else 0), highest + 1)
    return Branch(number, number - world_round, int(known["since"]) if same else number)
