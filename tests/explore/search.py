"""Visits all states of a world, breadth first, and shows the shortest path to a violation."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from explore.states import drop, fork

__all__ = [
    "MET",
    "Found",
    "Label",
    "Moves",
    "QuietError",
    "Violation",
    "WorldState",
    "explore",
    "explore_beside",
    "meet",
    "play",
]

Label = tuple[Any, ...]
"""A move: what happens, and to what."""

Moves = list[tuple[Label, bool]]
"""Moves in the order of the fair schedule; False: a fault, or something else that need not happen."""


MET: dict[tuple[str, str], int] = {}
"""How often each event came in each phase of a machine, over all worlds of this process."""


def meet(phase: str, event: str) -> None:
    """Count an event that comes to a machine in a phase."""
    MET[phase, event] = MET.get((phase, event), 0) + 1


class QuietError(Exception):
    """A move does not change anything."""


class WorldState(Protocol):
    """A state that can move on; a move that breaks an invariant raises."""

    def moves(self) -> Moves: ...

    def do(self, label: Label) -> None: ...

    def identity(self) -> int: ...

    def goal(self) -> bool: ...

    def describe(self) -> str: ...


class Violation(AssertionError):
    """An invariant or progress is violated.

    Attributes:
        path: the shortest one to it.
    """

    def __init__(self, path: list[Label], why: str) -> None:
        moves = "\n".join(f"        {label!r}," for label in path)
        super().__init__(f"{why}\nas a test:\n    play(world, [\n{moves}\n    ])")
        self.path, self.why = path, why


@dataclass
class Found:
    """What was visited.

    Attributes:
        whole: whether all states within the world's bounds were visited.
    """

    states: int = 0
    moves: int = 0
    depth: int = 0
    ends: int = 0
    seconds: float = 0.0
    whole: bool = False
    parents: dict[int, tuple[int, Label]] = field(default_factory=dict, repr=False)

    def path(self, state: int) -> list[Label]:
        found: list[Label] = []
        while state in self.parents:
            state, label = self.parents[state]
            found.append(label)
        return found[::-1]


def play(world: WorldState, path: list[Label]) -> None:
    """Make these moves, each of which must be possible."""
    for label in path:
        assert label in [move for move, _ in world.moves()], f"{label} is not possible"
        world.do(label)


def explore_beside(start: WorldState, most: int, *, seconds: float = math.inf) -> Found:
    """From each state of the fair schedule take each move that need not be, and explore so many states after it.

    Args:
        seconds: CPU time after which no further move is tried; ``whole`` says whether all were.

    Raises:
        Violation: as :func:`explore`.
    """
    total, began = Found(whole=True), time.process_time()
    world, made = fork(start)
    path: list[Label] = []
    following: Label | None = ()
    while following is not None:
        following = None
        for label, fair in world.moves():
            child, others = fork(world)
            if (fair and following is not None) or not _try(total, 0, child, label, path):
                continue
            if fair:
                following = label
                continue
            if time.process_time() - began > seconds:
                total.whole = False
                continue
            try:
                found = explore(child, most)
            except Violation as error:
                raise Violation([*path, label, *error.path], error.why) from error.__cause__
            drop(others)
            total.states, total.moves, total.ends = (
                total.states + found.states,
                total.moves + found.moves,
                total.ends + found.ends,
            )
        if following is not None:
            world.do(following)
            path.append(following)
            total.depth = len(path)
    drop(made)
    total.seconds = time.process_time() - began
    return total


class _Parent:
    """A visited state that others are reached from; it is kept until all of these are visited, which are copies."""

    def __init__(self, world: WorldState, made: list[Any]) -> None:
        self.world, self.made = world, made
        self.children = 0

    def child(self, label: Label | None) -> tuple[WorldState, list[Any]]:
        world: WorldState
        world, made = fork(self.world)
        self.children -= 1
        if not self.children:
            drop(self.made)
        if label is not None:
            world.do(label)
        return world, made


_Waiting = tuple[int, int, _Parent, Label | None]
"""A state to visit, its distance, and how to reach it."""

_Fair = tuple[int, Label] | None
"""What follows a state by the fair schedule, and by which move; None at the goal."""


def explore(start: WorldState, most: int, *, longest: int = 400, seconds: float = math.inf) -> Found:
    """Visit states in the order of their distance, at most so many.

    From each visited state the fair schedule must lead to the world's goal.

    Args:
        longest: most moves of the fair schedule to the goal.
        seconds: CPU time after which no further state is visited.

    Raises:
        Violation: an invariant was broken, or no progress is made.
    """
    found, began = Found(), time.process_time()
    collects = gc.isenabled()
    gc.disable()  # it would look through all states that are kept, again and again
    try:
        first, root = start.identity(), _Parent(*fork(start))
        root.children = 1
        waiting: deque[_Waiting] = deque([(first, 0, root, None)])
        seen = {first}
        fair: dict[int, _Fair] = {}
        left: dict[int, tuple[WorldState, list[Any]]] = {}
        while waiting and found.states < most and time.process_time() - began < seconds:
            state, depth, parent, label = waiting.popleft()
            found.states, found.depth = found.states + 1, depth
            here = _Parent(*parent.child(label))
            fair[state] = _expand(found, state, depth, here, seen, waiting)
            found.ends += fair[state] is None
            if not here.children:
                drop(here.made)
        found.whole = not waiting
        if waiting:
            follow = {following[0] for following in fair.values() if following is not None} - fair.keys()
            for state, _, parent, label in waiting:
                if state in follow:
                    left[state] = parent.child(label)
        _assert_progress(found, fair, left, longest)
    finally:
        if collects:
            gc.enable()
    found.seconds = time.process_time() - began
    return found


def _expand(found: Found, state: int, depth: int, here: _Parent, seen: set[int], waiting: deque[_Waiting]) -> _Fair:
    following: _Fair = None
    for label, fair in here.world.moves():
        child, made = fork(here.world)
        if not _try(found, state, child, label):
            drop(made)
            continue
        found.moves += 1
        reached = child.identity()
        drop(made)
        if following is None and fair:
            following = reached, label
        if reached not in seen:
            seen.add(reached)
            found.parents[reached] = state, label
            waiting.append((reached, depth + 1, here, label))
            here.children += 1
    if following is None and not here.world.goal():
        raise Violation(found.path(state), f"something waits for ever:\n{here.world.describe()}")
    return following


def _try(found: Found, state: int, world: WorldState, label: Label, path: Sequence[Label] = ()) -> bool:
    try:
        world.do(label)
    except QuietError:
        return False
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].line
        raise Violation([*path, *found.path(state), label], f"{type(error).__name__}: {error or where}") from error
    return True


def _assert_progress(
    found: Found, fair: dict[int, _Fair], left: dict[int, tuple[WorldState, list[Any]]], longest: int
) -> None:
    """Follow the fair schedule from all visited states to the goal, also where it leaves them."""
    good: set[int] = set()
    for begin in list(fair):
        trail: dict[int, Label] = {}
        state = begin
        while state not in good:
            if state in trail or len(trail) >= longest:
                why = f"no progress: the fair schedule comes to no end, and goes on from here by {[*trail.values()]}"
                raise Violation(found.path(begin), why)
            if state not in fair:
                fair[state] = _follow(found, state, fair, left)
            following = fair[state]
            if following is None:
                break
            trail[state] = following[1]
            state = following[0]
        good.update(trail)


def _follow(found: Found, state: int, fair: dict[int, _Fair], left: dict[int, tuple[WorldState, list[Any]]]) -> _Fair:
    world, made = left.pop(state)
    try:
        for label, must in world.moves():
            if not must:
                continue
            child, others = fork(world)
            if _try(found, state, child, label):
                reached = child.identity()
                if reached not in found.parents and reached not in fair:
                    found.parents[reached] = state, label
                left.setdefault(reached, (child, others))
                return reached, label
        if not world.goal():
            raise Violation(found.path(state), f"something waits for ever:\n{world.describe()}")
        return None
    finally:
        drop(made)
