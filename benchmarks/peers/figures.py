"""What a fault or a change cost, from the lines of steps that a training has noted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jobs import Figures, Record, life

USUAL = 10
"""Steps before the event that show how long a usual step takes."""


def figures(records: Sequence[Record], since: float, world: int) -> Figures:
    """What an event cost, by the steps of rank 0. A new step is one with a higher number than any before it.

    Args:
        records: in the order in which they were noted.
        since: when the event happened.
        world: the size of the world that trains afterwards.

    Returns:
        ``pause``: if training went on, the longest time between two new steps until the world is whole, less a usual
        step; ``whole``: seconds from the event to the first new step of the whole world, if there was one;
        ``again``: steps done again.
    """
    new: list[Record] = []
    old = {life(x) for x in records if x["clock"] <= since}
    again, lives = 0, set(old)
    for record in records:
        if record["step"] == 0 or record["rank"] != 0:
            continue
        done = new[-1]["step"] if new else 0
        if life(record) not in lives:
            lives.add(life(record))
            again += max(0, done - record["step"] + 1)
        if record["step"] > done:
            new.append(record)
    before = [x["clock"] for x in new if x["clock"] <= since]
    usual = (before[-1] - before[-1 - USUAL]) / USUAL
    after = [x for x in new if x["clock"] > since]
    whole = next((x["clock"] for x in after if x["world"] == world and life(x) not in old), None)
    clocks = [before[-1], *(x["clock"] for x in after if whole is None or x["clock"] <= whole)]
    found = {"again": float(again)}
    # The step that was under way at the event may still be done.
    if any(life(x) not in old for x in after):
        found["pause"] = max(later - earlier for earlier, later in pairwise(clocks)) - usual
    if whole is not None:
        found["whole"] = whole - since
    return found
