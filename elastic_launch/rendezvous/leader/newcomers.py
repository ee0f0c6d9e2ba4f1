"""Newcomers that cannot do what the others do: which they are, and for how long their hosts are left out.

A newcomer is a node that has not completed a step in this run, in a round with members that had when it was formed.
What only newcomers cannot do does not fail the run: they are left out, and it goes on.

A host that is left out again backs off for longer. If two hosts fail in the same way, or a worker fails as it restores
the state of others, new processes of the run's own nodes would fail, too: no newcomers are admitted, unless a round
lacks nodes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_launch.errors import ExitCode
from elastic_launch.events.facts import ClosedBy, WorkerArguments
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.nodes import Node
from elastic_launch.rendezvous.leader.restart_budget import LONG
from elastic_launch.rendezvous.leader.verdict import Kind, killed, kind_of, own_code, root_cause
from elastic_launch.rendezvous.record import RefusedHost, Round

SECONDS = 10.0
"""Seconds for which a host is left out the first time; each further time in a row is twice as long as the last."""

LONGEST = 3600.0
"""Longest such time, in seconds."""

MOST = 32
"""Most hosts in the control record: those that were left out last."""


def newcomers_failures(
    formed: Round, nodes: Mapping[str, Node], failures: Sequence[tuple[float, Failure]], *, counts: bool
) -> dict[str, Failure]:
    """Return the newcomers of a broken round that caused its end, each with its failure; empty if others did, too.

    Args:
        failures: each with the leader's time of receipt.
        counts: whether the script reports its steps; else it is believed to train once it has run for long.
    """
    members = {member.node_id: nodes.get(member.node_id) for member in formed.members}
    veterans = {node_id for node_id, node in members.items() if node is not None and node.veteran}
    trained = {node_id for node_id, node in members.items() if node is not None and node.trained}
    if not veterans:
        return {}
    found: dict[str, list[tuple[float, Failure]]] = {}
    for at, failure in failures:
        if failure.alike:
            for node_id in _apart(formed, veterans, failure.alike):
                found.setdefault(node_id, []).append((at, failure))
        elif is_own(failure):
            runs = not counts and failure.ran >= LONG
            if failure.node_id in veterans | trained or (failure.trained or 0) > 0 or runs:
                return {}
            found.setdefault(failure.node_id, []).append((at, failure))
    chosen: dict[str, Failure] = {}
    for node_id, of_node in found.items():
        first = root_cause([item for item in of_node if item[1].node_id == node_id] or of_node)
        assert first is not None
        chosen[node_id] = first
    return chosen


def is_own(failure: Failure) -> bool:
    """Whether a worker has failed by itself, as far as is known, and not because another one had."""
    return kind_of(failure).is_fault and not (failure.symptom or failure.supposed or failure.alive)


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


@dataclass(slots=True)
class _Host:
    times: int
    until: float
    failure: str


class Refusals:
    """The hosts that are left out, and whether newcomers are admitted at all.

    Args:
        refused: those of the record, as of when this leader's term began.

    Attributes:
        closed: why no newcomers are admitted; None if they are.
    """

    def __init__(self, refused: Iterable[RefusedHost] = (), closed: ClosedBy | None = None, now: float = 0.0) -> None:
        self._hosts = {x.host: _Host(x.times, now + x.left, x.failure) for x in refused}
        self.closed = closed

    def recorded(self, now: float) -> tuple[RefusedHost, ...]:
        """Return what another leader must know."""
        return tuple(
            RefusedHost(host, x.times, round(max(0.0, x.until - now), 3), x.failure)
            for host, x in list(self._hosts.items())[-MOST:]
        )

    def refuse(self, host: str, failure: Failure | None, now: float) -> float:
        """Leave a host out; return for how many seconds.

        Args:
            failure: what failed on it; None if its workers only have other arguments. These say nothing about other
                hosts, nor does SIGKILL, which comes from outside.
        """
        says_more = failure is not None and not failure.alike and not killed(failure)
        failed = _identity(failure) if failure is not None and says_more else ""
        others = [name for name, x in self._hosts.items() if name != host and failed and x.failure == failed]
        if failure is not None and not self.closed and (others or failure.restoring):
            self.closed = ClosedBy("" if failure.restoring else others[0])
        known = self._hosts.pop(host, None)
        times = 1 if known is None else known.times + 1
        seconds = min(SECONDS * 2.0 ** min(times - 1, 10), LONGEST)
        self._hosts[host] = _Host(times, now + seconds, failed)
        return seconds

    def trains(self, host: str) -> None:
        """Note that a newcomer on a host has completed a step: new processes can."""
        self._hosts.pop(host, None)
        self.closed = None

    @property
    def some(self) -> bool:
        """Whether any host is, or once was, left out."""
        return bool(self._hosts or self.closed)

    def bars(self, host: str, now: float) -> bool:
        """Whether a host is left out now."""
        return host in self._hosts and now < self._hosts[host].until

    def left(self, host: str, now: float) -> float:
        """Seconds for which a host is still left out."""
        return max(0.0, self._hosts[host].until - now) if host in self._hosts else 0.0

    def ends(self) -> list[float]:
        """Times at which hosts are no longer left out; those in the past do not count."""
        return [x.until for x in self._hosts.values()]

    def put_off(self, seconds: float) -> None:
        """Shift all times by the seconds for which the leader's process was suspended."""
        for x in self._hosts.values():
            x.until += seconds


def _identity(failure: Failure) -> str:
    """Return a short text that is the same for failures of the same kind with the same message, but for numbers.

    A failure that is reported before its worker has exited has no exit code yet.
    """
    text = re.sub(r"\d+", "0", f"{failure.kind} {failure.error or failure.exit_code}")
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
