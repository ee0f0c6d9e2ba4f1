"""The phases of a run as its leader sees them: what each one holds, and what moves the run to another.

==========  ====================================================================  ==================================
Phase       Moves when                                                            To
==========  ====================================================================  ==================================
Gathering   enough nodes are there (after the first round: at once)               Running
            fewer than ``min_nodes`` are there                                    Parked
            the user stops the run                                                Ended (143)
Parked      enough nodes are there                                                Running
            ``min_wait`` is over                                                  Ended (too few nodes)
            the user stops the run                                                Ended (143)
Running     a node leaves, a resize is due, the user stops the run, or a worker   Draining if all members can,
            was told to stop                                                      else Broken
            a worker fails, a member is lost or does not start its workers        Broken
            all members are done                                                  Ended (0)
Draining    all members have stopped                                              Broken (by no fault)
            a worker fails, a member is lost, some are done, time is up           Broken
            all members are done                                                  Ended (0)
Broken      it is judged, all members have stopped, and its delay is over         Gathering
            it is judged to be the last, or a final failure is reported later     Ending
Ending      all members have stopped, or :data:`LATE` is over                     Ended (as judged)
any         another run stands in the way, or the record cannot be written        Ended (rendezvous)
==========  ====================================================================  ==================================

A final failure of the last round that is reported late moves a run that is Gathering or Parked after it to Ending, too.
The first phase is Running if the leader took over a round, else Gathering, or Ended if the record says so. Workers may
live while a run is Running, Draining, Broken or Ending; a node without workers waits in any phase. ``rounds`` has the
moves, ``forming`` those of a run that is Gathering or Parked.
"""

# Every match on the phase is total: a new phase must be handled everywhere.
# mypy: enable-error-code="exhaustive-match"
from __future__ import annotations

from dataclasses import dataclass, field

from elastic_launch.rendezvous.leader.verdict import Kind
from elastic_launch.rendezvous.wire.messages import Failure

__all__ = [
    "COLLECT",
    "LATE",
    "Broken",
    "BudgetDecision",
    "Draining",
    "Ended",
    "Ending",
    "Gathering",
    "Parked",
    "Phase",
    "Running",
    "broken_round",
    "last_failure",
    "over",
    "put_off",
]

COLLECT = 0.2
"""Seconds for which reports about a broken round are collected before it is judged, unless all are in before."""

LATE = 3.0
"""Seconds for which a run that ends by a failure waits for nodes that still stop their workers, and what these say.

Their agents wait for these anyway, and no round waits for it.
"""

NOT_REPORTED = "no node has reported a checkpoint of it"
"""Why a state counts as not saved, where no node says why it is not."""


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """What follows from a broken round.

    Attributes:
        kind: what counts of all that was reported.
        charged: it cost a restart.
        idle: restarts in a row without progress, if it is charged for that; else 0.
        delay: seconds until the next round may form.
        ends: why the run ends here, in words; empty if it goes on.
    """

    kind: Kind
    charged: bool = False
    idle: int = 0
    delay: float = 0.0
    ends: str = ""


@dataclass(slots=True)
class Running:
    """A round trains.

    Attributes:
        formed_at: when it was formed, or taken over from another leader.
        taken_over: another leader formed it.
        fetching: members may still need what leavers serve.
        begun: the step at which it began to train; None if it has not said so.
    """

    formed_at: float
    taken_over: bool = False
    fetching: bool = False
    begun: int | None = None


@dataclass(slots=True)
class Draining:
    """The workers of a round are stopping after the same step.

    Attributes:
        running: the round as it was before.
        deadline: when it is broken, if some have not stopped by then.
        ends: why the run ends with it; empty if another round follows.
        step: optimizer steps done, as far as reported.
        saved: a node has committed that state to durable storage.
        unsaved: why one has not that should have.
    """

    running: Running
    at: float
    kind: Kind
    cause: str
    deadline: float | None = None
    ends: str = ""
    step: int = 0
    saved: bool = False
    unsaved: str = ""

    @property
    def kept(self) -> str:
        """Where the state is, in words."""
        return "its state saved" if self.saved else f"its state not saved: {self.unsaved or NOT_REPORTED}"


@dataclass(slots=True)
class Broken:
    """A round was broken or drained, and its members are stopping their workers.

    Attributes:
        imposed: what befell its nodes, of what is known the most significant; None if only workers have failed.
        cause: in words, as known by now.
        failures: reports that came in, each with the leader's time of its receipt.
        lasted: seconds from its forming to its end.
        begun: the step at which it began to train; None if it did not say so.
        ends: why the run ends when all have stopped, since the user wants it; empty if another round follows.
        judged_at: since when it is known what it costs; None: not yet.
        not_before: when the next round may form.
        failure: the failure that a run's end is to show.
    """

    at: float
    imposed: Kind | None
    cause: str
    failures: list[tuple[float, Failure]] = field(default_factory=list)
    lasted: float = 0.0
    begun: int | None = None
    ends: str = ""
    judged_at: float | None = None
    not_before: float = 0.0
    failure: Failure | None = None


@dataclass(slots=True)
class Gathering:
    """No worker is left, and the next round forms as soon as all nodes are there that it may expect.

    Attributes:
        after: the round before; None before the first one.
        ends: why the run ends instead, once the nodes of the leader before are known; empty if it does not.
    """

    after: Broken | None = None
    ends: str = ""


@dataclass(slots=True)
class Parked:
    """Too few nodes were there for a round, since ``at``."""

    after: Broken | None
    at: float


@dataclass(slots=True)
class Ending:
    """The run ends by a ruling about its last round, as soon as its members have stopped.

    Attributes:
        since: when that was known.
    """

    after: Broken
    ruling: BudgetDecision
    since: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The record holds the run's end; ``failure`` is what it shows of it, if one caused it."""

    failure: Failure | None = None


Phase = Gathering | Parked | Running | Draining | Broken | Ending | Ended


def broken_round(phase: Phase) -> Broken | None:
    """Return the last round if it is over and no other was formed yet."""
    match phase:
        case Broken():
            return phase
        case Gathering() | Parked() | Ending():
            return phase.after
        case Running() | Draining() | Ended():
            return None


def last_failure(phase: Phase) -> Failure | None:
    """Return the failure that the run's end shows, or would show if it came now."""
    if isinstance(phase, Ended):
        return phase.failure
    last = broken_round(phase)
    return last.failure if last is not None else None


def over(phase: Running | Draining, at: float, imposed: Kind | None, cause: str, ends: str = "") -> Broken:
    """Return what becomes of a round that ends at a moment for a cause."""
    if isinstance(phase, Draining):
        return over(phase.running, at, imposed, cause, ends or phase.ends)
    return Broken(at, imposed, cause, lasted=at - phase.formed_at, begun=phase.begun, ends=ends)


def put_off(phase: Phase, seconds: float) -> None:
    """Shift the moments that deadlines count from: the leader's process was stopped for so long."""
    if (broken := broken_round(phase)) is not None:
        broken.at += seconds
        if broken.judged_at is not None:
            broken.judged_at += seconds
    match phase:
        case Running():
            phase.formed_at += seconds
        case Draining():
            phase.running.formed_at += seconds
        case Parked():
            phase.at += seconds
        case Ending():
            phase.since += seconds
        case Broken() | Gathering() | Ended():
            pass
