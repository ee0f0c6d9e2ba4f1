"""Why a round, a node's part or a run ended, and what happens next: facts, for the text of :mod:`.sentences`."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.failure import Failure, Mistake, SplitCollective, StallPlace

# How a node was lost.


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection of a node closed."""


@dataclass(frozen=True, slots=True)
class SilentFor:
    """A node was silent."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NewerAgent:
    """Another agent came with the same node id."""

    node: str


@dataclass(frozen=True, slots=True)
class StopOverdue:
    """A node did not stop its workers in time."""

    seconds: float


Loss = ConnectionClosed | SilentFor | NewerAgent | StopOverdue

# Why a round ended.


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member was lost."""

    node: str
    how: Loss


@dataclass(frozen=True, slots=True)
class MemberLeaves:
    """A member leaves the run, for a reason that it gives."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """A member has stopped its workers without an order."""

    node: str


@dataclass(frozen=True, slots=True)
class WorkerToldToStop:
    """A worker, not its agent, was told to stop."""

    node: str


@dataclass(frozen=True, slots=True)
class CameWithoutWorkers:
    """A member is connected again, without its workers; ``led``: to a leader that it had a link to before."""

    node: str
    led: bool


@dataclass(frozen=True, slots=True)
class MembersMissing:
    """Members did not come to the new leader."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartOverdue:
    """Members did not start their workers within join_timeout."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainOverdue:
    """Members did not stop in time in a drain."""

    drain: Cause
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SomeFinished:
    """In a drain, the workers of some members had finished, and those of others had not."""

    drain: Cause


@dataclass(frozen=True, slots=True)
class TooManyNodes:
    """The round has more nodes than the run may have by now."""

    most: int


@dataclass(frozen=True, slots=True)
class CouldGrow:
    """Nodes wait to join, or members have workers back."""

    joining: tuple[str, ...]
    back: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FormedSince:
    """Another leader has formed a later round."""

    round: int


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """The workers of newcomers ended with exit code 0 before their first step, while others train."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundHangs:
    """A round stands still, and no rank stands out.

    Attributes:
        doing: what it is late with, such as ``step 41``.
        places: where which ranks stand.
        collectives: those in which ranks wait that others have not begun.
    """

    doing: str
    places: tuple[tuple[StallPlace, tuple[int, ...]], ...]
    collectives: tuple[SplitCollective, ...]


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """A newcomer's workers have other arguments than the run's; ``name`` is empty if it is not known in which."""

    node: str
    name: str = ""
    theirs: str = ""
    ours: str = ""


# Why a run ends.


@dataclass(frozen=True, slots=True)
class WorkersFinished:
    """All workers have finished."""


@dataclass(frozen=True, slots=True)
class UserStop:
    """A user, or what acts for one, has stopped the run.

    Attributes:
        by: who, as said by them.
        step: optimizer steps done when its last round was drained; None if there was none.
        saved: whether a node has committed that state to durable storage.
        unsaved: why a node that should have committed it has not.
    """

    by: str
    step: int | None = None
    saved: bool = False
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class TooFewNodes:
    """Too few nodes were there for too long."""

    there: int
    least: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FailsAgain:
    """A restart would fail as the last round did.

    Attributes:
        told: a worker has said so.
        same_step: the same step has failed in the same way twice.
        mistake: the exception that has ended two rounds as they began.
    """

    told: bool = False
    same_step: bool = False
    mistake: Mistake | None = None


@dataclass(frozen=True, slots=True)
class NoNewStep:
    """Restarts have not led to a new step."""

    restarts: int
    most: int


@dataclass(frozen=True, slots=True)
class RestartsSpent:
    """No restart is left.

    Attributes:
        most, refilled: how many the run had, without those given back, and these.
        idle: consecutive restarts without progress, if the last round was charged for that; else 0.
    """

    most: int
    refilled: int
    idle: int


BudgetEnd = FailsAgain | NoNewStep | RestartsSpent


@dataclass(frozen=True, slots=True)
class NotRestarted:
    """The restart budget ends the run with its last round, which ended for a cause."""

    why: BudgetEnd
    cause: Cause


Cause = (
    str  # what an error, a user or another program has said
    | Failure
    | MemberLost
    | MemberLeaves
    | WorkersStopped
    | WorkerToldToStop
    | CameWithoutWorkers
    | MembersMissing
    | StartOverdue
    | DrainOverdue
    | SomeFinished
    | TooManyNodes
    | CouldGrow
    | FormedSince
    | EndedEarly
    | RoundHangs
    | WorkerArguments
)
"""Why a round ended, or a node is left out."""

RunCause = Cause | WorkersFinished | UserStop | TooFewNodes | NotRestarted

# Why a node takes no part.


@dataclass(frozen=True, slots=True)
class ClosedBy:
    """No newcomers are admitted any more, since a restart would probably fail as they do.

    Attributes:
        host: a worker has failed as another one had on this host; empty if one failed as it restored the state.
    """

    host: str = ""


@dataclass(frozen=True, slots=True)
class HostBarred:
    """Nodes of this host are left out."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BegunAnew:
    """The run has begun anew without a node."""


@dataclass(frozen=True, slots=True)
class RoundOver:
    """A round is over for a node, which does not know it."""

    round: int


@dataclass(frozen=True, slots=True)
class CommandDiffers:
    """Where a node's command differs from the run's.

    Attributes:
        parts: the parts of the run's and of its command that differ; none if they are too long to be compared.
    """

    parts: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The parts of the run's command, which are the same for nodes that differ in the same arguments."""
        return tuple(ours for ours, _ in self.parts)


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """It speaks another version of the protocol."""

    version: int
    ours: int


@dataclass(frozen=True, slots=True)
class OtherRun:
    """It belongs to a run with another id."""

    run_id: str


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """It belongs to an earlier run with this id."""

    run_id: str


@dataclass(frozen=True, slots=True)
class OtherCommand:
    """It came with another command."""

    command: str
    run_id: str
    ours: str


@dataclass(frozen=True, slots=True)
class Intruder:
    """It seems to belong to another run, which was given this endpoint by mistake.

    Attributes:
        differs: how its arguments differ, where no run has an id; None if this run has one node, which trains.
    """

    run_id: str
    differs: CommandDiffers | None = None


Misfit = OtherVersion | OtherRun | EarlierRun | OtherCommand | Intruder
"""Why a node is refused."""

# What happens next.


@dataclass(frozen=True, slots=True)
class Outlook:
    """What happens next in a run.

    Attributes:
        what: ``ended``, ``ends``, ``waits`` for nodes, ``gathers`` the nodes of the first round, ``forms`` it,
            ``forms again``, ``trains``; or, of nodes that wait while it trains: ``full``, ``too late``, ``resizes``, or
            ``starts ahead``.
        nodes: how many are there if it waits for nodes, or wait if it is full.
        of: how many it waits for, or with how many the first round forms at once.
        seconds: without an arrival, after which the first round forms.
    """

    what: str
    nodes: int = 0
    of: int = 0
    seconds: float = 0.0
