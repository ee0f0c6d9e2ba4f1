"""What nodes and leader say to each other: one JSON object a line, ``type`` first.

A node reports up, the leader orders down. Every message of the leader carries its term, and a node ignores one from a
lower term than it has seen, so that a leader that was paused and wakes up can order nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous import asking, codec
from elastic_launch.rendezvous.keeping import Held, Released, Source
from elastic_launch.rendezvous.record import Round

__all__ = [
    "PROTOCOL_VERSION",
    "Beat",
    "Break",
    "Depart",
    "Done",
    "Drain",
    "Evicted",
    "Failed",
    "Failure",
    "Form",
    "Held",
    "Hello",
    "Imported",
    "Joined",
    "Leaving",
    "Message",
    "Notice",
    "Order",
    "Progress",
    "Pulse",
    "Ready",
    "Refused",
    "Released",
    "Report",
    "RunEnd",
    "SaveNow",
    "Saved",
    "Source",
    "Spoken",
    "Stopped",
    "ToNode",
    "Welcome",
    "pack",
    "unpack",
]

PROTOCOL_VERSION = 2


class Message(Protocol):
    """Any of the dataclasses below."""

    __dataclass_fields__: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's failure, as its node saw it.

    Attributes:
        kind: ``crash``, ``out of memory``, ``preemption`` or ``fatal``.
        exit_code: as of ``subprocess``: -N for signal N.
        message: one line: the exception, or the signal's name.
        detail: traceback, or the last lines of stderr.
        ran: seconds from the worker's start to its end.
        ago: seconds from its end to this report, by the node's clock.
        signature: equal for failures that look the same; empty if they cannot be compared.
        log: where its log files are, on its node.
        host: name of the node's host.
    """

    node_id: str
    kind: str
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    message: str
    detail: tuple[str, ...] = ()
    ran: float = 0.0
    ago: float = 0.0
    signature: str = ""
    log: str = ""
    round: int = 0
    host: str = ""


# Reports: node to leader.


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link.

    Attributes:
        command, limits: in words, so that a refusal can say what differs.
        work: as of the control record.
        wanted_rank: rank that the node asks for, or None.
        holding: number of the round whose workers it still has, 0 for none.
        joined, ready, done: whether all of these are started; can be drained; have finished.
        importing: whether its workers could not begin at once, because what they import is not loaded yet.
        leaving: why the node leaves the run, or empty: its goodbye may have been lost with the link before.
        seen_term, seen_round, seen_restarts: the highest it knows; a leader that lost its store rebuilds it from them.
        held: as of Stopped.
    """

    version: int
    run_id: str
    digest: str
    command: str
    limits: str
    node_id: str
    incarnation: str
    workers: int
    address: str
    store_port: int
    wanted_rank: int | None = None
    holding: int = 0
    joined: bool = False
    ready: bool = False
    done: bool = False
    leaving: str = ""
    seen_term: int = 0
    seen_round: int = 0
    seen_restarts: int = 0
    work: str = ""
    importing: bool = False
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """I am alive (node to leader)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """I am alive, and my workers of the round have done so many optimizer steps. Said instead of a beat.

    Attributes:
        snapshot: steps in the newest snapshot in this node's memory, None if there is none.
    """

    round: int
    step: int
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the round's training was written, or could not be.

    Attributes:
        step: optimizer steps in it.
        error: why it is not written; empty if it is.
        asked: whether it is at least as new as the last SaveNow.
    """

    round: int
    step: int
    error: str = ""
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """The workers of the round are started."""

    round: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The workers of the round train by this project's library: they can be drained.

    The round's first member says it again now and then, with a new estimate.

    Attributes:
        remaining_s: seconds until the training ends at the present pace; -1 if that is not known.
    """

    round: int
    remaining_s: float = -1.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker of the round failed; this node stops its others."""

    round: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Stopped:
    """The workers of the round are reaped; the node is ready for the next one.

    Attributes:
        store_port: where its next worker store listens.
        drained: optimizer steps done, if they have stopped together with all others after the same step, else -1.
        held: the newest snapshot in its memory.
    """

    round: int
    store_port: int
    drained: int = -1
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """All workers of the round finished with 0."""

    round: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """This node leaves the run; nobody is to wait for it.

    Attributes:
        seconds: that it has left, and in which its workers can be drained; 0 if they cannot.
    """

    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Imported:
    """Workers of this node can begin at once from now on."""


Report = Hello | Beat | Progress | Imported | Saved | Joined | Ready | Failed | Stopped | Done | Leaving

# Orders: leader to node.


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hello was accepted."""

    term: int
    node_id: str
    beat: float
    dead_after: float


@dataclass(frozen=True, slots=True)
class Refused:
    """This node does not fit the run and must not come again."""

    term: int
    reason: str
    hint: str = ""
    code: int = 95


@dataclass(frozen=True, slots=True)
class Pulse:
    """I am alive (leader to node)."""

    term: int


@dataclass(frozen=True, slots=True)
class Form:
    """The round is formed and recorded: start its workers.

    Attributes:
        restarts: restarts charged so far.
        cause: why the last round ended, ``first`` for the first one.
        sources: who serves the newest snapshot, if no member has it.
    """

    term: int
    round: Round
    restarts: int
    cause: str
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the round's workers stop after the same step, save and end; then report them as stopped.

    Attributes:
        kind: as of Break.
        seconds: after which the round is broken; None for no such limit.
    """

    term: int
    round: int
    kind: str
    cause: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Break:
    """The round is over: stop its workers and report.

    Attributes:
        kind: see :class:`elastic_launch.rendezvous.verdict.Kind`.
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


ToNode = Form | Drain | Break | Depart | Released | SaveNow | Evicted | Notice | RunEnd
Order = Welcome | Refused | Pulse | ToNode | asking.Answer | asking.Found

_REPORTS: dict[str, type[Any]] = {
    "hello": Hello,
    "beat": Beat,
    "progress": Progress,
    "saved": Saved,
    "joined": Joined,
    "ready": Ready,
    "imported": Imported,
    "failed": Failed,
    "stopped": Stopped,
    "done": Done,
    "leaving": Leaving,
}
_ORDERS: dict[str, type[Any]] = {
    "welcome": Welcome,
    "refused": Refused,
    "pulse": Pulse,
    "form": Form,
    "drain": Drain,
    "break": Break,
    "depart": Depart,
    "released": Released,
    "save": SaveNow,
    "evicted": Evicted,
    "notice": Notice,
    "end": RunEnd,
}
_KINDS = {**_REPORTS, **_ORDERS, **asking.NAMES}
_NAMES = {kind: name for name, kind in _KINDS.items()}

Spoken = Report | Order | asking.Caller | asking.Request


def pack(message: Spoken) -> bytes:
    """Encode a message as one line."""
    return codec.dumps(message, type=_NAMES[type(message)]) + b"\n"


def unpack(line: bytes) -> Spoken:
    """Read one line.

    Raises:
        ProtocolError: if it is no message that this version knows.
    """
    value = codec.loads(line)
    name = value.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"A message of the unknown type {str(name)[:50]!r} came over a link.")
    message: Spoken = codec.decode(kind, value)
    return message
