"""A process' place in a round, and the wait for it in a process that was started ahead.

Such a process has no ranks, no world size and no address of a store until it uses the world for the first time. Then it
waits for its agent, see :class:`elastic_launch.contract.Ahead`. Before that, it may rehearse a step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_launch.contract import ENV_AHEAD, ENV_LOCAL_RANK, Ahead, Place, round_environment
from elastic_launch.errors import ElasticLaunchError
from elastic_launch.training.link import AgentLink
from elastic_launch.training.stopping import DrainedExit

_joins: list[Callable[[], object]] = []
_lock = threading.RLock()
_rehearsal = threading.RLock()
_rehearses = False  # by the thread that holds this lock


class NoPlaceError(RuntimeError):
    """The script has used the world in a rehearsal, in which there is none."""


def is_ahead() -> bool:
    """Whether this process was started ahead, and has no place yet."""
    return os.environ.get(ENV_AHEAD) == "1"


@contextmanager
def joining(function: Callable[[], object]) -> Iterator[None]:
    """Within this context, :func:`find_place` calls a function that waits for the place and joins the round."""
    _joins.append(function)
    try:
        yield
    finally:
        _joins.remove(function)


@contextmanager
def rehearsing() -> Iterator[None]:
    """Within this context, this thread cannot use the world, and other threads wait with that for its end."""
    global _rehearses
    with _rehearsal:
        _rehearses = True
        try:
            yield
        finally:
            _rehearses = False


def refuse_in_rehearsal() -> None:
    """Refuse a use of the world in a rehearsal. Call it before taking any lock: other threads may wait here."""
    with _rehearsal:
        if _rehearses:
            raise NoPlaceError("This process has no place in a round yet: it only rehearses a step.")


def find_place() -> None:
    """Wait for a place if this process has none; each use of the world begins with this.

    Raises:
        Drained: if there is none for this process.
        ElasticLaunchError: if the agent cannot be reached.
        NoPlaceError: in a rehearsal.
    """
    if not is_ahead():
        return
    refuse_in_rehearsal()
    with _lock:
        if not is_ahead():
            return  # another thread has waited for it
        if _joins:
            _joins[-1]()
        else:
            link = wait_for_place()
            link.watch(None)  # the script goes on with what may take long
            link.close()


def wait_for_place(arguments: str = "") -> AgentLink:
    """Wait for the place, and describe it to this process' environment; return the connection to the agent.

    Args:
        arguments: see :class:`elastic_launch.contract.Ready`.
    """
    link = AgentLink.ahead(int(os.environ.get(ENV_LOCAL_RANK) or os.environ["LOCAL_RANK"]))
    if not link.present:
        raise ElasticLaunchError(
            "This process was started ahead of its place in a round, and its agent cannot be reached.",
            "The agent has ended. It starts such a process with everything else that it needs.",
        )
    link.say(Ahead(arguments))
    place = link.wait_for_place()
    if place is None:
        link.close()
        raise DrainedExit(0)
    take(place)
    return link


def take(place: Place) -> None:
    """Describe a new place to this process' environment, as its agent does for a process that it starts."""
    os.environ.update(
        round_environment(
            place.placement,
            place.round,
            run_number=place.run_number,
            restarts=place.restarts,
            max_restarts=place.max_restarts,
            reason=place.reason,
        )
    )
    os.environ.pop(ENV_AHEAD, None)
