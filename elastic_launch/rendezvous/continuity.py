"""Which values of the control record a node believes: pure decisions.

Whoever can write to the store can put anything there: garbage, nothing, an old record, or the end of an earlier run. A
value counts only if it continues the run that a node has seen: it carries the run's own number and, with a token, its
MAC, and neither term nor round fall. Anything else is spoiled:

- the leader writes its record again, by compare-and-set, if it has seen it in the last :data:`DOUBT` of ``dead_after``.
  Otherwise another node may have led before the value was spoiled: it steps down, and goes on as a member;
- of two leaders whose runs have the same id, and which both repair, the one whose run's number is lower ends its run,
  once the other one has answered it (:mod:`elastic_launch.rendezvous.backends.rival`);
- a member takes it for nothing, and goes by the newest record that it has seen. It repairs only what has stood for
  ``dead_after``, which no live leader would have let stand, and when it would take over from that record's leader. It
  leaves out terms and numbers of rounds, as many as :func:`repairing` draws, and forms no round for another
  ``dead_after``: by then all members that live have come to it and told what they know. So no term and no number is
  given twice, a leader of a term that it did not know of is fenced like any other that was succeeded, and no two rounds
  train at once;
- a node that comes waits for the repair: for that of members, if what it finds cannot be understood (:data:`REPAIR`);
  it takes what carries another MAC, or is an end, as true after :data:`STANDS` seconds.
"""

from __future__ import annotations

import random
from dataclasses import replace
from enum import Enum

from elastic_launch.errors import ProtocolError, RefusedError, RendezvousError
from elastic_launch.rendezvous.record import ControlRecord, Round
from elastic_launch.rendezvous.wire.seal import ValueSeal

__all__ = ["REPAIR", "STANDS", "UNSEEN", "Claim", "Continuity", "Sight", "SpoiledError", "repairing"]

STANDS = 2.5
"""Seconds for which a node that comes looks at a record that refuses it, or has ended, before it believes it."""

REPAIR = 4.0
"""Times ``dead_after`` for which a node that comes waits for members to repair what cannot be understood: they take one
to find that the leader is gone, one for which the value has to stand, and the time of their looks at it."""

UNSEEN = 100
"""Terms and rounds that there may have been since the newest record that a member has seen: more than in the seconds
for which the record was spoiled."""

DOUBT = 0.5
"""The part of ``dead_after`` within which a leader must have seen its record to repair it: members that lose its links
need all of ``dead_after`` to elect another."""

SPREAD = 10_000
"""How far apart the first terms and rounds of two members may be that repair the same record and do not know of each
other, since the network keeps them apart."""


def repairing(newest: ControlRecord, source: random.Random) -> ControlRecord:
    """Return the record from which a member takes over that repairs a spoiled one."""
    skipped = UNSEEN + source.randrange(SPREAD)
    floor = max(newest.floor, newest.round.number)
    return replace(newest, term=newest.term + skipped, floor=floor + skipped)


class SpoiledError(Exception):
    """The store does not hold a record that continues the run.

    Args:
        cause: what it holds instead; for a node that comes, what it ends with if that stands.
    """

    def __init__(self, cause: RendezvousError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class Continuity:
    """What one node has seen of its run.

    Attributes:
        newest: the newest record that was believed, or None.
        member: whether that is known to be of this node's run: its leader has said so, or this node wrote it.
    """

    def __init__(self, seal: ValueSeal) -> None:
        self._seal = seal
        self.newest: ControlRecord | None = None
        self.member = False
        self._begun = False  # whether the run has formed a round

    def judge(self, stored: bytes | None) -> ControlRecord | None:
        """Return the record that was found in the store; None if there is none, and a run may begin.

        Raises:
            SpoiledError: if it is not to be believed.
        """
        newest = self.newest if self.member else None
        if stored is None:
            if newest is not None:
                raise SpoiledError(ProtocolError("The control record was deleted."))
            return None
        try:
            record = ControlRecord.parse(self._seal.open(stored))
        except ProtocolError as error:
            raise SpoiledError(ProtocolError(f"The control record cannot be understood: {error.message}")) from error
        except RefusedError as error:
            raise SpoiledError(error) from error
        if newest is not None and record.run != newest.run and record.end is None and not self._begun:
            self.forget()  # of two runs that began at once, this node's has nothing to lose
        elif newest is not None and not _continues(record, newest):
            raise SpoiledError(ProtocolError("The control record is of another run, or an old one of this run."))
        self._believe(record)
        return record

    def welcomed(self, run: str) -> None:
        """The leader has accepted this node, and says which run it leads."""
        self.member = self.member or (self.newest is not None and self.newest.run == run)

    def heard(self, term: int, formed: Round, restarts: int) -> None:
        """The leader has said which round there is; its members are unknown where it said no more than the number."""
        newest = self.newest
        if self.member and newest is not None and newest.term == term and newest.round.number < formed.number:
            self.newest = replace(newest, round=formed, restarts=max(newest.restarts, restarts))
            self._begun = True

    def wrote(self, record: ControlRecord) -> None:
        """This node wrote the record: it leads."""
        self._believe(record)
        self.member = True

    def forget(self) -> None:
        """This node comes anew: the run that it was in was not the only one."""
        self.newest, self.member, self._begun = None, False, False

    def _believe(self, record: ControlRecord) -> None:
        self.newest, self._begun = record, self._begun or bool(record.round.members)


def _continues(record: ControlRecord, newest: ControlRecord) -> bool:
    return record.run == newest.run and _order(record) >= _order(newest)


def _order(record: ControlRecord) -> tuple[int, int]:
    return record.term, record.round.number


class Sight(Enum):
    """What a leader sees in the store.

    - OWN: what it wrote itself.
    - SUCCEEDED: another node leads its run.
    - RIVAL: a record of another run, which has not ended.
    - SPOILED: anything else.
    - LOST: the same, after so long without a sight of its own that another node may have led since.
    """

    OWN = "own"
    SUCCEEDED = "succeeded"
    RIVAL = "rival"
    SPOILED = "spoiled"
    LOST = "lost"


class Claim:
    """A leader's claim to the record.

    Args:
        record: as it was written for the leader's term.
        now: when that was.

    Attributes:
        stored: the value that the leader knows to be its own last one.
        pending: a value that it may have written.
        sure: when the leader last began to look, and found or wrote its own value.
    """

    def __init__(self, seal: ValueSeal, record: ControlRecord, dead_after: float, now: float) -> None:
        self._seal = seal
        self._doubts_after = DOUBT * dead_after
        self.record = record
        self.sure = now
        self.stored = seal.close(record.encode())
        self.pending: bytes | None = None

    def look(self, stored: bytes | None, now: float) -> Sight:
        """Judge what the store holds."""
        sight = self._sight(stored)
        lost = sight is Sight.SPOILED and now - self.sure > self._doubts_after
        return Sight.LOST if lost else sight

    def seen(self, began: float) -> None:
        """The leader's own value stood in the store when it looked, which it began then."""
        self.sure = max(self.sure, began)

    def _sight(self, stored: bytes | None) -> Sight:
        pending = self.pending  # before the other: what was pending may just have become that
        if stored is not None and stored in (pending, self.stored):
            return Sight.OWN
        if stored is None:
            return Sight.SPOILED
        try:
            record = ControlRecord.parse(self._seal.open(stored))
        except (ProtocolError, RefusedError):
            return Sight.SPOILED
        if record.run != self.record.run:
            return Sight.RIVAL if record.end is None else Sight.SPOILED
        # Of one term there are two leaders only if an old record was put back as a term began: this one yields.
        other = record.leader != self.record.leader
        return Sight.SUCCEEDED if record.term > self.record.term - other else Sight.SPOILED

    def rival(self, stored: bytes) -> ControlRecord:
        """Return the record in which :meth:`look` has seen a rival."""
        return ControlRecord.parse(self._seal.open(stored))

    def propose(self, record: ControlRecord) -> bytes:
        """Return a record as it is to be written; from now on it may stand there."""
        self.pending = self._seal.close(record.encode())
        return self.pending

    def wrote(self, record: ControlRecord, began: float) -> None:
        """The record that was proposed last stands there, since after the given time."""
        assert self.pending is not None
        self.seen(began)
        self.record, self.stored, self.pending = record, self.pending, None
