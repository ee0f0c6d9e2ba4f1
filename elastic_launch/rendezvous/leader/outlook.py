"""What happens next in a run, as text for users."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastic_launch.config.launch_config import Limits
from elastic_launch.rendezvous.leader.phases import Broken, Draining, Ended, Ending, Gathering, Parked, Phase, Running
from elastic_launch.rendezvous.leader.types import Node

__all__ = ["outlook"]


def outlook(phase: Phase, nodes: Collection[Node], limits: Limits, join_settle: float, pays: Callable[[], bool]) -> str:
    """Return what happens next, as text.

    Args:
        nodes: the nodes that the leader has a link to.
        pays: whether a resize for the waiting nodes would pay off.
    """
    match phase:
        case Ended():
            return "the run has ended"
        case Ending():
            return "the run ends"
        case Draining():
            return "the run ends" if phase.ends else "a round with it follows"
        case Running():
            return _while_running(nodes, limits, pays)
        case Broken():
            first, ends = False, phase.ends
        case Gathering():
            first, ends = phase.after is None, phase.ends
        case Parked():
            first, ends = phase.after is None, ""
    # A node that is still stopping its workers after a broken round counts: it will join the next one.
    waiting = sum(not node.leaving for node in nodes)
    if ends:
        return "the run ends"
    if waiting >= limits.max_nodes:
        return "a round forms"
    if waiting < limits.min_nodes:
        return f"waiting for nodes: {waiting} of at least {limits.min_nodes}"
    if not first:
        return "a new round forms"
    return f"the first round forms at {limits.max_nodes} nodes or {join_settle:g} s without an arrival"


def _while_running(nodes: Collection[Node], limits: Limits, pays: Callable[[], bool]) -> str:
    waiting = sum(not node.leaving and not node.active for node in nodes)
    if not waiting:
        return "training goes on"
    if sum(node.active for node in nodes) < limits.max_nodes:
        return "training is resized" if pays() else "the run ends before a resize pays"
    return f"round is full, {waiting} spare"
