"""Why a round, a node's part or a run ended, and what happens next: facts, for the text of :mod:`.sentences`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, dataclass_transform

from elastic_launch.failure import Failure, Mistake, SplitCollective, StallPlace


@dataclass_transform(frozen_default=True)
class Fact:
    """Base class of all facts. A subclass declares fields, and becomes a frozen dataclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclass(frozen=True)(cls)


# How a node was lost.


class ConnectionClosed(Fact):
    """The connection of a node closed."""


class SilentFor(Fact):
    """A node was silent."""

    seconds: float


class NewerAgent(Fact):
    """Another agent came with the same node id."""

    node: str


class StopOverdue(Fact):
    """A node did not stop its workers in time."""

    seconds: float


Loss = ConnectionClosed | SilentFor | NewerAgent | StopOverdue

# Why a round ended.


class MemberLost(Fact):
    """A member was lost."""

    node: str
    how: Loss


class MemberLeaves(Fact):
    """A member leaves the run, for a reason that it gives."""

    node: str
    reason: str


class OfMembers(Fact):
    """What members of the round, or their workers, did or did not do.

    Attributes:
        did: ``stopped`` their workers without an order; were ``told`` to stop, without their agent; came ``back``, or
            came to a ``new leader``, without their workers; are ``missing`` at the new leader; have ``not started``
            their workers within join_timeout; or, as newcomers, ``ended early``, before their first step.
    """

    did: Literal["stopped", "told", "back", "new leader", "missing", "not started", "ended early"]
    nodes: tuple[str, ...]


class DrainOverdue(Fact):
    """Members did not stop in time in a drain."""

    drain: Cause
    nodes: tuple[str, ...]


class SomeFinished(Fact):
    """In a drain, the workers of some members had finished, and those of others had not."""

    drain: Cause


class TooManyNodes(Fact):
    """The round has more nodes than the run may have by now."""

    most: int


class CouldGrow(Fact):
    """Nodes wait to join, or members have workers back."""

    joining: tuple[str, ...]
    back: tuple[str, ...]


class FormedSince(Fact):
    """Another leader has formed a later round."""

    round: int


class RoundHangs(Fact):
    """A round stands still, and no rank stands out.

    Attributes:
        doing: what it is late with, such as ``step 41``.
        places: where which ranks stand.
        collectives: those in which ranks wait that others have not begun.
    """

    doing: str
    places: tuple[tuple[StallPlace, tuple[int, ...]], ...]
    collectives: tuple[SplitCollective, ...]


class WorkerArguments(Fact):
    """A newcomer's workers have other arguments than the run's; ``name`` is empty if it is not known in which."""

    node: str
    name: str = ""
    theirs: str = ""
    ours: str = ""


# Why a run ends.


class WorkersFinished(Fact):
    """All workers have finished."""


class UserStop(Fact):
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


class TooFewNodes(Fact):
    """Too few nodes were there for too long."""

    there: int
    least: int
    seconds: float


class FailsAgain(Fact):
    """A restart would fail as the last round did.

    Attributes:
        told: a worker has said so.
        same_step: the same step has failed in the same way twice.
        mistake: the exception that has ended two rounds as they began.
    """

    told: bool = False
    same_step: bool = False
    mistake: Mistake | None = None


class NoNewStep(Fact):
    """Restarts have not led to a new step."""

    restarts: int
    most: int


class RestartsSpent(Fact):
    """No restart is left.

    Attributes:
        most, refilled: how many the run had, without those given back, and these.
        idle: consecutive restarts without progress, if the last round was charged for that; else 0.
    """

    most: int
    refilled: int
    idle: int


# Why a node's part ends.


class NeverInRun(Fact):
    """The run is over, and the node never took part in it."""


class OthersUnknown(Fact):
    """The node's workers have finished, and whether those of others have cannot be found out, because of an error."""

    error: str


class WorkerFailed(Fact):
    """A worker of the node has failed."""


class NotStopped(Fact):
    """The node's workers have not stopped in time after a step."""


BudgetEnd = FailsAgain | NoNewStep | RestartsSpent


class NotRestarted(Fact):
    """The restart budget ends the run with its last round, which ended for a cause."""

    why: BudgetEnd
    cause: Cause


Cause = (
    str  # what an error, a user or another program has said
    | Failure
    | MemberLost
    | MemberLeaves
    | OfMembers
    | DrainOverdue
    | SomeFinished
    | TooManyNodes
    | CouldGrow
    | FormedSince
    | RoundHangs
    | WorkerArguments
)
"""Why a round ended, or a node is left out."""

RunCause = Cause | WorkersFinished | UserStop | TooFewNodes | NotRestarted
NodeCause = str | UserStop | NeverInRun | OthersUnknown | WorkerFailed | NotStopped

# Why a node takes no part.


class ClosedBy(Fact):
    """No newcomers are admitted any more, since a restart would probably fail as they do.

    Attributes:
        host: a worker has failed as another one had on this host; empty if one failed as it restored the state.
    """

    host: str = ""


class HostBarred(Fact):
    """Nodes of this host are left out."""

    seconds: float


class BegunAnew(Fact):
    """The run has begun anew without a node."""


class RoundOver(Fact):
    """A round is over for a node, which does not know it."""

    round: int


class CommandDiffers(Fact):
    """Where a node's command differs from the run's.

    Attributes:
        parts: the parts of the run's and of its command that differ; none if they are too long to be compared.
    """

    parts: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The parts of the run's command, which are the same for nodes that differ in the same arguments."""
        return tuple(ours for ours, _ in self.parts)


class OtherVersion(Fact):
    """It speaks another version of the protocol."""

    version: int
    ours: int


class OtherRun(Fact):
    """It belongs to a run with another id."""

    run_id: str


class EarlierRun(Fact):
    """It belongs to an earlier run with this id."""

    run_id: str


class OtherCommand(Fact):
    """It came with another command."""

    command: str
    run_id: str
    ours: str


class Intruder(Fact):
    """It seems to belong to another run, which was given this endpoint by mistake.

    Attributes:
        differs: how its arguments differ, where no run has an id; None if this run has one node, which trains.
    """

    run_id: str
    differs: CommandDiffers | None = None


Misfit = OtherVersion | OtherRun | EarlierRun | OtherCommand | Intruder
"""Why a node is refused."""

# What a node's user is warned of.


class FrozenFor(Fact):
    """A node did not run."""

    seconds: float


class LeaderSilent(Fact):
    """A node has had no sign of the leader."""

    seconds: float


class LeadsUnsure(Fact):
    """The store has not shown that a node still leads, or it leads no longer if the seconds are infinite."""

    seconds: float


Isolation = FrozenFor | LeaderSilent | LeadsUnsure
"""Why the others may consider a node lost."""


class Killed(Fact):
    """A node's workers are killed, since the others may train without it."""

    why: Isolation


class LeaderLost(Fact):
    """The leader cannot be reached.

    Attributes:
        reason: why, as an error says.
        gone: whether its process is gone.
        elects: whether another one can be elected.
        node: what the node does: it has ``finished``, ``waits``, ``drains``, ``stops``, ``stays stopped`` or
            ``trains``.
    """

    reason: str
    gone: bool
    elects: bool
    node: str


class NotLeft(Fact):
    """Workers have not left the round in time."""

    local_ranks: tuple[int, ...]


class NotAhead(Fact):
    """A worker that was started ahead has not come to its first use of the world in time."""

    local_rank: int


class NotKept(Fact):
    """There was no time left to hand on the node's snapshot (``serving``), or to save it."""

    serving: bool


class NotExited(Fact):
    """Workers have stopped, but not exited in time; ``serving``: and the next round has not restored the snapshot."""

    serving: bool


class NotDrained(Fact):
    """Workers have not stopped in time after a step; ``killed``: they are killed, else the round ends without that."""

    killed: bool


NodeWarning = Killed | LeaderLost | NotLeft | NotAhead | NotKept | NotExited | NotDrained

# What happens next.


class Outlook(Fact):
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


AfterAhead = Literal["again", "next round", "never", "lacking", "asks"]
"""What follows the end of a worker that was started ahead of a place."""
