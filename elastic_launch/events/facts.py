"""Why a round, a node's part or a run ended, and what happens next: facts, for the text of :mod:`.sentences`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, dataclass_transform

from elastic_launch.failure import Doing, Failure, Mistake, SplitCollective, StallPlace


@dataclass_transform(frozen_default=True)
class Fact:
    """Base class of all facts. A subclass declares fields, and becomes a dataclass, which is not to be changed.

    All compare and show their fields by the methods here: generated for each class, they delay the start of workers.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        dataclass(repr=False, eq=False)(cls)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


# Why a round ended.


class Loss(Fact):
    """How a node was lost: its connection closed, it was silent, or it did not stop its workers in time, for so many
    seconds, or another agent came with its id."""

    what: Literal["closed", "silent", "late", "replaced"]
    seconds: float = 0.0
    node: str = ""


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
        what: ``stopped`` their workers without an order; were ``told`` to stop, without their agent; came ``back``, or
            came to a ``new leader``, without their workers; are ``missing`` at the new leader; have ``not started``
            their workers within join_timeout; or, as newcomers, ``ended early``, before their first step.
    """

    what: Literal["stopped", "told", "back", "new leader", "missing", "not started", "ended early"]
    nodes: tuple[str, ...]


class DrainFailed(Fact):
    """In a drain, these members did not stop in time, or ``stopped`` their workers without an agreed step; or, if it
    names none, some had finished, and others had not."""

    drain: Cause
    nodes: tuple[str, ...] = ()
    stopped: bool = False


class Resize(Fact):
    """Nodes wait to join, or members have workers back; or the run may have at most so many nodes by now."""

    joining: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    most: int | None = None


class FormedSince(Fact):
    """Another leader has formed a later round."""

    round: int


class RoundHangs(Fact):
    """A round stands still, and no rank stands out.

    Attributes:
        doing: what it is late with.
        places: where which ranks stand.
        collectives: those in which ranks wait that others have not begun.
    """

    doing: Doing
    places: tuple[tuple[StallPlace, tuple[int, ...]], ...]
    collectives: tuple[SplitCollective, ...]


class WorkerArguments(Fact):
    """A newcomer's workers have other arguments than the run's; ``name`` is empty if it is not known in which."""

    node: str
    name: str = ""
    theirs: str = ""
    ours: str = ""


Cause = (
    str  # what an error, a user or another program has said
    | Failure
    | MemberLost
    | MemberLeaves
    | OfMembers
    | DrainFailed
    | Resize
    | FormedSince
    | RoundHangs
    | WorkerArguments
)
"""Why a round ended, or a node is left out."""

# Why a run ends.


class WorkersFinished(Fact):
    """All workers have finished."""


class UserStop(Fact):
    """A user, or what acts for one, has stopped the run, or a node's part.

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


BudgetEnd = FailsAgain | NoNewStep | RestartsSpent


class NotRestarted(Fact):
    """The restart budget ends the run with its last round, which ended for a cause."""

    why: BudgetEnd
    cause: Cause


RunCause = Cause | WorkersFinished | UserStop | TooFewNodes | NotRestarted


# Of one node.


class NodeEnd(Fact):
    """Why a node's round, or its part of the run, ends: it ``never`` took part in the run; its workers have finished,
    and whether others have is ``unknown``, because of an error; one has ``failed``; or they did not stop in time."""

    what: Literal["never", "unknown", "failed", "late"]
    error: str = ""


NodeCause = str | UserStop | NodeEnd


class NotSaved(Fact):
    """Why a state is not in durable storage: the script saves it ``itself``, or saves ``none``; there was ``no time``;
    or each checkpoint was ``incomplete``."""

    what: Literal["itself", "none", "no time", "incomplete"]


class LastSaved(Fact):
    """Where the final state is.

    Attributes:
        step, path: of the newest that is saved; None if none is, and empty if its place is not known.
        lost: steps done since, if no other node continues.
        why: why these are not saved, perhaps as an error says; empty if none are lost, or if it is not known.
        failed: whether saving has failed since: another run may have taken over the location, and removed it.
        continues: whether the same command would go on from there.
        training: number of the script's training of which this is the state, from 0.
    """

    step: int | None
    path: str
    lost: int
    why: str | NotSaved
    failed: bool
    continues: bool
    training: int = 0


class ClosedBy(Fact):
    """No newcomers are admitted any more, since a restart would probably fail as they do.

    Attributes:
        host: a worker has failed as another one had on this host; empty if one failed as it restored the state.
    """

    host: str = ""


class Outside(Fact):
    """Why a node takes no part: its host is ``barred`` for so many seconds, the run has begun ``anew``, or its round is
    ``over``, which it does not know."""

    what: Literal["barred", "anew", "over"]
    seconds: float = 0.0
    round: int = 0


class CommandDiffers(Fact):
    """The parts of the run's and of a node's command that differ; none if they are too long to be compared."""

    parts: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The parts of the run's command, which are the same for nodes that differ in the same arguments."""
        return tuple(ours for ours, _ in self.parts)


class Misfit(Fact):
    """Why a node is refused.

    Attributes:
        what: it speaks another ``version`` of the protocol; belongs to another ``run``, or an ``earlier`` one with this
            id; came with another ``command``; seems to be an ``intruder``, given this endpoint by mistake; has ``no
            token``, or a ``token`` although the run has none; or was given one of several endpoints ``alone``.
        run_id: of its run if that is another; else of this one.
        theirs, ours: versions, or commands; or ours are all endpoints.
        differs: how an intruder's arguments differ, where no run has an id; None if this run has one node, which
            trains.
    """

    what: Literal["version", "run", "earlier", "command", "intruder", "no token", "token", "alone"]
    run_id: str = ""
    theirs: str = ""
    ours: str = ""
    differs: CommandDiffers | None = None


# What a node's user is warned of.


class Isolation(Fact):
    """Why the others may consider a node lost: it was ``frozen``, or the leader ``silent``; or it is not known for so
    long whether it still ``leads``, or it only ``led``."""

    what: Literal["frozen", "silent", "leads", "led"]
    seconds: float = 0.0


class Succeeded(Fact):
    """Why a node takes over from a leader: this ``left``, its process is ``gone``, or it was ``unreachable``; or it is
    the node itself, which ``led`` before."""

    what: Literal["led", "left", "gone", "unreachable"]
    leader: str = ""
    seconds: float = 0.0


Meanwhile = Literal["finished", "waits", "drains", "stops", "stays stopped", "trains"]


class TookMemory(Fact):
    """The kernel killed a worker of this pid, or a child of it, while the node's snapshots used so many bytes.

    Attributes:
        rests: all but the newest are freed now, as no worker is in a round; else once the next one has restored.
    """

    pid: int
    child: bool
    used: int
    rests: bool


Reason = Loss | ClosedBy | Outside | Isolation | Succeeded | TookMemory | NotSaved


class LeaderLost(Fact):
    """The leader cannot be reached.

    Attributes:
        reason: why, as an error says.
        gone: whether its process is gone.
        elects: whether another one can be elected.
        node: what this node does meanwhile.
    """

    reason: str
    gone: bool
    elects: bool
    node: Meanwhile


class NotInTime(Fact):
    """What workers have not done in time: ``leave`` the round, come to a use of the world ``ahead`` of it, ``save`` or
    ``serve`` the newest state, ``exit`` after a drain (before the state was served: ``serve, exit``), or stop after the
    same step (``drain``; ``drain, killed`` if they are killed for it)."""

    what: Literal["leave", "ahead", "save", "serve", "exit", "serve, exit", "drain", "drain, killed"]
    local_ranks: tuple[int, ...] = ()


NodeWarning = Isolation | LeaderLost | NotInTime

AfterAhead = Literal["again", "next round", "never", "lacking", "asks"]
"""What follows the end of a worker that was started ahead of a place."""


Future = Literal[
    "ended", "ends", "waits", "gathers", "forms", "forms again", "trains", "full", "too late", "resizes", "starts ahead"
]


class Outlook(Fact):
    """What happens next in a run.

    Attributes:
        what: it has ended or ends, waits for nodes, gathers those of the first round, forms a round, or trains; from
            ``full`` on, what it does with nodes that wait while it trains.
        nodes: how many are there if it waits for nodes, or wait if it is full.
        of: how many it waits for, or with how many the first round forms at once.
        seconds: without an arrival, after which the first round forms.
    """

    what: Future
    nodes: int = 0
    of: int = 0
    seconds: float = 0.0
