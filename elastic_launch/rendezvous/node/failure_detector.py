"""How long a node has heard nothing of its leader, and what follows from that: pure arithmetic on the node's own clock.

Two things are judged, differently. Whether the *leader* is lost: there a gap between the node's own turns counts for
little, since a node that was itself frozen knows nothing of the others. Whether *this node* may be taken for lost:
there all time counts, and most of all that for which it was frozen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CUT_OFF", "TURN_CAP", "CutOff", "FailureDetector"]

TURN_CAP = 2.0
"""A gap between two turns of the node counts as so much silence of the leader at most."""

CUT_OFF = 0.8
"""Part of dead_after at which a node counts itself as cut off.

The rest is the interval of its beats: the leader's count began that much earlier, with the last beat that arrived.
"""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The others may go on without this node: it was out of their reach for too long, or frozen.

    Attributes:
        certain: whether the leader must have counted it as dead.
    """

    reason: str
    certain: bool = False


class FailureDetector:
    """What a node hears of its leader.

    Args:
        dead_after: silence after which a node or leader counts as dead, in seconds.
        beat: the longest interval of beats, in seconds.
    """

    def __init__(self, dead_after: float, beat: float) -> None:
        self._dead_after = dead_after
        self._cap = min(TURN_CAP, dead_after / 2)
        self._silence = 0.0
        self._heard: float | None = None
        self._turned: float | None = None
        self._cut_off = False
        self._told = False
        self.beat = min(beat, (1 - CUT_OFF) * dead_after)

    def linked(self, now: float) -> None:
        """A new link begins: its silence is counted anew."""
        self._silence, self._turned = 0.0, now

    def turn(self, now: float) -> float:
        """The node's thread turns; to be called before it takes in what has come meanwhile.

        Returns:
            seconds since its last turn.
        """
        gap = now - self._turned if self._turned is not None else 0.0
        self._silence += min(gap, self._cap)
        self._turned = now
        return gap

    def heard(self, now: float) -> None:
        """Something came from the leader, in the turn that began just before."""
        self._silence, self._heard = 0.0, now

    def formed(self) -> None:
        """A round begins: that this node is cut off, if it is, was told of the one before."""
        self._told = False

    @property
    def leader_lost(self) -> bool:
        """Whether the link has been silent for dead_after."""
        return self._silence >= self._dead_after

    def deaf_for(self, now: float) -> float:
        """Seconds since the leader was last heard on any link; 0 if it never was."""
        return now - self._heard if self._heard is not None else 0.0

    def judge(self, now: float, gap: float = 0.0, unsure: float | None = None) -> CutOff | None:
        """Return, once in each silence and round, that this node may be taken for lost by now, or soon.

        Args:
            gap: seconds for which the node's thread did not turn.
            unsure: if this node leads, seconds for which it has not made sure that it still does. What the leader in
                its own process says proves nothing: another one may have been elected.
        """
        limit = CUT_OFF * self._dead_after
        seconds = max(gap, self.deaf_for(now)) if unsure is None else unsure
        told, self._cut_off = self._told, seconds >= limit
        self._told = self._cut_off
        if told or not self._cut_off:
            return None
        if gap >= limit:
            reason = f"this node was frozen for {gap:.1f} s"
        elif unsure is None:
            reason = f"no sign of the leader for {seconds:.1f} s"
        elif math.isinf(seconds):
            reason = "this node leads no longer"
        else:
            reason = f"the store has not shown for {seconds:.1f} s that this node still leads"
        return CutOff(reason, certain=unsure is None and gap >= self._dead_after)

    def cut_off(self, now: float) -> bool:
        """Whether this node may be taken for lost; to be asked from any thread, also before :meth:`judge` noticed."""
        return self._cut_off or self.deaf_for(now) >= CUT_OFF * self._dead_after

    def wait(self, now: float, longest: float) -> float:
        """Seconds until this node must turn again, at most longest: in time to notice that it is cut off."""
        left = CUT_OFF * self._dead_after - self.deaf_for(now)
        return max(0.0, min(longest, left if left > 0 else longest))

    def patience(self, now: float, longest: float) -> float:
        """How long each of two calls may take, so that being cut off is noticed in time."""
        if self._cut_off:
            return longest
        return max(0.1, min(longest, (CUT_OFF * self._dead_after - self.deaf_for(now)) / 2))
