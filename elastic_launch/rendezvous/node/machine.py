"""The node's state machine, without sockets and threads: what it sends, what it learns, and when it gives up.

The membership runs it on real links, the simulation in the tests on simulated ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from elastic_launch.config.launch_config import Timing
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.phases import highest
from elastic_launch.rendezvous.leader.restart_budget import EARLY
from elastic_launch.rendezvous.leader.verdict import first_of
from elastic_launch.rendezvous.node.failure_detector import FailureDetector
from elastic_launch.rendezvous.wire import messages as m

FIRST_ATTEMPT, NEXT_ATTEMPT = 5.0, 1.5
"""Seconds that one attempt to find the leader may take: before this node first had a link to it, and afterwards."""

QUIET_SEARCH = 1.0
"""Seconds for which a node searches for the leader after a link was closed before the leader counts as gone."""


@dataclass(slots=True)
class _LastRound:
    """The round that it was last ordered to form; see :class:`elastic_launch.rendezvous.wire.messages.RoundSeen`."""

    number: int
    formed_at: float
    over_at: float | None = None
    begun: int | None = None
    reached: int | None = None

    def end(self, now: float) -> None:
        self.over_at = now if self.over_at is None else self.over_at

    def trained(self, now: float) -> bool:
        """Whether a step was completed; a script that reports none is believed to train after its start."""
        over_at = now if self.over_at is None else self.over_at
        if self.begun is None:
            return over_at - self.formed_at >= EARLY
        return self.reached is not None and self.reached > self.begun

    def seen(self, now: float) -> m.RoundSeen:
        over_at = now if self.over_at is None else self.over_at
        ago, lasted = (round(max(0.0, at - self.formed_at), 3) for at in (now, over_at))
        return m.RoundSeen(ago, lasted, self.begun, self.reached)


class NodeMachine:
    """What a node has to send to its leader and has learnt from it. Not thread-safe."""

    def __init__(self) -> None:
        self._hello: m.NodeHello | None = None
        self._known: dict[str, Any] = {}
        self._unsaid: deque[m.Report] = deque()
        self._evicted = False
        self._loading = False  # its workers' imports
        self._round: _LastRound | None = None

    @property
    def hello(self) -> m.NodeHello:
        assert self._hello is not None
        return self._hello

    def begin(self, hello: m.NodeHello) -> None:
        """Set the node's first hello."""
        self._hello = replace(hello, **self._known)

    def say(self, report: m.Report, now: float) -> None:
        """Queue a report, for this link or as part of the next link's hello."""
        seen = self._round
        match report:
            case m.Stopped(round=number, store_port=port, held=held, slots=slots):
                trained = report.trained or self._known.get("trained", False)
                if seen is not None and seen.number == number:
                    seen.end(now)
                    trained = trained or seen.trained(now)
                report = replace(report, importing=report.importing or self._loading, trained=trained)
                self._learn(store_port=port, holding=0, joined=False, ready=False, done=False, live=False, held=held)
                self._learn(importing=report.importing, slots=slots, trained=trained)
            case m.RankOffer(slots=slots):
                self._learn(slots=slots)
            case m.Joined():
                self._learn(joined=True)
            case m.NodeReady(round=number, step=step, live=live):
                if seen is not None and seen.number == number:
                    seen.begun = highest(seen.begun, step)
                self._learn(joined=True, ready=True, live=live, apart=False)
            case m.Done():
                self._learn(done=True)
            case Failure():
                self._learn(failed=first_of(self._known.get("failed"), report))
            case m.Leaving(reason=reason):
                self._learn(leaving=reason)
            case m.Reached(error=error):
                self._learn(apart=bool(error) and not self._known.get("holding"))
            case m.Imported():
                self._loading = False
                self._learn(importing=False)
        self._unsaid.append(report)

    def importing(self) -> None:
        """Note that this node's workers could not begin at once, until it reports otherwise."""
        self._loading = True
        self._learn(importing=True)

    def beats(self, report: m.Beat | m.ProgressBeat) -> None:
        """Note what a beat says, which is not queued."""
        if isinstance(report, m.ProgressBeat) and self._round is not None and self._round.number == report.round:
            self._round.reached = highest(self._round.reached, report.step)

    def greet(self, now: float, term: int = 0) -> None:
        """Begin a new link: the hello is sent first, and contains the current state.

        Args:
            term: that of the record that named the leader, or 0 if no record did.
        """
        seen = self._round.seen(now) if self._round is not None else None
        self._unsaid = deque([replace(self.hello, term=term, round_seen=seen)])

    def take(self) -> list[m.Report]:
        """Return and clear the queued reports."""
        reports, self._unsaid = list(self._unsaid), deque()
        return reports

    def obey(self, order: m.Order, now: float) -> bool:
        """Learn from an order; return whether it counts: one from a lower term than seen does not, nor an old round."""
        hello = self.hello
        if order.term < hello.seen_term:
            return False
        if isinstance(order, m.Form) and order.round.number <= hello.seen_round:
            return False
        self._learn(seen_term=order.term)
        match order:
            case m.Form(round=formed):
                restarts = max(hello.seen_restarts, order.restarts)
                self._learn(seen_round=formed.number, seen_restarts=restarts, holding=formed.number)
                self._learn(origin=order.origin)
                self._learn(joined=False, ready=False, live=False, importing=False, failed=None, broken=False)
                self._round = _LastRound(formed.number, now)
            case m.Break(round=number) if number == hello.seen_round:
                self._learn(broken=True)
                if self._round is not None:
                    self._round.end(now)
            case m.StartAhead():
                self._learn(importing=True)
            case m.Strike(fault=fault) if fault not in hello.landed:
                self._learn(landed=(*hello.landed, fault))
            case m.Welcome(run=run):
                self._learn(seen_run=run)
            case m.Evicted(anew=True):
                # No order of that run counts any more: the leader's term is higher.
                self._learn(seen_run="", seen_round=0, seen_restarts=0, held=None, failed=None, trained=False)
                self._learn(origin="")
                self._round = None
        self._evicted = self._evicted or isinstance(order, m.Evicted)
        return True

    def may_return(self) -> bool:
        """Whether the node may search for the leader: after an eviction, only once its workers are killed."""
        if self._evicted and not self.hello.holding:
            self._evicted = False
        return not self._evicted

    def _learn(self, **known: Any) -> None:
        self._known |= known
        if self._hello is not None:
            self._hello = replace(self._hello, **known)


class Search:
    """The search for the leader: how long an attempt may take, when the user is informed, and when it is given up."""

    def __init__(self, timing: Timing, now: float) -> None:
        self._timing = timing
        self._deadline = now + timing.join_timeout
        self._lost_at: float | None = None
        self._told = False
        self._quiet = False

    def attempt(self, detector: FailureDetector, now: float) -> float:
        """Seconds that each of the calls of one attempt may take."""
        return FIRST_ATTEMPT if self._lost_at is None else detector.patience(now, NEXT_ATTEMPT)

    @property
    def gone(self) -> bool:
        """Whether a leader was found and is now gone; otherwise none was found yet, or it is only silent."""
        return self._lost_at is not None and not self._quiet

    def failed(self, now: float) -> bool:
        """Note a failed attempt; return whether to report it now."""
        waits = self._lost_at is not None and not self._quiet and now - self._lost_at < QUIET_SEARCH
        if self._told or waits:
            return False
        self._told = True
        return True

    def over(self, now: float) -> bool:
        """Whether to give up."""
        return now >= self._deadline

    def linked(self) -> None:
        """Note that something listens at the leader's address."""
        self._told = self._quiet = False

    def fell_silent(self) -> None:
        """Note that the leader is silent and the user is informed; it may remain to report why no node succeeds it."""
        self._quiet = True

    def lost(self, now: float) -> None:
        """Note that the link to a leader that had answered ended."""
        self._lost_at = now
        self._deadline = now + self._timing.min_wait
