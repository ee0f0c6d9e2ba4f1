"""Reads and writes the value that a majority of voters keeps. Pure: messages in, messages out, no clock.

One operation at a time, in these phases:

- READ: all voters are asked. The value is known once a majority that agrees has accepted the same position and promised
  nothing higher. If a write is under way, or was given up, they may differ; then it is *unsettled*.
- OWN: a writer without a ballot first has its own voter promise a new one, so that no ballot is used twice.
- PREPARE: the others are asked for the same promise.
- SETTLE: with a majority's promises, the value at the highest position among them is written again under the ballot.
  It is now known to be the value.
- WRITE: if it is the expected one, the new value is written. The writer keeps the ballot and begins the next operation
  with WRITE.
- RELEASE: a writer that no longer leads lets the next one begin without waiting.

A writer whose SETTLE or WRITE has no majority, or that gives up waiting, does not know the outcome. It forgets its
ballot. The next one finds out whether the value was written: in PREPARE any majority contains a voter that has it.

A voter may have promised a higher ballot that came to nothing, such as its own as a candidate. It refuses the leader,
who may need it once another voter is lost. So a leader that is refused takes a new ballot, and settles the value again.

A majority *agrees* if each of its voters names the lives in which the others have answered: otherwise one of the
answers comes from before the loss of a file; see ``voter``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import combinations

from elastic_launch.rendezvous.voters.messages import (
    Accept,
    Ballot,
    Prepare,
    ReadValue,
    Release,
    ValuePosition,
    VoterAnswer,
    VoterRequest,
)


class _Phase(Enum):
    IDLE = "idle"
    READ = "read"
    OWN = "own"
    PREPARE = "prepare"
    SETTLE = "settle"
    WRITE = "write"
    RELEASE = "release"


_WRITING = (_Phase.SETTLE, _Phase.WRITE)


@dataclass(frozen=True, slots=True)
class RegisterOutcome:
    """How an operation ended.

    Attributes:
        known: whether the value is known; False: another writer is at work, or was.
        value: the value now; None if there is none.
        written: whether this operation wrote it.
        wait: if not known, seconds for which voters refuse other writers than the present leader.
        refused: whether the lease was renewed, but not at every voter: one has promised another ballot.
    """

    known: bool
    value: str | None = None
    written: bool = False
    wait: float = 0.0
    refused: bool = False


@dataclass(slots=True)
class _Held:
    ballot: Ballot
    version: int
    value: str | None


class Register:
    """One node's access to the value.

    Args:
        voters: the names of all voters.
        own: the name of this node's voter; empty if it has none, and only reads.
        lease: seconds for which this node, when it has written, may lead without being heard.

    Attributes:
        outcome: outcome of the operation, once it has ended.
        answers: the answers of this phase so far.
        read: the position and the value that were last found to be the value.
    """

    def __init__(self, group: str, voters: frozenset[str], own: str, lease: float) -> None:
        self._group = group
        self._voters = voters
        self._own = own
        self._lease = lease
        self._need = len(voters) // 2 + 1
        self._phase = _Phase.IDLE
        self._id = 0
        self._outbox: list[tuple[str, VoterRequest]] = []
        self._held: _Held | None = None
        self._renews = False
        self._refused = False
        self._ballot = Ballot()
        self._highest = 0
        self._life = ""
        self._swap: tuple[str | None, str] | None = None
        self._base: VoterAnswer | None = None
        self._before: str | None = None
        self.outcome: RegisterOutcome | None = None
        self.answers: dict[str, VoterAnswer] = {}
        self.read: tuple[ValuePosition | None, str | None] = (None, None)

    @property
    def ballot(self) -> Ballot | None:
        """The ballot that this node holds, if it may write."""
        return self._held.ballot if self._held is not None else None

    def take(self) -> list[tuple[str, VoterRequest]]:
        """Return what is to be sent, and to which voter."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def begin_read(self, *, leading: bool = False) -> None:
        """Begin to find out the value; as the leader, renew the lease, for which it must hold a ballot."""
        self._begin(_Phase.READ)
        self._renews = leading
        if leading and self._held is None:
            self._end(RegisterOutcome(False))
            return
        ballot = self._held.ballot if leading and self._held is not None else None
        self._ask(lambda id: ReadValue(id, self._group, self.read[0], ballot, self._lease, self._life), self._voters)

    def begin_swap(self, expected: str | None, value: str, life: str, promised: Ballot) -> None:
        """Begin to write a value if the present one is the expected one.

        Args:
            life: that of this node's voter.
            promised: what this node's voter has promised last.
        """
        self._swap, self._life, self._renews = (expected, value), life, False
        if self._held is not None and self._held.value == expected:
            self._begin(_Phase.WRITE)
            self._write(self._held.ballot, self._held.version + 1, expected, value, self._lease)
            return
        self._campaign(promised)

    def begin_settle(self, life: str, promised: Ballot, *, leading: bool = False) -> None:
        """Begin to find out the value by writing again what may or may not be it; as the leader, renew the lease.

        The other arguments are as for a swap.
        """
        self._swap, self._life, self._renews = None, life, leading
        self._campaign(promised)

    def begin_release(self) -> None:
        """Begin to tell the voters that this node no longer leads."""
        self._begin(_Phase.RELEASE)
        held, self._held = self._held, None
        if held is None:
            self._end(RegisterOutcome(False))
            return
        self._ask(lambda id: Release(id, self._group, held.ballot), self._voters)

    def give_up(self) -> None:
        """Stop the operation: time is over. Whether it has written is not known."""
        if self.undecided:
            self._fail()
        elif self._phase in _WRITING:
            self._held = None
        self._phase = _Phase.IDLE

    def hear(self, answer: VoterAnswer) -> None:
        """Process an answer; it may be late, repeated, or of an operation that has ended."""
        if answer.id != self._id or answer.voter not in self._voters or answer.refused:
            return
        self._highest = max(self._highest, answer.promised.number)
        if self._held is not None and answer.founded and answer.promised != self._held.ballot:
            self._refused = True
        if self._phase is _Phase.IDLE:
            return  # a majority has answered before
        if not all(known.lives for known in answer.known):
            return
        if answer.position is not None and answer.value is None and not self._has_value_of(answer.position):
            return
        earlier = self.answers.get(answer.voter)
        if earlier is not None and earlier.granted:
            return
        self.answers[answer.voter] = answer
        match self._phase:
            case _Phase.READ:
                self._heard_read()
            case _Phase.OWN:
                self._heard_own(answer)
            case _Phase.PREPARE:
                if quorum := self._granted():
                    self._prepared(quorum)
            case _Phase.SETTLE:
                if self._granted():
                    self._settled()
            case _Phase.WRITE:
                if self._granted():
                    self._written()
            case _Phase.RELEASE:
                if self._granted():
                    self._end(RegisterOutcome(False))
        if self._phase in (_Phase.PREPARE, _Phase.SETTLE, _Phase.WRITE) and self._hopeless():
            self._fail()

    def _has_value_of(self, position: ValuePosition) -> bool:
        """Whether an answer in this phase may leave out the value at a position."""
        written = self._phase in (*_WRITING, _Phase.RELEASE)
        return written or (self._phase is _Phase.READ and position == self.read[0])

    @property
    def undecided(self) -> bool:
        """Whether a majority has answered, and that was not enough: voters refuse, differ, or cannot vote yet."""
        return self._phase is not _Phase.IDLE and len(self.answers) >= self._need

    def _begin(self, phase: _Phase) -> None:
        self._phase, self.outcome = phase, None

    def _fail(self) -> None:
        """End an operation that has no majority."""
        wait = 0.0
        match self._phase:
            case _Phase.READ:
                wait = max(x.wait for x in self.answers.values())
            case _Phase.OWN | _Phase.PREPARE:  # one that has promised as much or more may grant a higher ballot
                refused = [x for x in self.answers.values() if not x.granted and x.promised < self._ballot]
                wait = max((x.wait for x in refused), default=0.0)
            case _Phase.SETTLE | _Phase.WRITE:
                self._held = None
        self._end(RegisterOutcome(False, wait=wait))

    def _end(self, outcome: RegisterOutcome) -> None:
        self._phase, self.outcome = _Phase.IDLE, outcome

    def _ask(self, request: Callable[[int], VoterRequest], voters: Iterable[str]) -> None:
        self._id += 1
        self.answers = {}
        asked = request(self._id)
        self._outbox = [(voter, asked) for voter in sorted(voters)]

    def _heard_read(self) -> None:
        for answer in self.answers.values():
            if self._agreeing(partial(_rests_at, answer.position)) is None:
                continue
            known = self.read[1] if answer.position == self.read[0] else answer.value
            leads = self._renews and self._held is not None and self._held.value == known
            if leads and self._granted() is None:
                continue  # the lease is not renewed
            self.read = (answer.position, known)
            self._end(RegisterOutcome(True, known, refused=leads and self._refused))
            return

    def _campaign(self, promised: Ballot) -> None:
        assert self._own, "only a voter writes"
        self._begin(_Phase.OWN)
        self._ballot = Ballot(max(promised.number, self._highest) + 1, self._own)
        self._ask(lambda id: Prepare(id, self._group, self._ballot, self._life), [self._own])

    def _heard_own(self, answer: VoterAnswer) -> None:
        if not answer.granted:
            self._fail()
            return
        self._phase = _Phase.PREPARE
        request = Prepare(self._id, self._group, self._ballot, self._life)
        self._outbox = [(voter, request) for voter in sorted(self._voters - {self._own})]

    def _prepared(self, quorum: tuple[VoterAnswer, ...]) -> None:
        base = max((x for x in quorum if x.position), key=lambda x: x.position or _NOWHERE, default=None)
        if base is None:
            self._known(None, 0)
            return
        assert base.value is not None
        self._phase = _Phase.SETTLE
        leads = self._renews or (self._swap is not None and base.value == self._swap[1])
        self._write(self._ballot, 1, base.value, base.value, self._lease if leads else 0.0)

    def _settled(self) -> None:
        self._known(self._before, 1)

    def _known(self, value: str | None, version: int) -> None:
        """The present value is known, and this node holds the ballot."""
        self.read = (ValuePosition(self._ballot, version) if version else None, value)
        if self._swap is None or self._swap[0] != value:
            written = self._swap is not None and self._swap[1] == value  # in an attempt whose outcome was not known
            self._end(RegisterOutcome(True, value, written))
            return
        self._phase = _Phase.WRITE
        self._write(self._ballot, version + 1, value, self._swap[1], self._lease)

    def _write(self, ballot: Ballot, version: int, before: str | None, value: str, lease: float) -> None:
        self._held, self._before, self._refused = _Held(ballot, version, value), before, False
        position = ValuePosition(ballot, version)
        self._ask(lambda id: Accept(id, self._group, position, value, lease, self._life), self._voters)

    def _written(self) -> None:
        assert self._held is not None
        self.read = (ValuePosition(self._held.ballot, self._held.version), self._held.value)
        self._end(RegisterOutcome(True, self._held.value, written=True))

    def _granted(self) -> tuple[VoterAnswer, ...] | None:
        return self._agreeing(lambda answer: answer.granted)

    def _hopeless(self) -> bool:
        refused = sum(not x.granted for x in self.answers.values())
        return refused > len(self._voters) - self._need

    def _agreeing(self, wanted: Callable[[VoterAnswer], bool]) -> tuple[VoterAnswer, ...] | None:
        """Return a majority of wanted answers that agree on each other's lives, if there is one."""
        candidates = [x for x in self.answers.values() if x.founded and wanted(x)]
        for quorum in combinations(candidates, self._need):
            lives = {x.voter: x.life for x in quorum}
            if all(known.lives[-1] == lives[known.voter] for x in quorum for known in x.known if known.voter in lives):
                return quorum
        return None


_NOWHERE = ValuePosition(Ballot(), 0)


def _rests_at(position: ValuePosition | None, answer: VoterAnswer) -> bool:
    """Whether the voter's value has this position, and it knows of no writer that is about to replace it."""
    return answer.position == position and (position is None or position.ballot == answer.promised)
