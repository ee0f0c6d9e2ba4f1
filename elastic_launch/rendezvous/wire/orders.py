"""Messages from the leader to its nodes; each carries the leader's term."""

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
        run: see the control record.
        max_nodes: the run's current limit, which may differ from this node's; 0 if not given.
    """

    term: int
    node_id: str
    beat: float
    dead_after: float
    run: str = ""
    max_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """This node does not fit the run and must not reconnect."""

    term: int
    reason: str
    hint: str = ""
    code: int = 95


@dataclass(frozen=True, slots=True)
class Pulse:
    """Heartbeat of the leader.

    Attributes:
        round, restarts: the last round's number, and the restarts charged.
        max_nodes: see :class:`Welcome`.
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
        cause: why the last round ended; ``first`` for the first one.
        sources: which nodes serve the newest snapshot, if no member has it.
        max_restarts: the run's limit, which may differ from the node's.
    """

    term: int
    round: Round
    restarts: int
    cause: str
    sources: tuple[SnapshotSource, ...] = ()
    max_restarts: int = 3


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the round's workers stop after the same step, save and exit; then report them as stopped.

    Attributes:
        kind: see :class:`Break`.
        seconds: time after which the round is broken; None for no limit.
        final: the run ends with this drain: each node saves its part before it reports.
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
    """This node must leave the run after a drain, within the given seconds."""

    term: int
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveNow:
    """Have the round's ranks write a durable checkpoint; sent only to the first member, whose rank informs all."""

    term: int
    round: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """This node is no longer a member: kill its workers. ``final``: another agent replaced it, do not reconnect."""

    term: int
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Information for the node's user, such as what the run waits for."""

    term: int
    text: str


@dataclass(frozen=True, slots=True)
class PeerDone:
    """All workers of another node finished the round with exit code 0: workers of this node that hang may be killed."""

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
