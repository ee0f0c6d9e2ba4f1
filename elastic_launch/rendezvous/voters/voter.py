"""One voter: what it has promised and accepted. Pure: the caller passes the time, and writes the state to disk.

The invariant: once a majority of the voters has accepted a value at a position, every value that is accepted at a
higher position was written by a writer that had read this one, or one after it.

A voter moves through these states:

- *unborn*: it has no file. It answers reports, and votes on nothing.
- *born*: it has a state, which is in its file. It votes on nothing until it knows that the others are born, too.
- *founded*: it votes.

From unborn to born: all other voters have reported to this life of it, and none of them is founded (the run begins), or
all of them are born (its file was lost). It adopts the highest promise and the highest value among their reports. From
born to founded: all others are born, or one of them is founded. From any state back to unborn, with a new life: another
voter has heard of a later life of it.

What keeps the invariant:

- A founded voter accepts a position unless it has promised a higher ballot or accepted a higher position, and promises
  a ballot only if it is higher than its last one. The state is on disk before the answer is sent.
- A voter that answers a report has noted the asker's life before. So for a voter that lost its file, the answer of any
  other one was either given before that one's report, and the adopted state contains it, or it names the new life. A
  majority of answers therefore counts only if they agree on each other's lives; see ``register``.
- For a time after it last heard the leader, or after its own start, it promises nothing to others than the leader. The
  value is safe without that: it keeps candidates from interrupting a leader that is well, and a new leader relies on it
  when it does not wait for the node of the one before.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from elastic_launch.rendezvous.voters.messages import (
    Accept,
    AskState,
    Ballot,
    Greeting,
    Incarnations,
    Prepare,
    ReadValue,
    Release,
    ValuePosition,
    VoterAnswer,
    VoterRequest,
)

LONGEST_LEASE = 3600.0
"""Most seconds for which a leader can ask for a lease."""


@dataclass(frozen=True, slots=True)
class VoterState:
    """What a voter has on disk; see :class:`VoterAnswer` for its fields."""

    group: str
    life: str
    founded: bool = False
    promised: Ballot = field(default_factory=Ballot)
    position: ValuePosition | None = None
    value: str | None = None
    known: tuple[Incarnations, ...] = ()


class Voter:
    """One voter of a group.

    Args:
        name: its own.
        others: the names of the other voters.
        state: what its file holds; None without a file.
        dead_after: seconds after its start for which it refuses candidates, unless the run begins with it.
        life: for tests, that of a voter without a file.

    Attributes:
        born: whether the state is to be kept on disk.
        state: replaced by each change; the caller writes it to disk before it uses the answer.
    """

    def __init__(
        self,
        name: str,
        others: frozenset[str],
        group: str,
        state: VoterState | None,
        dead_after: float,
        now: float,
        life: str = "",
    ) -> None:
        self.name = name
        self.others = others
        self.born = state is not None
        self.state = state or VoterState(group, life or secrets.token_hex(8))
        self._reports: dict[str, VoterAnswer] = {}
        self._leader: tuple[str, str] | None = None  # name and life of the one that has the lease
        self._released: Ballot | None = None  # what its holder sent before may still arrive
        self._dead_after = dead_after
        self._heeds = now + dead_after  # until then a leader may rely on what this voter has forgotten
        self._until = self._heeds if self.born else now

    @property
    def missing(self) -> list[str]:
        """The other voters that have not reported to this life."""
        return sorted(self.others - set(self._reports))

    @property
    def unborn(self) -> list[str]:
        """The other voters that have reported that they have no file."""
        return sorted(name for name, report in self._reports.items() if not report.born)

    def handle(self, request: VoterRequest, now: float) -> VoterAnswer:
        """Carry out a request, and return the answer to send once the state is on disk."""
        state = self.state
        if request.group != state.group:
            return VoterAnswer(request.id, self.name, refused=True)
        granted, asker = False, ""
        known: ValuePosition | None = None
        match request:
            case AskState(voter=voter, life=life):
                self._learn(voter, life)
                granted, asker = True, life
            case Greeting():
                granted, known = True, state.position
            case _ if not (self.born and state.founded):
                pass
            case ReadValue(ballot=ballot):
                known = request.known
                granted = ballot is None or (ballot == state.promised and ballot != self._released)
                if granted and ballot is not None:
                    self._lease(ballot, request, now)
            case Prepare(ballot=ballot, life=life):
                granted = ballot > state.promised and (now >= self._until or self._leader == (ballot.voter, life))
                if granted:
                    self.state = replace(state, promised=ballot)
            case Accept(position=position, value=value):
                granted, known = self._accept(request, position, value, now), position
            case Release(ballot=ballot) if ballot == state.promised:
                granted, self._released, self._leader, self._until = True, ballot, None, now
        return self._answer(request.id, granted, known, asker, now)

    def report_to(self, voter: str, id: int) -> AskState:
        """Return the request by which this voter asks another one for its state."""
        return AskState(id, self.state.group, self.name, self.state.life)

    def heard(self, answer: VoterAnswer, now: float) -> None:
        """Note another voter's answer, to a report or to anything else."""
        lives = _lives(answer.known, self.name)
        if lives and self.state.life in lives and self.state.life != lives[-1]:
            self._begin_again(now)
            return
        if answer.asker != self.state.life or answer.voter not in self.others or answer.refused:
            return
        if answer.position is not None and answer.value is None:
            return  # a value that was not asked to be left out
        if not _lives(self.state.known, answer.voter):
            self._learn(answer.voter, answer.life)
        self._reports[answer.voter] = answer
        reports = self._reports.values()
        founded, all_born = any(x.founded for x in reports), all(x.born for x in reports)
        complete = len(reports) == len(self.others)
        if not self.born:
            if complete and (not founded or all_born):
                self._be_born(founded)
        elif not self.state.founded and (founded or (complete and all_born)):
            self.state = replace(self.state, founded=True)

    def _be_born(self, founded: bool) -> None:
        reports = self._reports.values()
        last = max(
            (x for x in reports if x.position), key=lambda x: x.position or ValuePosition(Ballot(), 0), default=None
        )
        promised = max(x.promised for x in reports)
        self.born = True
        self.state = replace(self.state, founded=founded, promised=promised)
        if founded:  # the life before may have heard a leader just before it was lost
            self._until = max(self._until, self._heeds)
        if last is not None:
            self.state = replace(self.state, position=last.position, value=last.value)

    def _begin_again(self, now: float) -> None:
        """Discard everything: another process has been this voter since, as when it was moved to another host."""
        self.born, self._heeds = False, now + self._dead_after
        self.state = VoterState(self.state.group, secrets.token_hex(8), known=self.state.known)
        self._reports, self._leader = {}, None

    def _accept(self, request: Accept, position: ValuePosition, value: str, now: float) -> bool:
        state = self.state
        if position.ballot < state.promised or (state.position is not None and position < state.position):
            return False
        if position != state.position:
            self.state = replace(state, promised=position.ballot, position=position, value=value)
        self._lease(position.ballot, request, now)
        return True

    def _lease(self, ballot: Ballot, request: ReadValue | Accept, now: float) -> None:
        if request.lease > 0 and ballot != self._released:
            self._leader = (ballot.voter, request.life)
            self._until = now + min(request.lease, LONGEST_LEASE)

    def _learn(self, voter: str, life: str) -> None:
        """Note a life of another voter; one that is not known yet is its last."""
        lives = _lives(self.state.known, voter)
        if voter in self.others and life not in lives:
            rest = tuple(x for x in self.state.known if x.voter != voter)
            self.state = replace(self.state, known=(*rest, Incarnations(voter, (*lives, life))))

    def _answer(self, id: int, granted: bool, known: ValuePosition | None, asker: str, now: float) -> VoterAnswer:
        state = self.state
        return VoterAnswer(
            id,
            self.name,
            state.life,
            granted,
            self.born,
            self.born and state.founded,
            state.promised,
            state.position,
            None if state.position == known else state.value,
            state.known,
            asker,
            max(0.0, self._until - now),
        )


def _lives(known: tuple[Incarnations, ...], voter: str) -> tuple[str, ...]:
    return next((x.lives for x in known if x.voter == voter), ())
