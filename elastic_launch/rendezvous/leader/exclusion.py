"""Nodes that are left out of rounds for a while, and hosts all of whose nodes are.

A node is left out if the last :data:`FAULTS` charged failures of the run, other than by SIGKILL, were all of its own
workers, within :data:`WINDOW`, or at once if other ranks have found that it has computed wrong, and only of rounds
that have enough nodes without it.

The host of a newcomer that cannot do what the others do is left out, too. If it is again, it backs off for longer. If
two hosts fail in the same way, or a worker fails as it restores the state of others, new processes of the run's own
nodes would fail, too: no newcomers are admitted, unless a round lacks nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass

from elastic_launch.events.facts import ClosedBy
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.verdict import identity, killed
from elastic_launch.rendezvous.record import FaultyNode, RefusedHost

FAULTS = 3
"""Faults in a row on one node after which it is left out."""

SECONDS = 600.0
"""Seconds for which a node is left out the first time; each further time is twice as long as the one before."""

WINDOW = 3600.0
"""Seconds within which these faults come."""

LONGEST = 7200.0
"""Longest such time, in seconds."""

MOST = 32
"""Most nodes in the control record, the last that were left out and that with the last faults; also most hosts."""

HOST_SECONDS, HOST_LONGEST = 10.0, 3600.0
"""Likewise, for hosts whose nodes could not do what the others do."""


class Exclusion:
    """Counts faults by node, and decides which nodes are left out.

    Args:
        faulty: those of the record, as of when its round was formed; :meth:`stood` says how long ago that was.
    """

    def __init__(self, faulty: Iterable[FaultyNode] = (), now: float = 0.0) -> None:
        self._node_id = ""  # the node of the last fault
        self._faults: list[float] = []  # times of the last faults, all on that node
        self._times: dict[str, int] = {}  # how often each node was left out; the one of the last time comes last
        self._until: dict[str, float] = {}
        self._stood = 0.0
        for node in faulty:
            if node.times:
                self._times[node.node_id], self._until[node.node_id] = node.times, now + node.left
            if node.faults:
                self._node_id, self._faults = node.node_id, [now - ago for ago in node.faults]

    def recorded(self, now: float) -> tuple[FaultyNode, ...]:
        """Return what another leader must know."""
        nodes = dict(self._times)
        faults = tuple(round(max(0.0, now - at), 3) for at in self._faults if at > now - WINDOW)
        if faults:
            nodes[self._node_id] = nodes.pop(self._node_id, 0)  # last, so that it is among those that are recorded
        return tuple(
            FaultyNode(
                node_id,
                times,
                round(max(0.0, self._until.get(node_id, now) - now), 3),
                faults if node_id == self._node_id else (),
            )
            for node_id, times in list(nodes.items())[-MOST:]
        )

    def stood(self, seconds: float) -> None:
        """Note for how long the record had stood when this leader began, as a node says; the longest time counts."""
        if seconds > self._stood:
            self.put_off(self._stood - seconds)
            self._stood = seconds

    def fault(self, node_id: str, now: float) -> float:
        """Count a fault on a node; return for how many seconds it is left out because of that, 0 if it is not."""
        recent = [at for at in self._faults if at > now - WINDOW] if node_id == self._node_id else []
        self._node_id, self._faults = node_id, [*recent, now]
        if len(self._faults) < FAULTS:
            return 0.0
        self._faults = []
        self._times[node_id] = times = self._times.pop(node_id, 0) + 1
        seconds = min(SECONDS * 2.0 ** min(times - 1, 10), LONGEST)
        self._until[node_id] = now + seconds
        return seconds

    def wrong(self, node_id: str, now: float) -> float:
        """Leave out a node that has computed wrong; return for how many seconds."""
        self._times[node_id] = self._times.pop(node_id, 0) + 1
        self._until[node_id] = now + LONGEST
        return LONGEST

    def last(self, now: float) -> str:
        """Return the node of the last fault; empty if there was none within :data:`WINDOW`."""
        return self._node_id if any(at > now - WINDOW for at in self._faults) else ""

    @property
    def node_ids(self) -> Set[str]:
        """Nodes that are, or once were, left out."""
        return self._until.keys()

    def excludes(self, node_id: str, now: float) -> bool:
        """Whether a node is left out now."""
        return now < self._until.get(node_id, now)

    def ends(self) -> list[float]:
        """Times at which nodes are no longer left out; those in the past do not count."""
        return list(self._until.values())

    def put_off(self, seconds: float) -> None:
        """Shift all times by the seconds for which the leader's process was suspended."""
        self._until = {node_id: until + seconds for node_id, until in self._until.items()}
        self._faults = [at + seconds for at in self._faults]


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
        failed = _alike(failure) if failure is not None and says_more else ""
        others = [name for name, x in self._hosts.items() if name != host and failed and x.failure == failed]
        if failure is not None and not self.closed and (others or failure.restoring):
            self.closed = ClosedBy("" if failure.restoring else others[0])
        known = self._hosts.pop(host, None)
        times = 1 if known is None else known.times + 1
        seconds = min(HOST_SECONDS * 2.0 ** min(times - 1, 10), HOST_LONGEST)
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


def _alike(failure: Failure) -> str:
    """Return a short text that is the same for failures of the same kind with the same message, but for numbers.

    A failure that is reported before its worker has exited has no exit code yet.
    """
    text = re.sub(r"\d+", "0", f"{failure.kind} {failure.error or failure.exit_code}")
    return identity(text)
