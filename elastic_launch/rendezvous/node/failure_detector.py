"""How long the leader has been silent, and what follows: pure arithmetic on the node's own clock.

It decides two things. Whether the *leader* is lost: here a gap between the node's own turns counts only up to a
limit, since a node that was itself frozen knows nothing about the others. Whether the others may consider *this node*
lost: here all time counts, above all the time for which it was frozen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic_launch.events.facts import Isolation

TURN_CAP = 2.0
"""Most seconds of the leader's silence that a gap between two turns of the node counts."""

CUT_OFF = 0.8
"""Fraction of dead_after after which a node considers itself cut off.

The rest is the interval of its beats: the leader started counting that much earlier, at the last beat it received.
"""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The others may continue without this node: it was unreachable for too long, or frozen.

    Attributes:
        certain: whether the leader must consider it dead.
        leader: incarnation of the leader's node; empty if this node led and no longer leads.
    """

    reason: Isolation
    certain: bool = False
    leader: str = ""


class FailureDetector:
    """Measures how long a node's leader has been silent."""

    def __init__(self, dead_after: float, beat: float) -> None:
        self._dead_after = dead_after
        self._cap = min(TURN_CAP, dead_after / 2)
        self._silence = 0.0
        self._heard: float | None = None
        self._heard_before: float | None = None  # in an earlier turn
        self._sure: float | None = None  # when it last verified that it leads, while it does
        self._turned: float | None = None
        self._cut_off = False
        self._told = False
        self.beat = min(beat, (1 - CUT_OFF) * dead_after)

    def linked(self, now: float) -> None:
        """Start a new link, with its silence at 0."""
        self._silence, self._turned = 0.0, now

    def turn(self, now: float) -> float:
        """Note a turn of the node's thread; call this before it processes what has been received.

        Returns:
            Seconds since its last turn.
        """
        gap = now - self._turned if self._turned is not None else 0.0
        self._silence += min(gap, self._cap)
        self._turned = now
        return gap

    def heard(self, now: float) -> None:
        """Note that the leader sent something, in the turn that just began."""
        self._silence, self._heard_before, self._heard = 0.0, self._heard, now

    def heard_since(self, moment: float) -> bool:
        """Whether the leader has sent something after a time; callable from any thread.

        What is received in one turn may have been sent while this node was frozen, so it takes two.
        """
        return self._heard_before is not None and self._heard_before > moment

    def formed(self) -> None:
        """Note that a round begins: a cut-off that was reported before belongs to the previous round."""
        self._told = False

    @property
    def leader_lost(self) -> bool:
        """Whether the link has been silent for dead_after."""
        return self._silence >= self._dead_after

    def deaf_for(self, now: float) -> float:
        """Seconds since the leader last sent something on any link; 0 if it never did."""
        return now - self._heard if self._heard is not None else 0.0

    def judge(self, now: float, gap: float = 0.0, unsure: float | None = None) -> CutOff | None:
        """Return, once per silence and round, that the others may consider this node lost now or soon.

        Args:
            gap: seconds for which the node's thread did not turn.
            unsure: if this node leads, seconds since it last verified that it still does. Messages from the leader in
                its own process prove nothing: another one may have been elected.
        """
        limit = CUT_OFF * self._dead_after
        if unsure is not None:
            self._sure = now - unsure
        elif self._sure is not None:  # another node leads, perhaps since then; the leader here was heard for longer
            self._heard, self._sure = min(self._sure, now if self._heard is None else self._heard), None
        seconds = max(gap, self.deaf_for(now)) if unsure is None else unsure
        told, self._cut_off = self._told, seconds >= limit
        self._told = self._cut_off
        if told or not self._cut_off:
            return None
        if gap >= limit:
            reason = Isolation("frozen", gap)
        elif unsure is None:
            reason = Isolation("silent", seconds)
        else:
            reason = Isolation("led") if math.isinf(seconds) else Isolation("leads", seconds)
        return CutOff(reason, certain=unsure is None and gap >= self._dead_after)

    def cut_off(self, now: float) -> bool:
        """Whether the others may consider this node lost; callable from any thread, even before :meth:`judge` says."""
        return self._cut_off or self.deaf_for(now) >= CUT_OFF * self._dead_after

    def wait(self, now: float, longest: float) -> float:
        """Seconds until the node's next turn, at most ``longest``, so that it notices in time that it is cut off."""
        left = CUT_OFF * self._dead_after - self.deaf_for(now)
        return max(0.0, min(longest, left if left > 0 else longest))

    def patience(self, now: float, longest: float) -> float:
        """How long each of two calls may take so that the node notices in time that it is cut off."""
        if self._cut_off:
            return longest
        return max(0.1, min(longest, (CUT_OFF * self._dead_after - self.deaf_for(now)) / 2))
