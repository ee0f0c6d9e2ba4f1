"""What is asked of a voter, and its answer. Every request carries an id, which the answer repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_launch.codec import Messages


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """The right to write, of one voter for a while. Ballots are ordered; the highest one that a voter knows counts."""

    number: int = 0
    voter: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ValuePosition:
    """The place of a value among all values: the ballot under which it was written, and its number among those."""

    ballot: Ballot
    version: int


@dataclass(frozen=True, slots=True)
class Incarnations:
    """The lives of a voter in the order in which another one learned of them; a life ends when its file is lost."""

    voter: str
    lives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first request on a connection: short, so that long ones are read only from what knows the group."""

    id: int
    group: str


@dataclass(frozen=True, slots=True)
class ReadValue:
    """Ask for the accepted value.

    Attributes:
        known: the position of the value that the asker has; the answer leaves out a value that it has.
        ballot: that of a leader, whose lease this renews.
        lease: seconds for which other candidates are refused.
        life: that of the leader's own voter.
    """

    id: int
    group: str
    known: ValuePosition | None = None
    ballot: Ballot | None = None
    lease: float = 0.0
    life: str = ""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask for the promise to accept nothing of a lower ballot.

    Attributes:
        life: that of the candidate's own voter.
    """

    id: int
    group: str
    ballot: Ballot
    life: str


@dataclass(frozen=True, slots=True)
class Accept:
    """Ask to accept a value.

    Attributes:
        lease: seconds for which other candidates are refused from now on; 0 while the candidate does not lead yet.
        life: that of the candidate's own voter.
    """

    id: int
    group: str
    position: ValuePosition
    value: str
    lease: float
    life: str


@dataclass(frozen=True, slots=True)
class Release:
    """The holder of the ballot no longer leads: another candidate need not wait."""

    id: int
    group: str
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class AskState:
    """A voter that cannot vote yet asks for the other's state.

    Attributes:
        voter, life: the asker.
    """

    id: int
    group: str
    voter: str
    life: str


VoterRequest = Greeting | ReadValue | Prepare | Accept | Release | AskState


@dataclass(frozen=True, slots=True)
class VoterAnswer:
    """The state of a voter after a request.

    Attributes:
        granted: whether it did what was asked.
        born: whether it has a state: it began with the run, or has replaced a lost file.
        founded: whether it votes.
        value: the accepted value, unless the asker has it.
        known: the lives of the other voters that it knows.
        asker: the life to which a report was made; else empty.
        wait: seconds for which it will refuse other candidates than the present leader.
        refused: whether it answers nothing else, as it is of another run, or with other names of the hosts.
    """

    id: int
    voter: str
    life: str = ""
    granted: bool = False
    born: bool = False
    founded: bool = False
    promised: Ballot = field(default_factory=Ballot)
    position: ValuePosition | None = None
    value: str | None = None
    known: tuple[Incarnations, ...] = ()
    asker: str = ""
    wait: float = 0.0
    refused: bool = False


def group_of(run_id: str, voters: Iterable[str]) -> str:
    """Return what a run and its set of voters have in common, and no other."""
    return hashlib.sha256("\n".join([run_id, *sorted(voters)]).encode()).hexdigest()[:32]


MESSAGES: Messages[VoterRequest | VoterAnswer] = Messages(
    (Greeting, ReadValue, Prepare, Accept, Release, AskState, VoterAnswer)
)
