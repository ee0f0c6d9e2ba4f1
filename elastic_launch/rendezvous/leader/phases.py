"""The phases of a run as its leader sees them: the state of each phase, and the transitions between them.

==========  ====================================================================  ==================================
Phase       Moves when                                                            To
==========  ====================================================================  ==================================
Gathering   enough nodes are there (after the first round: at once)               Running
            fewer than ``min_nodes`` are there                                    ParkedRun
            the user stops the run                                                Ended (143)
ParkedRun   enough nodes are there                                                Running
            ``min_wait`` is over                                                  Ended (too few nodes)
            the user stops the run                                                Ended (143)
Running     a node leaves, a resize is due, the user stops the run, or a worker   Draining if all members can,
            was told to stop                                                      else Broken
            a worker fails, a member is lost or does not start its workers        Broken
            all members are done                                                  Ended (0)
Draining    all members have stopped                                              Broken (by no fault)
            a worker fails, a member is lost, some are done, time is up, or       Broken
            it hangs and no time is set
            all members are done                                                  Ended (0)
Broken      it is judged, all members have stopped, and its delay is over         Gathering
            it is judged to be the last, or a final failure is reported later     Ending
Ending      all members have stopped, or :data:`LATE` is over                     Ended (as judged)
any         another run stands in the way, or the record cannot be written        Ended (rendezvous)
==========  ====================================================================  ==================================

A final failure of the last round that is reported late also moves a run that is Gathering or ParkedRun to Ending.
The first phase is Running if the leader took over a round, else Gathering, or Ended if the record says so. Workers may
be alive while a run is Running, Draining, Broken or Ending; a node without workers waits in any phase. ``rounds``
implements the transitions, ``forming`` those out of Gathering and ParkedRun.
"""

# Every match on the phase is exhaustive: a new phase must be handled everywhere.
# mypy: enable-error-code="exhaustive-match"
from __future__ import annotations

from dataclasses import dataclass, field

from elastic_launch.events.facts import BudgetEnd, Cause, UserStop
from elastic_launch.failure import Failure, Suspect
from elastic_launch.rendezvous.leader.verdict import Kind

COLLECT = 0.2
"""Seconds for which reports about a broken round are collected before it is judged, unless all arrive earlier."""

LATE = 3.0
"""Seconds for which a run that ends by a failure waits for nodes that are still stopping workers, and their reports.

Their agents wait for the workers anyway, and no round is delayed by it.
"""


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """The consequences of a broken round.

    Attributes:
        kind: the kind that counts among all that was reported.
        idle: consecutive restarts without progress, if it is charged for that; else 0.
        delay: seconds until the next round may form.
        ends: why the run ends here; None if it continues.
    """

    kind: Kind
    charged: bool = False
    idle: int = 0
    delay: float = 0.0
    ends: BudgetEnd | None = None


@dataclass(slots=True)
class Running:
    """A round is training.

    Attributes:
        formed_at: when it was formed, or taken over from another leader.
        taken_over: another leader formed it.
        earlier: seconds that it had lasted by then.
        fetching: members may still need a snapshot that leaving nodes serve.
        begun: the step at which it began to train; None if not reported.
        reached: optimizer steps done, as last reported; None if never.
    """

    formed_at: float
    taken_over: bool = False
    earlier: float = 0.0
    fetching: bool = False
    begun: int | None = None
    reached: int | None = None


@dataclass(slots=True)
class Draining:
    """The workers of a round are stopping after the same step.

    Attributes:
        running: the round before the drain.
        deadline: when the round is broken if some workers have not stopped.
        ends: why the run ends with it; None if another round follows.
        step: optimizer steps done, as far as reported.
        saved: whether a node has committed that state to durable storage.
        unsaved: why a node that should have committed it has not.
    """

    running: Running
    at: float
    kind: Kind
    cause: Cause
    deadline: float | None = None
    ends: UserStop | None = None
    step: int = 0
    saved: bool = False
    unsaved: str = ""


@dataclass(slots=True)
class Broken:
    """A round was broken or drained, and its members are stopping their workers.

    Attributes:
        imposed: the most significant known event that affected its nodes; None if only workers have failed.
        presumed: ``imposed`` is only a guess: a member had been told by the last leader to stop its workers, and
            another one may know of the failure that was the reason.
        cause: the cause known so far.
        told: the failure that it was last told for; None if for an event on its nodes.
        suspects: the nodes and ranks that it is of.
        failures: the reports received, each with the leader's time of receipt.
        lasted: seconds from its forming to its end.
        taken_over: another leader formed it.
        begun: the step at which it began to train; None if not reported.
        reached: optimizer steps done, as last reported; None if never.
        ends: why the run ends when all have stopped, at the user's request; None if another round follows.
        judged_at: when its cost was decided; None if not yet.
        not_before: when the next round may form.
        failure: the failure that the end of the run shows.
    """

    at: float
    imposed: Kind | None
    cause: Cause
    failures: list[tuple[float, Failure]] = field(default_factory=list)
    lasted: float = 0.0
    begun: int | None = None
    reached: int | None = None
    ends: UserStop | None = None
    judged_at: float | None = None
    not_before: float = 0.0
    failure: Failure | None = None
    presumed: bool = False
    taken_over: bool = False
    told: Failure | None = None
    suspects: tuple[Suspect, ...] = ()


@dataclass(slots=True)
class Gathering:
    """No worker is left, and the next round forms once all expected nodes are there.

    Attributes:
        after: the previous round; None before the first one.
        ends: why the run ends instead, once the previous leader's nodes are known; None if it does not.
    """

    after: Broken | None = None
    ends: UserStop | None = None


@dataclass(slots=True)
class ParkedRun:
    """Too few nodes were there for a round, since ``at``."""

    after: Broken | None
    at: float


@dataclass(slots=True)
class Ending:
    """The run ends as decided for its last round, once its members have stopped."""

    after: Broken
    ruling: BudgetDecision
    since: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The record contains the run's end; ``failure`` is the failure that it shows, if one caused it."""

    failure: Failure | None = None


Phase = Gathering | ParkedRun | Running | Draining | Broken | Ending | Ended


def highest(*steps: int | None) -> int | None:
    """Return the highest of the steps that are known; None if none is."""
    return max((step for step in steps if step is not None), default=None)


def broken_round(phase: Phase) -> Broken | None:
    """Return the last round if it is over and no other has been formed yet."""
    match phase:
        case Broken():
            return phase
        case Gathering() | ParkedRun() | Ending():
            return phase.after
        case Running() | Draining() | Ended():
            return None


def last_failure(phase: Phase) -> Failure | None:
    """Return the failure that the run's end shows, or would show if it came now."""
    if isinstance(phase, Ended):
        return phase.failure
    last = broken_round(phase)
    return last.failure if last is not None else None


def over(
    phase: Running | Draining, at: float, imposed: Kind | None, cause: Cause, ends: UserStop | None = None
) -> Broken:
    """Return the phase that follows a round that ended at time ``at`` for a cause."""
    if isinstance(phase, Draining):
        return over(phase.running, at, imposed, cause, ends or phase.ends)
    return Broken(
        at,
        imposed,
        cause,
        lasted=at - phase.formed_at + phase.earlier,
        begun=phase.begun,
        reached=phase.reached,
        ends=ends,
        taken_over=phase.taken_over,
    )


def put_off(phase: Phase, seconds: float) -> None:
    """Shift the start of all deadlines by the seconds for which the leader's process was suspended."""
    if (broken := broken_round(phase)) is not None:
        broken.at += seconds
        if broken.judged_at is not None:
            broken.judged_at += seconds
    match phase:
        case Running():
            phase.formed_at += seconds
        case Draining():
            phase.running.formed_at += seconds
        case ParkedRun():
            phase.at += seconds
        case Ending():
            phase.since += seconds
        case Broken() | Gathering() | Ended():
            pass
