"""The incident ledger: what each change of rounds cost, and for what share of the time training advanced.

An **incident** is a round that ended before the work was done: a fault, or a planned change. It begins when training
stops advancing, and ends with the next round's first step. Its parts are contiguous, so their sum is the time for which
training stood still. **Goodput** is productive time / total time. ``docs/reference/ledger.md`` defines each part, lost
steps, both times, and what is known of scripts that do not report steps: start covers only their processes, and
restore, first step, lost steps and goodput are None. The clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from elastic_launch.events.types import counted
from elastic_launch.failure import Suspect
from elastic_launch.observe.chronicle import Chronicle, RoundTold, Stretch

PARTS = ("detect_s", "stop_s", "form_s", "start_s", "restore_s", "first_step_s")
"""An incident's parts, in order."""

PLANNED = ("membership", "preemption")
"""Kinds of incidents that are not faults: changes of membership."""

_SPOKEN = ("detected", "stopped", "formed", "started", "restored", "first step")


@dataclass(frozen=True, slots=True)
class RoundIncident:
    """One round's end and what followed; times in seconds, None if unknown.

    Attributes:
        round: number of the round, which is the incident's id.
        still_s: sum of the parts. A part that was interrupted by another incident or the last event counts until then.
        kept, anew, ahead: how many of this host's workers in the next round kept their processes, were started, and had
            started ahead of it.
    """

    round: int
    next_round: int  # the round that followed; 0 if none did
    kind: str  # a kind of broken round; ``unknown`` if this host was not informed
    cause: str
    drained: bool  # whether it ended after the same step on all ranks, with its state saved
    detect_s: float | None
    stop_s: float | None
    form_s: float | None
    start_s: float | None
    restore_s: float | None
    first_step_s: float | None
    still_s: float
    lost_steps: int | None  # steps that were done before and have to be repeated
    recovered: bool  # whether the next round did a step or, for a plain script, its workers were started
    led: bool  # whether this host's leader formed the next round
    kept: int = 0
    anew: int = 0
    ahead: int = 0
    at_s: float = 0.0  # when training stopped advancing, in seconds from the host's first event
    exit_code: int | None = None  # of the worker whose failure is the cause; None if it is none that has ended
    suspects: tuple[Suspect, ...] = ()  # the nodes and ranks of which the cause is

    def line(self) -> str:
        """Return the incident in one line."""
        where = f"round {self.round} -> {self.next_round}" if self.next_round else f"round {self.round}, the last"
        parts = zip(_SPOKEN, (getattr(self, name) for name in PARTS), strict=True)
        spent = ", ".join(f"{word} {seconds:.2f} s" for word, seconds in parts if seconds is not None)
        lost = "" if self.lost_steps is None else f", {_steps(self.lost_steps)} lost"
        cause = " ".join(self.cause.split())
        what = " ".join(self.kind.split()) + (", drained" if self.drained else "") + (f" ({cause})" if cause else "")
        kept = f"; {counted(self.kept, 'worker')} kept, {self.anew} started" if self.kept or self.ahead else ""
        kept += f", {self.ahead} started ahead" if self.ahead else ""
        return f"incident {self.round}: {what} {where}: {spent}: stood still {self.still_s:.2f} s{lost}{kept}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """A run as seen by one host.

    Attributes:
        productive_s, total_s: see the module.
        unsaved_steps: steps since the last checkpoint, if the run ended before its work was done; None if unknown, as
            with a script that saves its state itself.
        lost_steps: these, plus those of all incidents that training went on after; None if unknown, also if one of them
            ended a round in which this host had no workers.
    """

    incidents: tuple[RoundIncident, ...]
    by_steps: bool  # whether workers reported steps; else productive time is their running time
    productive_s: float
    total_s: float
    steps: int | None  # steps that were kept; None if unknown
    unsaved_steps: int | None
    lost_steps: int | None
    restarts: int
    max_restarts: int | None  # None if unknown
    lost_ahead: int = 0  # workers of this host that had started ahead, and ended before they had a place in a round
    started: bool = False  # whether workers of this host have been started in a round
    unseen_s: float = 0.0  # seconds of rounds in which this host had no workers, which no other figure counts
    drained_last: bool = False  # whether the last round was drained; it counts as an incident only if a round follows
    done_before: int | None = None  # steps of a run that has ended with 0, and found all of them done; else None

    @property
    def goodput(self) -> float | None:
        """Productive time / total time, in [0, 1]; None if the total time is 0, steps are unknown or none was left."""
        known = self.by_steps and self.total_s > 0 and self.done_before is None
        return self.productive_s / self.total_s if known else None

    def line(self, max_restarts: int | None = None) -> str:
        """Return the run in one line."""
        most = self.max_restarts if max_restarts is None else max_restarts
        time = f"{self.productive_s:.1f} of {self.total_s:.1f} s"
        if self.done_before is not None:
            spent = f"nothing was left to train: {_steps(self.done_before)} had been done before"
        elif self.by_steps:
            goodput = "unknown" if self.goodput is None else f"{100 * self.goodput:.1f} %"
            kept = f"{time} in {_steps(self.steps)}" if self.steps else f"no step kept in {self.total_s:.1f} s"
            spent = f"goodput {goodput}: {kept}"
            if self.unseen_s >= 1:
                spent += f", without {self.unseen_s:.1f} s in which this node had no workers"
        elif self.productive_s > 0:
            spent = f"workers ran for {time}"
        elif self.started:
            spent = "workers have started on this node, and no event since then tells how long they have run"
        else:
            spent = "no worker has run on this node"
        kinds = Counter(incident.kind for incident in self.incidents)
        named = ", ".join(f"{number} {' '.join(kind.split())}" for kind, number in sorted(kinds.items()))
        incidents = counted(len(self.incidents), "incident") + (f" ({named})" if named else "")
        incidents += " before the last round was drained" if self.drained_last else ""
        lost = "" if self.lost_steps is None else f", {_steps(self.lost_steps)} lost"
        restarts = f"restarts {self.restarts}" + ("" if most is None else f" of {most}")
        ahead = f"; {counted(self.lost_ahead, 'worker')} lost before a round" if self.lost_ahead else ""
        return f"{spent}; {incidents}{lost}{ahead}; {restarts}"


def spoken(part: str) -> str:
    """Return the name of a part as text."""
    return part.removesuffix("_s").replace("_", " ")


def build(chronicle: Chronicle) -> Ledger:
    """Build the ledger from a host's events so far."""
    rounds = [told for _, told in sorted(chronicle.rounds.items())]
    since, until = chronicle.since or 0.0, chronicle.known
    by_steps = any(told.stretches for told in rounds)
    incidents: list[RoundIncident] = []
    faults = _faults(rounds, since, chronicle.until)
    later = _later(rounds)
    for index, (told, fault) in enumerate(zip(rounds, faults, strict=True)):
        following = rounds[index + 1] if index + 1 < len(rounds) else None
        if fault is None or (following is None and told.kind in PLANNED):
            continue  # a planned end without a next round is the end of the run, or of this node's part
        end = next((moment for moment in faults[index + 1 :] if moment is not None), until)
        if (following is None and chronicle.over) or (following is not None and _unknown(following)):
            formed = following.formed if following is not None else None
            end = min(end, max(x for x in (fault, told.ended, told.reaped, formed) if x is not None))
        lost = _lost(told, later[index]) if by_steps else None
        span = (fault, max(fault, end))
        incidents.append(_incident(told, following, span, lost, since=since, by_steps=by_steps))
    unsaved = _unsaved(chronicle, rounds) if by_steps else 0
    kept, productive = _productive(rounds, by_steps=by_steps, until=until, unsaved=unsaved or 0)
    unseen = _unseen(rounds, until)
    total = max(0.0, until - since - unseen)
    done = {training: x.last for told in rounds for training, x in told.stretches.items()}
    continued = {x.continues for told in rounds for x in told.stretches.values()}
    idle = by_steps and chronicle.code == 0 and not any(_worked(told) or _unknown(told) for told in rounds)
    known = [x.lost_steps for x in incidents if x.lost_steps is not None]
    complete = not any(x.round == told.number for x in incidents for told in rounds if _unknown(told))
    return Ledger(
        tuple(incidents),
        by_steps,
        round(min(productive, total), 6),
        round(total, 6),
        kept if by_steps else None,
        unsaved if by_steps else None,
        unsaved + sum(known) if by_steps and complete and unsaved is not None else None,
        chronicle.restarts,
        chronicle.max_restarts,
        chronicle.lost_ahead,
        any(told.started is not None for told in rounds),
        round(unseen, 6),
        bool(rounds) and faults[-1] is not None and rounds[-1].kind in PLANNED and _drained(rounds[-1]),
        sum(steps for training, steps in done.items() if training not in continued) if idle else None,
    )


def _faults(rounds: list[RoundTold], since: float, until: float) -> list[float | None]:
    """Return when each round's training stopped advancing: not before the first event or an earlier round's fault."""
    faults: list[float | None] = []
    latest = since
    for told in rounds:
        fault = _fault(told, last=told is rounds[-1])
        latest = latest if fault is None else max(min(fault, until), latest)
        faults.append(None if fault is None else latest)
    return faults


def _fault(told: RoundTold, *, last: bool) -> float | None:
    """Return when training stopped advancing; None if the round has not ended, or ended successfully."""
    ended = _ended(told, last=last)
    if ended is None:
        return None
    if _drained(told):
        fault = told.stepped if told.stepped is not None and told.closed else ended
    elif told.failed is not None and told.failed <= ended:
        fault = told.failed
    else:
        fault = ended - told.silent
        # Only the leader's host knows for how long a round hung. If the leader was lost with the round, the next one
        # learns of that later; a round that survives the loss of its leader does further steps.
        if told.stepped is not None and told.closed:
            unled = told.unled is not None and told.stepped <= told.unled
            fault = min(fault, told.stepped) if unled or told.kind == "hang" else fault
    return min(ended, max(fault, told.formed if told.formed is not None else fault))


def _unknown(told: RoundTold) -> bool:
    """Whether this host had no workers in the round, and does not know what they did."""
    return not told.mine and not told.stretches


def _worked(told: RoundTold) -> list[int]:
    """Return the numbers of the trainings of which the round did steps."""
    return [training for training, stretch in told.stretches.items() if stretch.last > stretch.step]


def _drained(told: RoundTold) -> bool:
    """Whether it ended after the same step on all ranks; a member only receives the order to drain."""
    return told.drained or (told.draining is not None and told.ended is None)


def _ended(told: RoundTold, *, last: bool) -> float | None:
    """Return when the round was known to be over; without an order, when its workers ended, or their steps did."""
    if told.ended is not None or last:
        return told.ended
    moments = (told.failed, told.reaped, told.stepped, told.formed)
    return next((x for x in moments if x is not None), None)


def _incident(
    told: RoundTold,
    following: RoundTold | None,
    span: tuple[float, float],
    lost: int | None,
    *,
    since: float,
    by_steps: bool,
) -> RoundIncident:
    """Split the time from the fault to the next one (or to the last event) into parts."""
    fault, end = span
    ended = _ended(told, last=following is None)
    stopped = told.reaped if told.reaped is not None and ended is not None and told.reaped > ended else ended
    marks: list[float | None] = [fault if _drained(told) else ended, stopped, None, None, None, None]
    if following is not None:
        marks[2] = following.formed
        if (resumed := following.resumed) is not None:
            marks[3:] = [resumed.begun - resumed.restore, resumed.begun, resumed.first]
        elif not by_steps:
            marks[3] = following.started
    recovered = marks[5 if by_steps else 3] is not None
    parts = _parts(fault, marks, end, whole=recovered)
    split: dict[str, Any] = dict(zip(PARTS, parts, strict=True))
    after = following or RoundTold(0)
    return RoundIncident(
        round=told.number,
        next_round=after.number,
        kind=told.kind or "unknown",
        cause=told.cause,
        drained=_drained(told),
        still_s=round(sum(part for part in parts if part is not None), 6),
        lost_steps=lost,
        recovered=recovered,
        led=after.led,
        kept=after.kept,
        anew=after.anew,
        ahead=after.ahead,
        at_s=round(fault - since, 6),
        exit_code=told.exit_code,
        suspects=told.suspects,
        **split,
    )


def _parts(start: float, marks: list[float | None], end: float, *, whole: bool) -> list[float | None]:
    """Return the seconds between the marks; unless ``whole``, the first part without a mark gets the rest."""
    parts: list[float | None] = []
    at = start
    for mark in marks:
        if mark is None:
            parts.append(None)
            continue
        moment = min(max(mark, at), end)
        parts.append(round(moment - at, 6))
        at = moment
    if not whole and None in parts and end > at:
        parts[parts.index(None)] = round(end - at, 6)
    return parts


def _resumed(told: RoundTold, trainings: set[int]) -> dict[int, int]:
    """Return the steps with which a round went on with trainings, or with which they begin after it."""
    again = min(_worked(told), default=None)
    anew = {} if again is None else {training: 0 for training in trainings if training > again}
    return anew | {training: stretch.step for training, stretch in told.stretches.items()}


def _trainings(rounds: list[RoundTold]) -> set[int]:
    return {training for told in rounds for training in told.stretches}


def _later(rounds: list[RoundTold]) -> list[dict[int, int]]:
    """Return, for each round, the steps with which those after it went on with each training first."""
    found: list[dict[int, int]] = []
    after: dict[int, int] = {}
    trainings = _trainings(rounds)
    for told in reversed(rounds):
        found.append(after)
        after = after | _resumed(told, trainings)
    return found[::-1]


def _lost(told: RoundTold, later: dict[int, int]) -> int | None:
    """Return the round's steps that had to be repeated; None until training resumes, and if only other hosts know."""
    if told.newest is None:
        return None if _unknown(told) else 0
    if told.newest[0] not in later and not _drained(told):
        return None
    return sum(max(0, x.last - later.get(training, x.last)) for training, x in told.stretches.items())


def _unsaved(chronicle: Chronicle, rounds: list[RoundTold]) -> int | None:
    """Return the steps that cannot be resumed from: their memory ended with the run, or with a node alone."""
    final = rounds[-1]
    alone = final.nodes == 1 or (bool(final.members) and not final.drained and final.gone >= set(final.members))
    if not chronicle.code or not (chronicle.over or alone):
        return 0
    if chronicle.saves_itself:
        return None
    training, last = _reached(rounds)
    return max(0, last - chronicle.saved.get(training, 0))


def _reached(rounds: list[RoundTold]) -> tuple[int, int]:
    """Return the training to which the run has come, and its steps."""
    reached = -1, 0
    for told in reversed(rounds):
        found = max(told.stretches, default=-1)
        if found > reached[0]:
            reached = found, told.stretches[found].last
        if _worked(told):
            break  # what earlier rounds did of further trainings is lost
    return reached


def _productive(rounds: list[RoundTold], *, by_steps: bool, until: float, unsaved: int) -> tuple[int, float]:
    """Return the steps kept, and the productive seconds."""
    if not by_steps:
        spans = [(told.started, _running_until(told, following, until)) for told, following in _with_next(rounds)]
        return 0, sum(max(0.0, end - start) for start, end in spans if start is not None)
    kept, seconds = 0, 0.0
    training, last = _reached(rounds)
    floors = {training: last - unsaved} if unsaved else {}
    trainings = _trainings(rounds)
    for told in reversed(rounds):
        for training, stretch in told.stretches.items():
            done = stretch.last - stretch.step
            mine = max(0, min(stretch.last, floors.get(training, stretch.last)) - stretch.step)
            kept += mine
            if done > 0:
                seconds += mine / done * _time_in_steps(stretch, done, until)
        for training, step in _resumed(told, trainings).items():
            floors[training] = min(step, floors.get(training, step))
    return kept, seconds


def _time_in_steps(told: Stretch, done: int, until: float) -> float:
    """Return the seconds of the round's steps; the first one counts at most as the mean of the others."""
    first = max(0.0, told.first - told.begun) if told.first is not None else 0.0
    trained = told.trained if told.trained is not None else first
    trained = min(trained, until - told.begun)
    if done > 1 and 0.0 < first <= trained:
        others = (trained - first) / (done - 1)
        trained -= max(0.0, first - others)
    return max(0.0, trained)


def _running_until(told: RoundTold, following: RoundTold | None, until: float) -> float:
    end = _fault(told, last=following is None)
    if end is None:
        end = told.reaped if told.reaped is not None else until
    return min(end, until)


def _unseen(rounds: list[RoundTold], until: float) -> float:
    """Return the seconds of rounds in which this host had no workers."""
    seconds, over = 0.0, None
    for told, following in _with_next(rounds):
        began = over if told.formed is None else told.formed
        if began is not None and not told.mine:
            seconds += max(0.0, _running_until(told, following, until) - began)
        over = max((x for x in (_fault(told, last=False), told.ended, told.reaped) if x is not None), default=None)
    return seconds


def _with_next(rounds: list[RoundTold]) -> list[tuple[RoundTold, RoundTold | None]]:
    return list(zip(rounds, [*rounds[1:], None], strict=False))


def _steps(number: int) -> str:
    return f"{number or 'no'} step" + ("" if number == 1 else "s")
