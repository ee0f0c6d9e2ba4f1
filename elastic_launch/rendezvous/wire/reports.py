"""What a node tells its leader."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.rendezvous.snapshot_holders import HeldSnapshot

__all__ = [
    "Beat",
    "Done",
    "Failed",
    "Failure",
    "Hello",
    "Imported",
    "Joined",
    "Leaving",
    "Progress",
    "Ready",
    "Report",
    "Saved",
    "Stopped",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's failure, as its node saw it.

    Attributes:
        kind: ``crash``, ``out of memory``, ``preemption``, ``startup`` or ``fatal``.
        exit_code: as of ``subprocess``: -N for signal N.
        message: one line: the exception, or the signal's name.
        detail: traceback, or the last lines of stderr.
        ran: seconds from the worker's start to its end.
        ago: seconds from its failure to this report, by the node's clock. It failed when its exception reached the
            top, or else when it ended.
        log: where its log files are, on its node.
        host: name of the node's host.
        symptom: what tells that it failed because another rank had: ``broken connection`` or ``time-out``; else empty.
        trained: optimizer steps that the round has done by then, as far as the node knows; -1 if it knows of none.
        supposed: whether it may not have failed: a traceback was the last that it printed before it was stopped, and
            may be that of an exception which it had handled.
        repeats: where it failed, if a restart computes the same numbers there again; else empty.
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
    log: str = ""
    round: int = 0
    host: str = ""
    symptom: str = ""
    trained: int = -1
    supposed: bool = False
    repeats: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a link.

    Attributes:
        command, limits: this node's, in words, so that what differs can be told.
        wanted_rank: rank that the node asks for, or None.
        holding: number of the round whose workers it still has, 0 for none.
        joined, ready, done: whether all of these are started; can be drained; have finished.
        importing: whether its workers could not begin at once, because what they import is not loaded yet.
        leaving: why the node leaves the run, or empty: its goodbye may have been lost with the link before.
        seen_term, seen_round, seen_restarts: the highest it knows; a leader that lost its store rebuilds it from them.
        held: as of Stopped.
        role: of its workers.
        shutdown_timeout: seconds that its workers have between SIGTERM and SIGKILL.
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
    importing: bool = False
    held: HeldSnapshot | None = None
    shutdown_timeout: float = 0.0
    role: str = "default"


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
        step: optimizer steps that were done when they began; -1 if that is not known.
    """

    round: int
    remaining_s: float = -1.0
    step: int = -1


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
        saved: whether this node has committed the drained state to durable storage by now.
        unsaved: why not, where it waited for that; empty if it was not this node's part, or it did not wait.
    """

    round: int
    store_port: int
    drained: int = -1
    held: HeldSnapshot | None = None
    saved: bool = False
    unsaved: str = ""


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
