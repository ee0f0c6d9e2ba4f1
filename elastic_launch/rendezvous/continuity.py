"""Decide which values of the control record a node accepts: pure decisions.

Any client with write access to the store can put anything there: garbage, nothing, an old record, or the end of an
earlier run. A value is accepted only if it continues the run that the node has seen: it has the same run number, it
has a valid MAC if the run has a token, and neither its term nor its round has decreased. Any other value is *spoiled*:

- The leader steps down and takes over again with a higher term, since another node may have led between its last read
  and the foreign write. It does so at once if it last saw its own value within ``dead_after``: another node that has
  repaired the record since then forms no round so soon. Otherwise it waits like a member.
  Only the end of the run is rewritten as it is, since no node takes over after the end.
- If two leaders have runs with the same id, both rewrite the record with their own terms until the one with the lower
  run number ends its run, once the other has answered it (:mod:`elastic_launch.rendezvous.backends.rival`).
- A member ignores a spoiled value and uses the newest record that it has seen. It repairs only a value that has stood
  for ``dead_after``, since a live leader would have replaced it, and only when it would take over from that record's
  leader. It never repairs what seems to be a later run's record: it may have been frozen until its own run had ended.
- A node that repairs skips as many terms and round numbers as :func:`repairing` draws, and forms no round for
  ``dead_after``; by then all live members have connected to it and reported what they know. So no term and no round
  number is used twice, the leader of a term that it did not know of is fenced like any other leader that was
  succeeded, and no two rounds train at once.
- A node that was frozen through an earlier repair may draw lower numbers than those that followed it. Nodes that know
  these find its record spoiled, and one of them repairs it again, from the higher ones.
- The round in its record costs nothing if one of them has been in a later round: another leader has judged it.
- A joining node waits for the repair. If it cannot parse the value, it waits for the members to repair it
  (:data:`REPAIR`); it accepts a value with a different MAC, or the end of a run, after :data:`STANDS` seconds.
"""

from __future__ import annotations

import random
from dataclasses import replace
from enum import Enum

from elastic_launch.errors import ProtocolError, RefusedError, RendezvousError
from elastic_launch.rendezvous.record import ControlRecord, Round
from elastic_launch.rendezvous.wire.seal import ValueSeal

STANDS = 2.5
"""Seconds for which a joining node sees a record that refuses it, or that has ended, before it accepts the record."""

REPAIR = 4.0
"""How long a joining node waits for members to repair an unreadable value, in multiples of ``dead_after``: one to
detect that the leader is gone, one for which the value has to stand, and the time between their reads."""

UNSEEN = 100
"""Terms and rounds that may have passed since the newest record that a node has seen: more than fit into the seconds
for which the record was spoiled."""

SPREAD = 10_000
"""Range of the random gap between the first terms and rounds of two members that repair the same record without
knowing of each other, because the network is partitioned."""


def repairing(newest: ControlRecord, source: random.Random | None) -> ControlRecord:
    """Return the record from which a node that repairs a spoiled one takes over.

    Args:
        source: of a member's random gap; None if the node led and wrote the newest record.
    """
    # A member's gap is larger than that of a leader whose repair it has not seen.
    skip = UNSEEN if source is None else 2 * UNSEEN + source.randrange(SPREAD)
    return replace(newest, term=newest.term + skip, floor=max(newest.floor, newest.round.number) + skip)


class SpoiledError(Exception):
    """The store does not hold a record that continues the run.

    Args:
        cause: what it holds instead. A joining node fails with it if the value stays.
        later: whether it seems to be of a run that has begun, under the same id, after the end of this one.
    """

    def __init__(self, cause: RendezvousError, *, later: bool = False) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.later = later


class Continuity:
    """What one node has seen of its run.

    Attributes:
        newest: the newest record that was accepted, or None.
        member: whether ``newest`` is known to belong to this node's run: its leader said so, or this node wrote it.
    """

    def __init__(self, seal: ValueSeal) -> None:
        self._seal = seal
        self.newest: ControlRecord | None = None
        self.member = False
        self._begun = False  # whether the run has formed a round

    def judge(self, stored: bytes | None) -> ControlRecord | None:
        """Return the record found in the store, or None if there is none and a run may begin.

        Raises:
            SpoiledError: if the value is not acceptable.
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
            self.forget()  # two runs began at once, and this node's has formed no round yet
        elif newest is not None and not _continues(record, newest):
            other = ProtocolError("The control record is of another run, or an old one of this run.")
            raise SpoiledError(other, later=_is_later(record, newest))
        self._believe(record)
        return record

    def welcomed(self, run: str) -> None:
        """Record that the leader has accepted this node, and which run it leads."""
        self.member = self.member or (self.newest is not None and self.newest.run == run)

    def heard(self, term: int, formed: Round, restarts: int) -> None:
        """Record the round that the leader announced; without members if it announced only the number."""
        newest = self.newest
        if self.member and newest is not None and _order(newest) < (term, formed.number):
            # A higher term: the leader took over again, and this node found it without reading its record.
            self._begun = self._begun or formed.number > newest.round.number
            later = formed if formed.number > newest.round.number else newest.round
            self.newest = replace(newest, term=term, round=later, restarts=max(newest.restarts, restarts))

    def wrote(self, record: ControlRecord) -> None:
        """Record that this node wrote the record, and so leads."""
        self._believe(record)
        self.member = True

    def forget(self) -> None:
        """Start over as a new node: there was another run with the same id."""
        self.newest, self.member, self._begun = None, False, False

    def _believe(self, record: ControlRecord) -> None:
        self.newest, self._begun = record, self._begun or bool(record.round.members)


def _continues(record: ControlRecord, newest: ControlRecord) -> bool:
    return record.run == newest.run and _order(record) >= _order(newest)


def _is_later(record: ControlRecord, newest: ControlRecord) -> bool:
    """Whether a record seems to be of a run that began, under the same id, after the end of this one."""
    return record.run != newest.run and record.first_term > newest.term


def _order(record: ControlRecord) -> tuple[int, int]:
    return record.term, record.round.number


class Sight(Enum):
    """What a leader finds in the store.

    - OWN: a value that it wrote itself.
    - SUCCEEDED: a record of its run with another leader.
    - RIVAL: a record of another run that has not ended.
    - SPOILED: anything else, also a record that seems to be of a later run: a leader that has to take over again to
      repair it does so only if it was not frozen.
    """

    OWN = "own"
    SUCCEEDED = "succeeded"
    RIVAL = "rival"
    SPOILED = "spoiled"


class Claim:
    """A leader's claim to the record.

    Args:
        record: the record as written for the leader's term.
        now: when it was written.

    Attributes:
        record: the last record that the leader is known to have written.
        stored: the last value that the leader is known to have written.
        pending: a value that it may have written.
        sure: start of the last read or write in which the leader found or wrote its own value.
    """

    def __init__(self, seal: ValueSeal, record: ControlRecord, now: float) -> None:
        self._seal = seal
        self.record = record
        self.sure = now
        self.stored = seal.close(record.encode())
        self.pending: bytes | None = None

    def seen(self, began: float) -> None:
        """Record that a read that began at that time found the leader's own value."""
        self.sure = max(self.sure, began)

    def look(self, stored: bytes | None) -> Sight:
        """Classify what the store holds."""
        pending = self.pending  # read before `stored`: another thread may move it there
        if stored is not None and stored in (pending, self.stored):
            return Sight.OWN
        if stored is None:
            return Sight.SPOILED
        try:
            record = ControlRecord.parse(self._seal.open(stored))
        except (ProtocolError, RefusedError):
            return Sight.SPOILED
        if record.run != self.record.run:
            rival = record.end is None and not _is_later(record, self.record)
            return Sight.RIVAL if rival else Sight.SPOILED
        # A term has two leaders only if an old record was put back as the term began; this leader yields.
        other = record.leader != self.record.leader
        return Sight.SUCCEEDED if record.term > self.record.term - other else Sight.SPOILED

    def has_followed(self, stored: bytes | None) -> bool:
        """Whether the store holds what seems to be the record of a later run."""
        try:
            return stored is not None and _is_later(ControlRecord.parse(self._seal.open(stored)), self.record)
        except (ProtocolError, RefusedError):
            return False

    def rival(self, stored: bytes) -> ControlRecord:
        """Return the rival's record that :meth:`look` found."""
        return ControlRecord.parse(self._seal.open(stored))

    def propose(self, record: ControlRecord) -> bytes:
        """Return the value to write for a record; from now on the store may hold it."""
        self.pending = self._seal.close(record.encode())
        return self.pending

    def wrote(self, record: ControlRecord, began: float) -> None:
        """Record that the last proposed record was written, in a write that began at the given time."""
        assert self.pending is not None
        self.seen(began)
        self.record, self.stored, self.pending = record, self.pending, None
