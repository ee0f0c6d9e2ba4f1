"""What a leader tells its nodes; each message carries the leader's term."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.rendezvous.admin import messages as asking
from elastic_launch.rendezvous.record import Round
from elastic_launch.rendezvous.snapshot_holders import Released, SnapshotSource
from elastic_launch.rendezvous.wire.reports import Failure

__all__ = [
    "Break",
    "Depart",
    "Drain",
    "Evicted",
    "Form",
    "Notice",
    "Order",
    "PeerDone",
    "Pulse",
    "Refused",
    "RunEnd",
    "SaveNow",
    "ToNode",
    "Welcome",
]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hello was accepted.

    Attributes:
        run: as of the control record.
        max_nodes: the run's present limit, which need not be this node's; 0 if it is not said.
    """

    term: int
    node_id: str
    beat: float
    dead_after: float
    run: str = ""
    max_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """This node does not fit the run and must not come again."""

    term: int
    reason: str
    hint: str = ""
    code: int = 95


@dataclass(frozen=True, slots=True)
class Pulse:
    """I am alive (leader to node).

    Attributes:
        round, restarts: the last round's number, and restarts charged.
        max_nodes: as of Welcome.
    """

    term: int
    round: int = 0
    restarts: int = 0
    max_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Form:
    """The round is formed and recorded: start its workers.

    Attributes:
        restarts: restarts charged so far.
        cause: why the last round ended, ``first`` for the first one.
        sources: who serves the newest snapshot, if no member has it.
        max_restarts: the run's limit, which need not be the node's.
    """

    term: int
    round: Round
    restarts: int
    cause: str
    sources: tuple[SnapshotSource, ...] = ()
    max_restarts: int = 3


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the round's workers stop after the same step, save and end; then report them as stopped.

    Attributes:
        kind: as of Break.
        seconds: after which the round is broken; None for no such limit.
        final: the run ends with it: each node saves what it is to save before it reports.
    """

    term: int
    round: int
    kind: str
    cause: str
    seconds: float | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Break:
    """The round is over: stop its workers and report.

    Attributes:
        kind: see :class:`elastic_launch.rendezvous.leader.verdict.Kind`.
    """

    term: int
    round: int
    kind: str
    cause: str


@dataclass(frozen=True, slots=True)
class Depart:
    """This node is to leave the run after a drain, with the seconds that it has for that."""

    term: int
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveNow:
    """Have the round's ranks write a durable checkpoint; only the first member is told: its rank tells all."""

    term: int
    round: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """This node is no longer a member: kill its workers. ``final``: another agent took its place, do not come again."""

    term: int
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the node's user wants to know, such as what the run waits for."""

    term: int
    text: str


@dataclass(frozen=True, slots=True)
class PeerDone:
    """All workers of another node have finished the round with 0: those of this node that hang may be killed."""

    term: int
    round: int


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run is over and recorded as such: stop and exit with the code.

    Attributes:
        failure: the root cause, if a worker's failure ended the run.
    """

    term: int
    code: int
    cause: str
    restarts: int = 0
    failure: Failure | None = None


ToNode = Form | Drain | Break | Depart | Released | SaveNow | PeerDone | Evicted | Notice | RunEnd
Order = Welcome | Refused | Pulse | ToNode | asking.Answer | asking.LeaderFound
