"""Which training saved a checkpoint, and which of several is the newest, by the ``branch`` in its meta.

Pure, and needs no torch. A branch is one start of a training: :mod:`elastic_launch.training.checkpoints.branches`
numbers them, such that numbers rise from the state that a start resumes from to its own. They need not rise from one
run to the next: a node of the earlier run may have been through rounds of which the later one cannot know. So the
trainings that take a location are counted, too: a checkpoint of a later one is newer, whatever the numbers are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

MOST_EPOCHS = 2**53
"""No training counts as far; ranks compare these numbers."""

Order = tuple[int, int, int]
"""What checkpoints are ordered by: epoch, round and step."""


def order(meta: Mapping[str, Any], round: int, step: int) -> Order:
    """Return the key by which checkpoints are compared, by meta and name; the highest is the newest."""
    return epoch_of(meta) or 0, round, step


def epoch_of(meta: Mapping[str, Any]) -> int | None:
    """Return how many trainings had taken the location when this one had; None if that is not recorded."""
    epoch = _branch(meta).get("epoch")
    return epoch if isinstance(epoch, int) and 0 <= epoch < MOST_EPOCHS else None


def is_of_run(meta: Mapping[str, Any], run: str) -> bool:
    """Whether the run with that number has saved a state."""
    return bool(run) and _branch(meta).get("run") == run


def same_run(meta: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one run has saved two states."""
    return is_of_run(meta, _branch(other).get("run", ""))


def nonce_in(meta: Mapping[str, Any], round: int, step: int) -> str:
    """Return the nonce in the name of a checkpoint that any node which holds the state may save; empty without branch.

    Equal positions of a training are equal states, so nodes that cannot ask each other give the checkpoint one name.
    """
    branch = _branch(meta)
    if not branch:
        return ""
    known = repr([branch.get("run"), branch.get("epoch"), round, step])
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def leads_to(round: int, step: int, meta: Mapping[str, Any], to_round: int) -> bool:
    """Whether the training went through a state to come to another one, of ``to_round``, as far as is recorded."""
    cuts = dict(_line(meta))
    if round == to_round or not cuts or round < min(cuts):
        return True
    return round in cuts and step <= cuts[round]


def _branch(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    branch = meta.get("branch")
    return branch if isinstance(branch, dict) else {}


def _line(meta: Mapping[str, Any]) -> list[tuple[int, int]]:
    line = _branch(meta).get("line")
    found: list[tuple[int, int]] = []
    for pair in line if isinstance(line, list | tuple) else []:
        match pair:
            case [int(round), int(step)] | (int(round), int(step)):
                found.append((round, step))
    return found
