"""Until when workers may run without a sign of life from their agent: pure, by the clock that agent and guard share.

If only an agent is frozen, its workers train on while the others form a round without its node. So the agent grants
its guard a lease and renews it. The guard stops the workers when the lease is over, and the agent resumes them once
its leader has answered.

It imports very little, since the guard's process must start at once.
"""

from __future__ import annotations

from collections.abc import Callable

LOOK = 0.1
"""Most seconds between two looks at the clock: a wait does not count time for which the machine was suspended."""

RENEWALS = 8
"""How often a lease is renewed within its term, at least."""

MOST = 0.5
"""Most seconds between two renewals, and between two looks whether the leader has answered."""

FOREVER = float("inf")
"""A lease that is never over."""


class Lease:
    """The guard's side."""

    def __init__(self) -> None:
        self._until = FOREVER
        self._stopped = False

    def renew(self, until: float) -> None:
        """The workers may run until then. If that time is over, the agent was frozen together with the guard."""
        self._until, self._stopped = until, False

    def over(self, now: float) -> bool:
        """Whether to stop the workers now; once per lease, since only the agent knows when they may go on."""
        stops = now >= self._until and not self._stopped
        self._stopped = self._stopped or stops
        return stops

    def wait(self, now: float) -> float | None:
        """Seconds until the next look at the clock; None if nothing is due."""
        due = self._until < FOREVER and not self._stopped
        return max(0.0, min(LOOK, self._until - now)) if due else None


class Renewal:
    """The agent's side: decides when its main loop, which carries out the leader's orders, renews the lease.

    Args:
        term: seconds from a sign of life for which the workers may run: less than the leader's patience with a node.

    Attributes:
        wait: seconds after which the main loop is to turn again.
    """

    def __init__(self, term: float) -> None:
        self.term = term
        self.wait = min(term / RENEWALS, MOST)
        self._until = FOREVER
        self._turned: float | None = None
        self._due = 0.0
        self._doubted: float | None = None

    def doubt(self, now: float) -> None:
        """The guard has stopped the workers: the lease is renewed once the leader has been heard after this time."""
        self._doubted = now

    def turn(self, now: float, *, replaceable: bool, heard: Callable[[float], bool]) -> float | None:
        """Note that the main loop runs; after a gap the others may have continued without this node.

        Args:
            replaceable: whether others may train without this node.
            heard: returns whether the leader has been heard after a time.

        Returns:
            until when the workers may run from now on; None if that is not to be changed.
        """
        if self._turned is not None and now - self._turned >= self.term:
            self.doubt(now)
        self._turned = now
        if self._doubted is not None:
            if replaceable and not heard(self._doubted):
                return None
        elif now < self._due or (not replaceable and self._until == FOREVER):
            return None
        self._doubted, self._due = None, now + self.wait
        self._until = now + self.term if replaceable else FOREVER
        return self._until
