"""Newcomers that cannot do what the others do: which they are. ``exclusion`` leaves their hosts out for a while.

A newcomer is a node that has not completed a step in this run, in a round with members that had when it was formed.
What only newcomers cannot do does not fail the run: they are left out, and it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import WorkerArguments
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.leader.restart_budget import LONG
from elastic_launch.rendezvous.leader.verdict import Kind, is_own, kind_of, own_code, root_cause
from elastic_launch.rendezvous.record import Round


def newcomers_failures(
    formed: Round, nodes: Mapping[str, Node], failures: Sequence[tuple[float, Failure]], *, counts: bool, host: str = ""
) -> dict[str, Failure]:
    """Return the newcomers of a broken round that caused its end, each with its failure; empty if others did, too.

    Args:
        failures: each with the leader's time of receipt.
        counts: whether the script reports its steps; else it is believed to train once it has run for long.
        host: the node without which the run cannot go on: what it cannot do fails the run.
    """
    members = {member.node_id: nodes.get(member.node_id) for member in formed.members}
    veterans = {node_id for node_id, node in members.items() if node is not None and node.veteran}
    trained = {node_id for node_id, node in members.items() if node is not None and node.trained}
    if not veterans:
        return {}
    stay = veterans | trained | {host}
    found: dict[str, list[tuple[float, Failure]]] = {}
    for at, failure in failures:
        if failure.alike:
            for node_id in _apart(formed, veterans, failure.alike):
                if node_id != host:
                    found.setdefault(node_id, []).append((at, failure))
        elif is_own(failure):
            runs = not counts and failure.ran >= LONG
            if failure.node_id in stay or (failure.trained or 0) > 0 or runs:
                return {}
            found.setdefault(failure.node_id, []).append((at, failure))
    chosen: dict[str, Failure] = {}
    for node_id, of_node in found.items():
        first = root_cause([item for item in of_node if item[1].node_id == node_id] or of_node)
        assert first is not None
        chosen[node_id] = first
    return chosen


def _apart(formed: Round, veterans: Iterable[str], alike: Sequence[int]) -> list[str]:
    """Return the newcomers with other arguments than the others; none if these differ among themselves."""
    values = {
        member.node_id: {alike[place.rank] for place in formed.ranks_of(index) if place.rank < len(alike)}
        for index, member in enumerate(formed.members)
    }
    right = set[int]().union(*(values[node_id] for node_id in veterans))
    return [node_id for node_id, theirs in values.items() if len(right) == 1 and not theirs <= right]


def code_of(failure: Failure, max_restarts: int) -> int:
    """Return the exit code of a node that is left out because of a failure."""
    kind = kind_of(failure)
    if failure.alike or kind is Kind.FATAL:
        return ExitCode.DO_NOT_RETRY
    if kind is Kind.STARTUP and max_restarts:
        return ExitCode.STARTUP_FAILURE
    return own_code(failure.exit_code)


def difference(node: str, theirs: str, ours: str) -> WorkerArguments | None:
    """Return in what a node's workers' arguments differ from ours; None if they do not, or one of them is not known."""
    if not theirs or not ours or theirs == ours:
        return None
    try:
        mine, other = json.loads(ours), json.loads(theirs)
        for name in dict.fromkeys([*mine, *other]):
            if mine.get(name) != other.get(name):
                return WorkerArguments(node, name, *(str(has.get(name, "none")) for has in (other, mine)))
        return None
    except (ValueError, AttributeError, TypeError):
        pass  # a digest of arguments that are too long, or a worker's own invention
    return WorkerArguments(node)
