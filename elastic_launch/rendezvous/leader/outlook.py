"""What happens next in a run, as text for users."""

from __future__ import annotations

from operator import attrgetter

from elastic_launch.rendezvous.leader.phases import Broken, Draining, Ended, Ending, Gathering, Parked, Phase, Running
from elastic_launch.rendezvous.leader.resizing import waiting
from elastic_launch.rendezvous.leader.state import LeaderState

_LEAVING = attrgetter("leaving")
"""A generator takes several times as long, and this is asked for each node that joins."""


def outlook(phase: Phase, state: LeaderState) -> str:
    """Return what happens next, as text."""
    nodes, limits = state.nodes.values(), state.limits
    match phase:
        case Ended():
            return "the run has ended"
        case Ending():
            return "the run ends"
        case Running():
            return _while_running(state)
        case Draining() | Broken():
            first, ends = False, phase.ends
        case Gathering():
            first, ends = phase.after is None, phase.ends
        case Parked():
            first, ends = phase.after is None, ""
    # A node that is still stopping its workers after a broken round counts: it will join the next one.
    there = len(nodes) - sum(map(_LEAVING, nodes))
    if ends:
        return "the run ends"
    if there >= limits.max_nodes:
        return "a round forms"
    if there < limits.min_nodes:
        return f"waiting for nodes: {there} of at least {limits.min_nodes}"
    if not first:
        return "a new round forms"
    return f"the first round forms at {limits.max_nodes} nodes or {state.timing.join_settle:g} s without an arrival"


def _while_running(state: LeaderState) -> str:
    there, most = [node for node in waiting(state.nodes) if not (node.excluded or node.apart)], state.limits.max_nodes
    if not there:
        return "training goes on"
    if len(state.members()) >= most:
        return f"round is full, {len(there)} spare"
    if not state.resizing.pays(state.record.round, most, state.turned, there):
        return "the run ends before a resize pays"
    starting = state.live and all(node.importing or not node.ahead for node in there)
    return "training is resized once workers have started there" if starting else "training is resized"
