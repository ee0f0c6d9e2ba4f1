"""Decide when a node takes over from the leader that the record names: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_launch.events.facts import Succeeded
from elastic_launch.rendezvous.record import ControlRecord

REFUSED_FOR = 0.5
"""Seconds for which a leader refuses connections before its process counts as gone."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The decision to raise the term.

    Attributes:
        cause: why; ``first`` if no node has led the run.
        dead: incarnation of the node whose process is known to be dead, or empty.
        silent: incarnation of the leader that could not be reached for dead_after, or empty.
    """

    cause: str | Succeeded
    dead: str = ""
    silent: str = ""


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A leader cannot be reached.

    Attributes:
        since: when that was first noticed.
        refused_since: since when its host has refused connections without a break, or None.
        round: the last round that it is known to have formed.
    """

    term: int
    since: float
    refused_since: float | None
    round: int


class Succession:
    """What one node knows about whether the leader is alive.

    Args:
        dead_after: seconds of silence after which a leader counts as dead.
    """

    def __init__(self, incarnation: str, dead_after: float) -> None:
        self._incarnation = incarnation
        self._dead_after = dead_after
        self._doubt: _Doubt | None = None
        self._tried: tuple[int, Takeover] | None = None  # the last attempt, and its term, until it is known to lead
        self._blind = False  # whether the store was unreachable since the last attempt to reach the leader

    def looked(self, seconds: float, *, failed: bool) -> None:
        """Record a read of the store: whether it failed, and how long it took; a slow one counts as failed."""
        self._blind = self._blind or failed or seconds > REFUSED_FOR

    def unreachable(
        self, record: ControlRecord, now: float, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0
    ) -> None:
        """Record that a record's leader cannot be reached; see ``Backend.unreachable``."""
        self._blind = False
        doubt = self._doubt
        if doubt is None or doubt.term != record.term:
            doubt = _Doubt(record.term, now - silent_for, None, max(record.round.number, seen_round))
        # A single refusal between timeouts may come from a firewall. In any mix, dead_after counts from the first.
        since = (now if doubt.refused_since is None else doubt.refused_since) if refused else None
        self._doubt = replace(doubt, refused_since=since)

    def reached(self) -> None:
        """Record that the leader has answered, or that this node leads."""
        self._doubt = self._tried = None

    def leased(self, now: float, wait: float) -> None:
        """Record that voters refuse other leaders for so many seconds more, since they have heard the present one.

        If that was long after this node lost it, it is alive, and only the way from here to it is broken: trying to
        reach it, not taking over, brings this node back. A lost leader is heard by others, too, a little later.
        """
        doubt, heard = self._doubt, now + wait - self._dead_after
        if doubt is not None and heard - doubt.since > self._dead_after / 2:
            self._doubt = replace(doubt, since=heard, refused_since=None)

    def tries(self, term: int, takeover: Takeover) -> None:
        """Record that this node is about to write a record of a term in which it leads."""
        self._tried = term, takeover

    def decide(self, record: ControlRecord, now: float, *, leading: bool) -> Takeover | None:
        """Return why this node must take over from the record's leader, or None if it must not.

        Args:
            leading: whether this node leads, as far as it knows.
        """
        if record.end is not None:
            return None
        if record.leader.incarnation == self._incarnation:
            if leading:
                return None
            if self._tried is not None and self._tried[0] == record.term:
                return self._tried[1]  # its write got no answer, and it has not led in that term
            return Takeover(Succeeded("led"))
        if not record.leader.port:
            # The leader recorded that after its workers had ended.
            return Takeover(Succeeded("left", record.leader.node_id), record.leader.incarnation)
        doubt = self._doubt
        if doubt is None or doubt.term != record.term:
            return None
        if self._blind:
            return None  # perhaps this node was cut off; now that the store answers, try the leader again
        if doubt.refused_since is None and record.round.number > doubt.round:
            # The leader has since formed a round of other nodes, so this node was the unreachable one.
            self._doubt = replace(doubt, since=now, round=record.round.number)
            return None
        waited = now - doubt.since
        dead = doubt.refused_since is not None and now - doubt.refused_since >= REFUSED_FOR
        if not dead and waited < self._dead_after:
            return None
        leader, gone = record.leader.node_id, record.leader.incarnation
        if dead:
            return Takeover(Succeeded("gone", leader), dead=gone)
        return Takeover(Succeeded("unreachable", leader, waited), silent=gone)
