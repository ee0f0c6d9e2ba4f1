"""Decides the round number under which a training's states are saved, so that the newest is known. Does no I/O.

States are ordered by (round, step). This round is not the run's round, which begins at 1 in every run: each start of
the training saves under its own number, higher than the numbers of all states that it knows. Two starts of one run
never have the same number, even if they resume from the same state and do not know of each other: the number is ahead
of the run's round by as much as it was when the state was taken.

Of another run's states that are in memory only, nothing is known. So durable states are ordered by the training's
epoch first; see :mod:`elastic_launch.snapshot.storage.lineage`. A node that joins late may bring a location of its own,
in which earlier runs have counted further: the run's epoch rises above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_launch.snapshot.storage.lineage import is_of_run

LONGEST_LINE = 32
"""Number of earlier branches that a state names."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The round number that one start of the training saves under."""

    round: int = 0  # the number in the names of checkpoints, and in snapshots
    ahead: int = 0  # how far it is ahead of the run's own round
    run: str = ""  # the number of the run
    begins: bool = True  # whether it resumes from no state of the run
    epoch: int = 0  # how many trainings have taken the location, up to this one
    line: tuple[tuple[int, int], ...] = ()  # the states that it and those before it resumed from: round and step
    base: tuple[int, str] | None = None  # step and place of the durable state that the run resumed from last

    def meta(self) -> dict[str, Any]:
        """Return what a saved state records of the branch, for :func:`following`."""
        known: dict[str, Any] = {"run": self.run, "ahead": self.ahead, "epoch": self.epoch}
        return known | {"line": [list(state) for state in self.line], "base": self.base and list(self.base)}


def following(
    world_round: int,
    run: str,
    meta: dict[str, Any],
    highest: int,
    *,
    parent: tuple[int, int] | None = None,
    base: tuple[int, str] | None = None,
    taken: int = 0,
) -> Branch:
    """Return the branch that a start of the training saves under.

    Args:
        world_round: number of the run's round, from 1; 0 if rounds are not counted.
        run: the run's own number.
        meta: meta of the state that it resumes from; empty if there is none.
        highest: highest round of all known states, whether or not it resumes from them.
        parent: round and step of the state that it resumes from; None if there is none.
        base: step and place of that state if it is durable.
        taken: the highest epoch in the locations that are to be used; 0 if there are none.
    """
    known = meta.get("branch", {})
    same = is_of_run(meta, run)
    number = max(world_round + (int(known["ahead"]) if same else 0), highest + 1)
    line = [*((int(round), int(step)) for round, step in known.get("line", ())), *([parent] if parent else [])]
    if base is None and same and known["base"] is not None:
        base = int(known["base"][0]), str(known["base"][1])
    return Branch(
        number,
        number - world_round,
        run,
        not same,
        int(known["epoch"]) if same and int(known["epoch"]) >= taken else taken + 1,
        tuple(line[-LONGEST_LINE:]),
        base,
    )
