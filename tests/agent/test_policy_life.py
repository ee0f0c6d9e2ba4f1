"""What holds of the agent's decisions under any sequence of events.

The examples are the same in every run; HYPOTHESIS_EXAMPLES=5000 looks at so many random ones instead.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from signal import SIGINT, SIGTERM

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_events import CUT_OFF, GONE, INT_CODE, LOST, OUT, SILENT, TERM_CODE, brk, decide, form, leave

from elastic_agents import policy_types as v
from elastic_agents.policy_types import Phase, View
from elastic_launch import contract as c
from elastic_launch.rendezvous.wire import messages as m

EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")


class AgentLife(RuleBasedStateMachine):
    """An agent with its workers, its leader and its user; the leader may say anything at any time."""

    @initialize(nproc=st.integers(1, 3), slow=st.booleans())
    def begin(self, nproc: int, slow: bool) -> None:
        self.nproc = nproc
        self.view = View(ahead=v.AheadWorkers(slow=slow))
        self.all = frozenset(range(nproc))
        self.slots = self.all  # with which the node takes part in the round
        self.offer = self.all  # with which it could take part in the next one, as the leader was told
        self.coming: set[int] = set()  # workers ahead
        self.waiting: set[int] = set()
        self.unplaced: set[int] = set()  # of the round's workers, those that have to come before they get their place
        self.awaits_news = False  # the leader has ordered them to start ahead, and was not told that they are there
        self.round = 0
        self.workers: set[int] = set()  # that live
        self.codes: dict[int, int] = {}  # exit codes in this round
        self.reported: set[int] = set()
        self.graces: list[int] = []
        self.holds: list[tuple[int, int]] = []
        self.ready: set[int] = set()
        self.drained: set[int] = set()
        self.live: set[int] = set()  # that have said so, and were not told to end
        self.asked: set[int] = set()  # that were told to leave the round, or to stop after a step
        self.suspended: set[int] = set()
        self.exiting: set[int] = set()
        self.dying = 0  # killed as they were suspended; the node waits without them
        self.stopped: list[int] = []  # rounds reported as stopped
        self.suspensions: list[int] = []
        self.limits: list[int] = []
        self.teardowns: list[v.TeardownOver] = []
        self.copying = False
        self.finished: list[v.Finish] = []
        self.promised: int | None = None  # the code that a signal has settled
        self.fails_to_start: frozenset[int] | None = None

    def decide(self, event: v.Event) -> list[v.Action]:
        before = self.view
        if isinstance(event, v.Leave) and before.leaving is None and before.phase is not Phase.OVER:
            self.promised = event.code
        self.view, actions = decide(before, event, self.nproc, "n0")
        if before.phase is Phase.OVER:
            assert actions == []
            assert self.view == before
        for action in actions:
            assert not self.finished, "an action after the end"
            self._carry_out(action)
        return actions

    def _carry_out(self, action: v.Action) -> None:
        match action:
            case v.StartWorkers(form=order, kept=kept, waiting=waiting, coming=coming):
                assert not self.workers, "workers beside others"
                assert self.promised is None, "a start after a signal"
                self.slots = frozenset(order.round.members[0].slots)
                assert kept == self.suspended & self.slots, "a suspended worker is forgotten"
                assert (waiting, coming) == (self.waiting & self.slots, self.coming & self.slots)
                assert order.round.number > self.round or not kept, "revived for a round that is over"
                self.round, self.unplaced, self.awaits_news = order.round.number, set(coming), False
                self.waiting -= self.slots
                self.coming -= self.slots
                there = kept | waiting | coming
                started = self.slots if self.fails_to_start is None else self.fails_to_start | there
                self.workers, self.codes, self.reported = set(started), {}, set()
                self.ready, self.drained, self.exiting, self.asked = set(), set(), set(), set()
                self.live, self.suspended = set(kept | waiting), set()
            case v.StartWorkersAhead(local_ranks=local_ranks):
                assert self.promised is None
                assert not local_ranks & (self.workers | self.suspended | self.coming | self.waiting), "a second worker"
                self.coming |= local_ranks
            case v.KillAhead(local_ranks=local_ranks):
                assert local_ranks <= self.coming | self.waiting
                if self.view.leaving is not None or self.view.final:
                    self.coming, self.waiting = set(), set()
            case v.GivePlace(local_rank=local_rank):
                assert local_rank in self.unplaced & self.workers
                self.unplaced.remove(local_rank)
                self.live.add(local_rank)
            case m.RankOffer(slots=slots):
                self.offer = frozenset(slots) or self.all
            case m.Imported():
                assert not self.coming, "not all of them are there"
                self.awaits_news = False
            case v.SuspendWorkers(round=number, local_ranks=local_ranks):
                assert number == self.round
                assert self.view.phase is Phase.STOPPING
                assert local_ranks
                assert local_ranks <= self.live & self.workers, "a worker is told to suspend that cannot"
                self.asked |= local_ranks
                self.suspensions.append(number)
            case v.SendExit(local_ranks=local_ranks):
                assert local_ranks <= self.suspended
                assert self.view.leaving is not None or self.view.final
                self.suspended -= local_ranks
                self.workers |= local_ranks
                self.exiting |= local_ranks
            case v.ReportDisconnected(local_rank=local_rank):
                assert local_rank in self.live & self.workers
            case v.AskStop(round=number, seconds=seconds):
                assert number == self.round
                assert self.view.phase is Phase.DRAINING
                assert self.workers <= self.ready, "a worker is asked that does not listen"
                self.asked |= self.workers
                if seconds is not None:
                    self.limits.append(number)
            case v.AwaitCopies(bounded=bounded):
                assert not self.workers | self.suspended, "workers that still change what is copied"
                assert self.view.leaving is not None or self.view.final
                self.copying = True
                if bounded:
                    self.limits.append(self.round)
            case v.Later(event=v.TeardownOver() as over):
                self.teardowns.append(over)
            case v.ReportReady(round=number):
                assert number == self.round
                assert self.workers <= self.ready
            case v.Terminate(round=number, local_ranks=local_ranks):
                assert number == self.round
                assert self.view.phase is Phase.STOPPING
                assert local_ranks is None or local_ranks <= self.workers
                assert local_ranks is not None or not self.suspended, "a suspended worker gets a signal"
                self._told_to_end(self.workers if local_ranks is None else local_ranks)
                self.graces.append(number)
            case v.Kill(local_ranks=None):
                if self.view.phase is Phase.WAITING:
                    assert self.suspended
                    assert not self.workers
                    self.dying, self.suspended = self.dying + len(self.suspended), set()
                else:
                    assert self.view.phase is Phase.STOPPING
                self._told_to_end(self.workers | self.suspended)
            case v.Kill(local_ranks=local_ranks):
                assert local_ranks
                assert local_ranks <= self.workers | self.suspended
                assert self.view.phase is Phase.STOPPING or local_ranks <= self.drained
                self._told_to_end(local_ranks)
            case v.Later(event=v.HoldOver(round=number, local_rank=local_rank)):
                assert number == self.round
                assert self.codes[local_rank] in (TERM_CODE, INT_CODE)
                self.holds.append((number, local_rank))
            case v.ReportFailure(local_rank=local_rank):
                assert self.codes[local_rank] != 0
                assert local_rank not in self.reported, "a failure is reported twice"
                self.reported.add(local_rank)
            case v.ReportStopped(round=number, drained=step, slots=slots, importing=importing):
                assert not self.workers, "stopped, but workers live"
                self.offer = frozenset(slots) or self.all
                assert not importing or not slots
                assert number == self.round
                assert number not in self.stopped, "stopped twice"
                self.stopped.append(number)
                if step is not None:
                    assert self.drained == self.slots, "drained, but a worker was not"
            case m.Done(round=number):
                assert number == self.round
                assert self.codes == dict.fromkeys(self.slots, 0), "done, but a worker failed"
                assert not self.drained, "done, but a worker was drained"
            case v.Finish(code=code):
                assert not self.workers | self.suspended, "the end, but workers live"
                if self.promised is not None:
                    done = code == 0 and self.codes == dict.fromkeys(self.slots, 0)
                    assert code == self.promised or done, "a signal was to end it"
                self.finished.append(action)

    def _told_to_end(self, local_ranks: Collection[int]) -> None:
        """Workers that are told to end take part in nothing any more; suspended ones among them count as alive."""
        self.workers |= self.suspended & set(local_ranks)
        self.suspended -= set(local_ranks)
        self.live -= set(local_ranks)

    # What the leader and the membership say.

    def formed(self, number: int, nodes: int = 2) -> m.Form:
        """The order for a round with the workers that this node has offered."""
        return form(number, nodes, tuple(sorted(self.offer)))

    @rule(ahead=st.integers(1, 2), nodes=st.integers(1, 3))
    def form(self, ahead: int, nodes: int) -> None:
        self.decide(self.formed(self.round + ahead, nodes))

    @precondition(lambda self: self.view.phase in (Phase.WAITING, Phase.SUSPENDED))
    @rule(live=st.sampled_from([True, True, False]))
    def form_and_begin_to_train(self, live: bool) -> None:
        self.decide(self.formed(self.round + 1))
        for local_rank in sorted(self.unplaced):
            self.decide(v.Reported(0, local_rank, c.Ahead()))
        for index in range(len(self.workers)):
            self.worker_is_ready(index, live)

    @precondition(lambda self: self.view.phase in (Phase.WAITING, Phase.SUSPENDED))
    @rule(data=st.data())
    def form_but_fail_to_start(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.nproc - 1))
        self.fails_to_start = frozenset(range(count))
        self.decide(self.formed(self.round + 1))
        if self.view.phase is Phase.RUNNING:
            self.fails_to_start &= self.slots
            self.workers &= self.slots
            self.decide(v.StartFailed("no such file", self.view.alive - self.workers))
        self.fails_to_start = None

    @rule(behind=st.sampled_from([0, 0, 1]))
    def break_the_round(self, behind: int) -> None:
        actions = self.decide(brk(self.round - behind))
        assert not behind or actions == [], "a break of another round"

    @rule(event=st.sampled_from([m.Evicted(1, "slow"), SILENT, GONE, CUT_OFF, OUT]))
    def lose_touch(self, event: v.Event) -> None:
        self.decide(event)

    @precondition(lambda self: self.round > 2)
    @rule(event=st.sampled_from([m.RunEnd(1, 0, "done"), m.RunEnd(1, 91, "spent"), m.Evicted(1, "x", True), LOST]))
    def end(self, event: v.Event) -> None:
        self.decide(event)

    # Workers that start ahead.

    @rule()
    def start_ahead(self) -> None:
        waits = self.view.phase in (Phase.WAITING, Phase.SUSPENDED)
        self.awaits_news = self.awaits_news or waits
        self.decide(m.StartAhead(1, self.round))

    @rule(slow=st.booleans())
    def starts_take(self, slow: bool) -> None:
        assert self.decide(v.StartsTake(slow)) == []

    @precondition(lambda self: self.coming)
    @rule(index=st.integers(0, 2))
    def worker_ahead_comes(self, index: int) -> None:
        local_rank = sorted(self.coming)[index % len(self.coming)]
        self.coming.remove(local_rank)
        self.waiting.add(local_rank)
        self.decide(v.Reported(0, local_rank, c.Ahead()))

    @precondition(lambda self: self.unplaced & self.workers)
    @rule(index=st.integers(0, 2))
    def late_worker_comes(self, index: int) -> None:
        choice = sorted(self.unplaced & self.workers)
        local_rank = choice[index % len(choice)]
        gets = self.view.phase is Phase.RUNNING
        assert self.decide(v.Reported(0, local_rank, c.Ahead())) == ([v.GivePlace(local_rank)] if gets else [])

    @precondition(lambda self: self.coming | self.waiting)
    @rule(index=st.integers(0, 2), code=st.sampled_from([-9, -9, TERM_CODE, 0, 1]))
    def worker_ahead_ends(self, index: int, code: int) -> None:
        choice = sorted(self.coming | self.waiting)
        local_rank = choice[index % len(choice)]
        self.coming.discard(local_rank)
        self.waiting.discard(local_rank)
        self.decide(v.WorkerExit(0, local_rank, code))

    @precondition(lambda self: self.coming)
    @rule(index=st.integers(0, 2))
    def time_to_come_passes(self, index: int) -> None:
        local_rank = sorted(self.coming)[index % len(self.coming)]
        assert self.decide(v.AheadOver(local_rank))[-1] == v.KillAhead(frozenset({local_rank}))

    # What workers, timers and users do.

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 2), code=st.sampled_from([0, 0, 0, 1, 3, -9, TERM_CODE, INT_CODE]))
    def worker_exits(self, index: int, code: int) -> None:
        local_rank = sorted(self.workers)[index % len(self.workers)]
        before = self.view.phase
        self.workers.remove(local_rank)
        self.live.discard(local_rank)
        self.codes[local_rank] = code
        self.decide(v.WorkerExit(self.round, local_rank, code))
        if before in (Phase.RUNNING, Phase.DRAINING) and code in (1, 3, -9) and local_rank not in self.drained:
            assert local_rank in self.reported, "a failure is swallowed"

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 2), live=st.booleans())
    def worker_is_ready(self, index: int, live: bool) -> None:
        local_rank = sorted(self.workers)[index % len(self.workers)]
        self.ready.add(local_rank)
        if self.view.phase is Phase.RUNNING:
            self.live = self.live | {local_rank} if live else self.live - {local_rank}
        self.decide(v.Reported(self.round, local_rank, c.Ready(0, live=live)))

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 2))
    def worker_is_disconnected(self, index: int) -> None:
        local_rank = sorted(self.workers)[index % len(self.workers)]
        waits = local_rank in self.live - self.drained and self.view.phase in (Phase.RUNNING, Phase.DRAINING)
        actions = self.decide(v.DisconnectedOver(self.round, local_rank, "RuntimeError: closed by peer"))
        assert bool(actions) == waits
        if waits and self.view.leaving is None and not self.view.final:
            assert local_rank in self.asked, "it waits in vain"

    @precondition(lambda self: self.workers | self.suspended)
    @rule(index=st.integers(0, 2))
    def worker_is_suspended(self, index: int) -> None:
        """Or it only says so."""
        choice = sorted(self.workers | self.suspended)
        local_rank = choice[index % len(choice)]
        asked = self.view.phase is Phase.STOPPING or local_rank in self.drained
        if asked and local_rank in self.live & self.workers:
            self.workers.remove(local_rank)
            self.live.remove(local_rank)
            self.suspended.add(local_rank)
        self.decide(v.Reported(self.round, local_rank, c.Suspended(0)))

    @precondition(lambda self: self.view.phase is Phase.STOPPING and self.live)
    @rule()
    def all_that_were_told_are_suspended(self) -> None:
        for local_rank in sorted(self.live):
            self.worker_is_suspended(sorted(self.workers | self.suspended).index(local_rank))

    @precondition(lambda self: self.suspended)
    @rule(index=st.integers(0, 2), code=st.sampled_from([0, 1, -9, TERM_CODE]))
    def suspended_worker_exits(self, index: int, code: int) -> None:
        local_rank = sorted(self.suspended)[index % len(self.suspended)]
        self.suspended.remove(local_rank)
        assert self.decide(v.WorkerExit(self.round, local_rank, code)) == []

    @precondition(lambda self: self.suspensions)
    @rule(index=st.integers(0, 2))
    def time_to_suspend_passes(self, index: int) -> None:
        number = self.suspensions.pop(index % len(self.suspensions))
        actions = self.decide(v.SuspendOver(number))
        if number == self.round:
            assert not self.live & self.workers or self.view.phase is Phase.RUNNING, "nothing would ever end it"
        else:
            assert actions == []

    @precondition(lambda self: self.workers & self.ready)
    @rule(index=st.integers(0, 2), step=st.integers(0, 9))
    def worker_is_drained(self, index: int, step: int) -> None:
        choice = sorted(self.workers & self.ready)
        local_rank = choice[index % len(choice)]
        self.drained.add(local_rank)
        self.decide(v.Reported(self.round, local_rank, c.Drained(step, 0.0)))

    @rule(behind=st.sampled_from([0, 0, 1]), seconds=st.sampled_from([None, 5.0]), final=st.booleans())
    def drain_the_round(self, behind: int, seconds: float | None, final: bool) -> None:
        actions = self.decide(m.DrainRound(1, self.round - behind, "membership", "resize", seconds, final))
        assert not behind or actions == [], "a drain of another round"

    @precondition(lambda self: self.copying)
    @rule()
    def copies_are_done(self) -> None:
        self.copying = False
        self.decide(v.CopiesDone())

    @precondition(lambda self: self.limits)
    @rule(index=st.integers(0, 2))
    def time_for_the_drain_passes(self, index: int) -> None:
        self.decide(v.DrainOver(self.limits.pop(index % len(self.limits))))

    @precondition(lambda self: self.teardowns)
    @rule(index=st.integers(0, 2))
    def teardown_passes(self, index: int) -> None:
        over = self.teardowns.pop(index % len(self.teardowns))
        actions = self.decide(over)
        hangs = over.round == self.round and over.local_rank in self.workers and self.view.phase is not Phase.OVER
        kill = v.Kill(frozenset({over.local_rank}), ending=over.ended)
        assert actions == ([kill] if hangs else []), "a suspended worker, or none, is killed"

    @precondition(lambda self: self.graces)
    @rule(index=st.integers(0, 2))
    def grace_passes(self, index: int) -> None:
        number = self.graces.pop(index % len(self.graces))
        actions = self.decide(v.GraceOver(number))
        overdue = self.workers - self.live if number == self.round and self.view.phase is Phase.STOPPING else set()
        whole = overdue == self.workers | self.suspended
        assert actions == ([v.Kill(None if whole else frozenset(overdue))] if overdue else [])

    @precondition(lambda self: self.holds)
    @rule(index=st.integers(0, 2))
    def hold_passes(self, index: int) -> None:
        number, local_rank = self.holds.pop(index % len(self.holds))
        self.decide(v.HoldOver(number, local_rank))

    @precondition(lambda self: self.round > 2 or self.view.held)
    @rule(number=st.sampled_from([SIGTERM, SIGINT]), seconds=st.sampled_from([0.0, 5.0]))
    def signal(self, number: int, seconds: float) -> None:
        again = self.view.leaving is not None and self.view.phase is not Phase.OVER
        actions = self.decide(leave(number, seconds))
        if again and self.workers:
            assert actions == [v.Kill()], "a further signal kills"

    # What always holds.

    @invariant()
    def the_policy_knows_who_lives(self) -> None:
        assert self.view.alive == self.workers
        assert self.view.live == self.live
        assert self.view.suspended == self.suspended

    @invariant()
    def the_policy_knows_the_workers_ahead(self) -> None:
        assert (self.view.ahead.coming, self.view.ahead.waiting) == (self.coming, self.waiting)
        assert not (self.coming | self.waiting) & (self.workers | self.suspended)
        if self.view.leaving is not None or self.view.final or self.view.phase is Phase.OVER:
            assert not self.coming | self.waiting

    @invariant()
    def no_local_rank_is_forgotten(self) -> None:
        """Each is offered to the leader, at the latest when all workers ahead are there."""
        if self.view.leaving is None and self.view.phase in (Phase.WAITING, Phase.SUSPENDED):
            told = (
                self.coming or self.view.ahead.ended
            )  # a script that has ended is offered only to a run that lacks nodes
            assert not self.awaits_news or told, "the leader waits in vain"
        trains = self.view.phase in (Phase.RUNNING, Phase.DRAINING, Phase.FINISHED)
        offered = self.view.leaving is None and not self.view.final and (trains or self.round in self.stopped)
        if offered and not self.coming:
            assert self.offer | (self.slots if trains else set()) >= self.all

    @invariant()
    def a_round_that_is_over_is_reported_once(self) -> None:
        if self.view.phase in (Phase.WAITING, Phase.SUSPENDED) and self.round:
            assert self.round in self.stopped
        if self.view.phase in (Phase.RUNNING, Phase.DRAINING, Phase.FINISHED):
            exit_only = self.view.leaving is not None and self.workers <= self.exiting
            assert self.round not in self.stopped or exit_only

    @invariant()
    def the_phase_fits(self) -> None:
        match self.view.phase:
            case Phase.SUSPENDED:
                assert not self.workers
                assert self.suspended
                assert not self.view.held
                assert self.view.leaving is None
            case Phase.WAITING:
                assert not self.workers | self.suspended
                assert not self.view.held
                assert self.view.leaving is None
            case Phase.RUNNING:
                assert self.workers or self.view.held
                assert self.view.leaving is None
            case Phase.DRAINING:
                assert self.workers or self.view.held
            case Phase.FINISHED:
                assert not self.workers
                assert self.view.leaving is None or self.round in self.limits, "nothing would ever end it"
            case Phase.SAVING:
                assert self.copying or self.round in self.limits, "nothing would ever end it"
            case Phase.STOPPING:
                assert self.workers, "nothing would ever end it"
                assert not self.live or self.round in self.suspensions, "nothing would ever end it"
            case Phase.OVER:
                assert len(self.finished) == 1

    @invariant()
    def what_is_held_will_be_let_go(self) -> None:
        held = {(self.round, local_rank) for local_rank in self.view.held}
        assert held <= set(self.holds) or self.view.phase is Phase.OVER

    def teardown(self) -> None:
        """When the workers end and the holds pass, the node is at rest; a signal ends it."""
        if not hasattr(self, "view"):
            return
        self._let_all_go()
        assert self.view.phase in (Phase.WAITING, Phase.SUSPENDED, Phase.FINISHED, Phase.OVER)
        if self.view.phase is not Phase.OVER:
            self.decide(leave(SIGTERM))
            self._let_all_go()
        assert self.view.phase is Phase.OVER
        assert len(self.finished) == 1

    def _let_all_go(self) -> None:
        while self.workers:
            self.worker_exits(0, 0)
        while self.holds:
            self.hold_passes(0)
        while self.limits:
            self.time_for_the_drain_passes(0)
        if self.copying:
            self.copies_are_done()


TestAgentLife = AgentLife.TestCase
TestAgentLife.settings = settings(
    max_examples=int(EXAMPLES or 100),
    stateful_step_count=30,
    derandomize=EXAMPLES is None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
