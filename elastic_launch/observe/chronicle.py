"""The events of one host, round by round: the input of a ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_launch.events import types as ev
from elastic_launch.failure import Suspect


@dataclass(slots=True)
class Stretch:
    """What a round did of one of the script's trainings; times are as in :class:`RoundTold`.

    Attributes:
        begun, first: when the first of this host's workers reached its beginning, and when its first step was done.
        restore: seconds of restoring, those of trainings before it without a step in the round included.
        continues: see TrainingBegun.
        step, last, trained: steps done when it began, and the last ones that are known; seconds until those were done.
    """

    begun: float
    restore: float
    step: int
    last: int
    first: float | None = None
    trained: float | None = None
    continues: int | None = None


@dataclass(slots=True)
class RoundTold:
    """One host's view of a round, from its events; times are by its monotonic clock, None if unknown.

    Attributes:
        nodes, world: number of nodes and workers in it; 0 if unknown.
        kept, anew, ahead: how many of this host's workers kept their processes, were started, and had started ahead.
        stretches: what it did of each of the script's trainings, by their numbers, in the order in which they began.
        unled: when this host noticed that it had lost its leader, last, if the round was not over then.
        members: ids of its nodes, if this host decided it; ``gone`` are nodes that have left or were lost since.
    """

    number: int
    formed: float | None = None  # when it was recorded, or its order received; ``led`` is whether this host decided it
    led: bool = False
    nodes: int = 0
    world: int = 0
    mine: bool = False  # whether this host has workers in it
    started: float | None = None  # when the last of this host's workers was started, or got its place
    kept: int = 0
    anew: int = 0
    ahead: int = 0
    stretches: dict[int, Stretch] = field(default_factory=dict)
    closed: bool = False  # whether their steps were the last; if not, the round goes on, or its agent was killed
    draining: float | None = None  # when its drain was ordered
    ended: float | None = None  # when it was broken or had drained; or, without an order, when its workers were stopped
    drained: bool = False
    failed: float | None = None  # when the first worker of this host ended unsuccessfully by itself
    reaped: float | None = None  # when the last of this host's workers was reaped
    silent: float = 0.0  # seconds for which a node was silent before it was declared dead, or training stood still
    unled: float | None = None
    kind: str = ""
    cause: str = ""
    exit_code: int | None = None  # of the worker whose failure is the cause
    suspects: tuple[Suspect, ...] = ()  # of which the cause is
    members: tuple[str, ...] = ()
    gone: set[str] = field(default_factory=set)

    @property
    def newest(self) -> tuple[int, Stretch] | None:
        """The training that began last, with its number; None if none has begun."""
        return next(reversed(self.stretches.items()), None)

    @property
    def resumed(self) -> Stretch | None:
        """The training with which the round's steps began; until one was done, the one that began last."""
        return next((x for x in self.stretches.values() if x.first is not None), self.newest and self.newest[1])

    @property
    def first(self) -> float | None:
        """When the round's first step was done."""
        return None if self.resumed is None else self.resumed.first

    @property
    def stepped(self) -> float | None:
        """When the last step that is known was done; of a training without one, when it began."""
        if self.newest is None:
            return None
        last = self.newest[1]
        if last.trained is not None:
            return last.begun + last.trained
        return last.begun if last.first is None else last.first

    def did(self, training: int, step: int) -> Stretch | None:
        """Add a step of a training; return what the round did of it, None if it is not known to have begun."""
        if (found := self.stretches.get(training)) is not None:
            found.last = max(step, found.last)
        return found


class Chronicle:
    """Collects the events of one host in the order in which it wrote them.

    Attributes:
        since, until: times of the first and the last event.
        restarts, max_restarts: restarts charged, as far as this host knows, and the budget; None if unknown.
        code, why: exit code of the run, or of this node's part, and the cause; None if neither has ended.
    """

    def __init__(self) -> None:
        self.rounds: dict[int, RoundTold] = {}
        self.since: float | None = None
        self.until = 0.0
        self.restarts = 0
        self.max_restarts: int | None = None
        self.over = False
        self.code: int | None = None
        self.why = ""
        self.agent_ended = False  # a run that is over may still be saved
        self.where = self.root_cause = ""  # of its end, see NodeEnded
        self.saved: dict[int, int] = {}  # steps in the last checkpoint of each training that this host knows of
        self.saves_itself = False  # what the script has saved is not known
        self.lost_ahead = 0  # workers of this host that had started ahead, and ended before they had a place in a round
        self.link_cause = ""  # why the link to the leader is down; empty if it is up
        self._led_term = self._seen_term = 0

    @property
    def leads(self) -> bool:
        """Whether this host made the last decision that it knows of."""
        return 0 < self._led_term >= self._seen_term

    @property
    def known(self) -> float:
        """Until when the events tell what the run did.

        While a round trains, that is the last progress that they tell: events after it say nothing of its steps.
        """
        told = self.rounds[max(self.rounds)] if self.rounds else RoundTold(0)
        if self.over or self.code is not None or told.newest is None or told.closed:
            return self.until
        trains = told.newest[1]
        if trains.first is None:
            return self.until
        if any(x is not None for x in (told.ended, told.failed, told.reaped, told.draining)):
            return self.until
        return min(self.until, max(trains.first, trains.begun + (trains.trained or 0.0)))

    def add(self, clock: float, event: ev.Event) -> None:
        """Add an event.

        Args:
            clock: the host's clock, in seconds; never less than before.
        """
        if self.since is None:
            self.since = clock
        self.until = max(self.until, clock)
        match event:
            case ev.RoundFormed(round=number, term=term, restarts=restarts, nodes=nodes, world_size=world):
                told = self._of(number)
                told.formed, told.led, told.nodes, told.members, told.world = clock, True, len(nodes), nodes, world
                self.restarts, self._led_term = max(self.restarts, restarts), max(term, self._led_term)
            case ev.RoundDraining(round=number, kind=kind, cause=cause):
                told = self._of(number)
                told.draining, told.kind, told.cause = clock, kind, cause
            case ev.RoundDrained(round=number, step=step, kind=kind, cause=cause):
                told = self._of(number)
                told.ended, told.drained, told.kind, told.cause = clock, True, kind, cause
                if told.newest is not None:
                    told.did(told.newest[0], step)
            case ev.RoundBroken(round=number, kind=kind, cause=cause, exit_code=code):
                told = self._of(number)
                told.ended, told.drained = clock, False
                told.kind, told.cause, told.exit_code, told.suspects = kind, cause, code, event.suspects
            case ev.NodeLost(node=node, broke=number, detect_s=seconds):
                self._gone(node)
                if number:
                    self._of(number).silent = max(0.0, seconds)
            case ev.NodeLeft(node=node):
                self._gone(node)
            case ev.HangFound(round=number, still_s=seconds):
                self._of(number).silent = max(0.0, seconds)
            case ev.CauseFound(round=number, kind=kind, cause=cause, exit_code=code):
                told = self._of(number)
                told.kind, told.cause, told.exit_code, told.suspects = kind, cause, code, event.suspects
            case ev.RestartCharged(round=number, kind=kind, restarts=restarts, max_restarts=most):
                self._of(number).kind = kind
                self.restarts, self.max_restarts = max(self.restarts, restarts), most
            case ev.RunEnded(restarts=restarts, code=code, cause=cause):
                self.restarts, self.over = max(self.restarts, restarts), True
                self.code, self.why = code, cause
            case ev.NodeEnded(code=code, cause=cause, saved=where, root_cause=root_cause):
                self.agent_ended, self.where, self.root_cause = True, where, root_cause
                self.code, self.why = code, self.why if self.over and self.why else cause
            case ev.CheckpointSaved(round=number, step=step, training=training):
                self.saved[training] = step
                known = self.rounds.get(number, RoundTold(number))
                if not known.closed and known.newest is not None and known.newest[0] == training:
                    trains = known.newest[1]
                    if step > trains.last:
                        trains.last, trains.trained = step, clock - trains.begun
            case ev.OrderReceived():
                self._ordered(clock, event)
            case ev.LinkChanged(up=up, cause=cause):
                newest = self.rounds[max(self.rounds)] if self.rounds else None
                if newest is not None and newest.ended is None and not up and not self.link_cause:
                    newest.unled = clock
                self.link_cause = "" if up else cause
                if up and not self.over:  # an agent of this node has ended before, and another one has joined
                    self.code, self.why = None, ""
            case ev.WorkerStarted(round=0):
                pass  # it is ahead of a round
            case ev.WorkerExited(round=0, stopped=stopped):
                self.lost_ahead += not stopped
            case ev.WorkerStarted(round=number) | ev.WorkerKept(round=number) | ev.WorkerPlaced(round=number):
                told = self._of(number)
                told.mine, told.started = True, clock
                told.kept += isinstance(event, ev.WorkerKept)
                told.anew += isinstance(event, ev.WorkerStarted)
                told.ahead += isinstance(event, ev.WorkerPlaced)
            case ev.WorkerExited():
                self._exited(clock, event)
            case ev.TrainingBegun(round=number, step=step, restore_s=seconds, training=training):
                self.saves_itself = event.saves_itself
                told = self._of(number)
                before = 0.0 if told.resumed is None or told.first is not None else told.resumed.restore
                restore, goes_on = before + max(0.0, seconds), event.continues
                told.stretches[training] = Stretch(clock, restore, step, step, continues=goes_on)
                self.saved.setdefault(training, step)  # restored from a checkpoint, or no steps yet
            case ev.FirstStep(round=number, step=step, training=training):
                if (found := self._of(number).did(training, step)) is not None:
                    found.first = clock
            case ev.RoundProgress(round=number, step=last, trained_s=seconds, training=training):
                told = self._of(number)
                if not told.closed and (found := told.did(training, last)) is not None and last == found.last:
                    found.trained = max(0.0, seconds)
            case ev.RoundSteps(round=number, last=last, trained_s=seconds, training=training):
                told = self._of(number)
                told.closed = True
                if (found := told.did(training, last)) is not None:
                    found.trained = max(0.0, seconds)

    def _gone(self, node: str) -> None:
        if self.rounds:
            self.rounds[max(self.rounds)].gone.add(node)

    def _of(self, number: int) -> RoundTold:
        return self.rounds.setdefault(number, RoundTold(number))

    def _ordered(self, clock: float, event: ev.OrderReceived) -> None:
        """Add a leader's decision. Events of a leader on this host say more, and may come before or after."""
        self._seen_term = max(self._seen_term, event.term)
        self.over = self.over or event.order == "end"
        if not event.round:
            return
        told = self._of(event.round)
        match event.order:
            case "form":
                told.mine, told.world = True, event.world_size or told.world
                told.formed = clock if told.formed is None else told.formed
            case "drain" if told.draining is None:
                told.draining, told.kind, told.cause = clock, event.kind, event.cause
            case "break" | "evicted" if told.ended is None:
                told.ended, told.cause, told.suspects = clock, event.cause, event.suspects
                told.kind = event.kind or told.kind

    def _exited(self, clock: float, event: ev.WorkerExited) -> None:
        told = self._of(event.round)
        told.reaped = clock
        if event.exit_code != 0 and not event.stopped and told.failed is None:
            told.failed = clock
        if event.stopped and told.ended is None and told.draining is None and not told.cause:
            told.cause = self.link_cause  # there was no order: the leader is gone
