"""Every order of events in small worlds keeps the invariants, and leads to the run's end; seeded bugs do not.

``python tests/explore`` shows how many states there are, and which events came in which phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic_agents import policy, policy_ahead
from elastic_agents import policy_types as v
from elastic_launch.rendezvous.backends.succession import Succession, Takeover
from elastic_launch.rendezvous.leader import forming, rounds
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.leader.nodes import ACTIVE, ConnectedNodes
from elastic_launch.rendezvous.leader.phases import Broken, Ending, Running
from elastic_launch.rendezvous.leader.restart_budget import RestartBudget
from elastic_launch.rendezvous.leader.state import LeaderState
from elastic_launch.rendezvous.leader.types import CommitRecord
from elastic_launch.rendezvous.node.machine import NodeMachine
from elastic_launch.rendezvous.record import ControlRecord, Round
from elastic_launch.rendezvous.voters.messages import Ballot
from elastic_launch.rendezvous.voters.register import Register
from elastic_launch.rendezvous.voters.server import VoterServer
from elastic_launch.rendezvous.voters.voter import Voter
from explore import run_world
from explore.bounds import Bounds
from explore.cases import QUICK, QUICK_BESIDE, QUICK_VOTERS, ROUND, SOAK, SOAK_BESIDE, SOAK_VOTERS
from explore.run_world import RunWorld
from explore.search import Violation, explore, explore_beside, play
from explore.states import fork
from explore.voting import VoterBounds, VotingWorld

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("name", QUICK)
def test_a_run_keeps_its_invariants_and_comes_to_its_end(name: str) -> None:
    bounds, most = QUICK[name]
    found = explore(RunWorld(bounds), most)
    assert found.whole or found.states == most
    assert found.ends or not found.whole


@pytest.mark.parametrize("name", QUICK_VOTERS)
def test_voters_keep_their_invariants_and_all_candidates_come_to_know_a_value(name: str) -> None:
    bounds, most = QUICK_VOTERS[name]
    found = explore(VotingWorld(bounds), most)
    assert found.whole or found.states == most


@pytest.mark.parametrize("name", QUICK_BESIDE)
def test_a_fault_at_each_point_of_a_change_leads_to_the_end(name: str) -> None:
    bounds, most = QUICK_BESIDE[name]
    _beside(bounds, most)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SOAK_BESIDE)
def test_many_states_after_a_fault_at_each_point(name: str) -> None:
    bounds, most = SOAK_BESIDE[name]
    _beside(bounds, most)


def _beside(bounds: Bounds, most: int) -> None:
    world = RunWorld(bounds)
    for node_id in bounds.newcomers:
        world.do(("arrives", node_id))
    found = explore_beside(world, most)
    assert found.states > found.depth


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SOAK)
def test_many_states_of_a_run(name: str) -> None:
    bounds, most = SOAK[name]
    explore(RunWorld(bounds), most)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SOAK_VOTERS)
def test_many_states_of_voters(name: str) -> None:
    bounds, most = SOAK_VOTERS[name]
    explore(VotingWorld(bounds), most)


def test_a_crash_is_charged_although_a_sigterm_was_reported_first() -> None:
    """The soak took this for a violation: a crash outranks a worker's SIGTERM."""
    world = RunWorld(Bounds(start="a", nproc=2, faults=2, formed=True))
    play(world, [("ends by SIGTERM", "a1", 0), ("crash", "a1", 1), *[("leader reads", "a1", 1)] * 3])
    while not world.checks._charged:
        world.do(next(label for label, fair in world.moves() if fair))
    assert world.checks._charged == {(1, 1)}


def test_a_leader_that_takes_over_from_itself_may_know_what_it_has_charged_and_charges_it_once() -> None:
    """A pair of faults took this for a violation: etcd was killed as the record of the next round was written."""
    world = RunWorld(Bounds(start="a", nproc=1, faults=0, formed=True))
    checks, before = world.checks, world.record
    assert before is not None
    agent = world.all[0]

    def write(**changes: Any) -> None:
        assert world.checks.record is not None
        checks.written(replace(world.checks.record, nonce=str(changes), **changes).encode(), agent)  # type: ignore[arg-type]

    another = replace(before.leader, incarnation="b1")
    for leader, term in ((another, before.term + 1), (before.leader, before.term)):
        with pytest.raises(AssertionError, match="without a new round"):
            write(leader=leader, term=term, restarts=1)
        checks.record = before
        checks._leaders = {before.term: before.leader.incarnation}
    write(term=before.term + 1, restarts=1)
    with pytest.raises(AssertionError, match="charged twice"):
        write(restarts=2, round=replace(before.round, number=2))


# The explorer finds bugs: each takes one guard out.


def _waits_for_no_worker(patch: Patch) -> None:
    count = ConnectedNodes.count
    considered: list[bool] = []
    consider = rounds.Rounds._consider_broken

    def broken(self: rounds.Rounds, phase: Broken, now: float) -> None:
        considered.append(True)
        try:
            consider(self, phase, now)
        finally:
            considered.pop()

    patch.setattr(rounds.Rounds, "_consider_broken", broken)
    blind = lambda self, has=0, lacks=0: 0 if considered and has == ACTIVE else count(self, has, lacks)  # noqa: E731
    patch.setattr(ConnectedNodes, "count", blind)


def _charges_twice(patch: Patch) -> None:
    rule = RestartBudget.rule

    def twice(self: RestartBudget, broken: Broken, *args: Any, **options: Any) -> Any:
        ruling = rule(self, broken, *args, **options)
        self.spent += ruling.charged
        return ruling

    patch.setattr(RestartBudget, "rule", twice)


def _orders_before_it_writes(patch: Patch) -> None:
    flush = LeaderState.flush
    patch.setattr(LeaderState, "flush", lambda self: sorted(flush(self), key=lambda x: isinstance(x, CommitRecord)))


def _gives_a_number_twice(patch: Patch) -> None:
    patch.setattr(forming, "Round", lambda number, members: Round(max(1, number - 1), members))


def _takes_over_from_any_leader(patch: Patch) -> None:
    decide = Succession.decide

    def always(self: Succession, record: ControlRecord, now: float, *, leading: bool) -> Takeover | None:
        other = record.end is None and record.leader.incarnation != self._incarnation
        return Takeover("a seeded bug") if other else decide(self, record, now, leading=leading)

    patch.setattr(Succession, "decide", always)


def _ends_when_one_is_done(patch: Patch) -> None:
    consider = rounds.Rounds._consider_running

    def early(self: rounds.Rounds, running: Running, now: float) -> None:
        if any(node.done for node in self._state.members()):
            self.end(0, "all workers finished", now)
        else:
            consider(self, running, now)

    patch.setattr(rounds.Rounds, "_consider_running", early)


def _takes_a_failure_for_success(patch: Patch) -> None:
    exited = policy._exited
    patch.setattr(policy, "_exited", lambda view, event: exited(view, replace(event, exit_code=0)))


def _does_not_report_that_it_has_stopped(patch: Patch) -> None:
    settled = policy_ahead.settled

    def silent(before: v.View, view: v.View, actions: list[v.Action], node: v.NodeFacts) -> Any:
        after, rest = settled(before, view, actions, node)
        return after, [action for action in rest if not isinstance(action, v.ReportStopped)]

    patch.setattr(policy_ahead, "settled", silent)
    patch.setattr(rounds, "LONGEST_WAIT", 0.0)
    patch.setattr(rounds.Rounds, "_due_back", lambda self, node, broken: broken.at + 1e6)


def _holds_its_round_for_ever(patch: Patch) -> None:
    learn = NodeMachine._learn

    def keep(self: NodeMachine, **known: Any) -> None:
        learn(self, **{name: value for name, value in known.items() if name != "holding" or value})

    patch.setattr(NodeMachine, "_learn", keep)


def _starts_a_second_worker(patch: Patch) -> None:
    form = policy._form

    def anew(view: v.View, order: Any, slots: frozenset[int]) -> Any:
        after, actions = form(view, order, slots)
        return after, [replace(x, kept=frozenset()) if isinstance(x, v.StartWorkers) else x for x in actions]

    patch.setattr(policy, "_form", anew)


def _sees_no_closed_link(patch: Patch) -> None:
    patch.setattr(LeaderMachine, "closed", lambda self, link, now: [])
    patch.setattr(LeaderMachine, "turn", lambda self, now: [])


def _notices_no_stop_at_the_end(patch: Patch) -> None:
    stopped = rounds.Rounds.stopped

    def deaf(self: rounds.Rounds, node: Any, report: Any, now: float) -> None:
        if not isinstance(self.phase, Ending):
            stopped(self, node, report, now)

    patch.setattr(rounds.Rounds, "stopped", deaf)
    patch.setattr(rounds, "LATE", 1e6)


def _does_not_wait_for_the_last_leaders_nodes(patch: Patch) -> None:
    patch.setattr(LeaderState, "overdue", lambda self, now: set(self.owed))


def _guard_stops_nothing(patch: Patch) -> None:
    patch.setattr(run_world, "GUARD", 1e6)


CRASH = replace(ROUND, kinds=("crash",))

BEGINNING = Bounds(faults=0, comes_back=0)

SEEDED: dict[str, tuple[Callable[[Patch], None], Bounds, str]] = {
    "the next round does not wait for the last one's workers": (_waits_for_no_worker, CRASH, "still trains|two rounds"),
    "a crash is charged twice": (_charges_twice, CRASH, "charged twice"),
    "orders are sent before the record is written": (_orders_before_it_writes, BEGINNING, "AssertionError"),
    "a round has the number of the one before": (_gives_a_number_twice, CRASH, "without a new round|one number"),
    "a node takes over from any leader": (_takes_over_from_any_leader, BEGINNING, "no progress|gives up"),
    "the run ends when one node is done": (_ends_when_one_is_done, replace(ROUND, faults=0), "not everywhere"),
    "a failed worker counts as finished": (_takes_a_failure_for_success, CRASH, "not everywhere"),
    "a node does not report that its workers are gone": (
        _does_not_report_that_it_has_stopped,
        CRASH,
        "waits for ever|no progress",
    ),
    "a node believes that it still has its workers": (
        _holds_its_round_for_ever,
        replace(ROUND, kinds=("dies",)),
        "waits for ever|no progress|gives up",
    ),
    "a worker is started beside a suspended one": (
        _starts_a_second_worker,
        replace(CRASH, live=True),
        "second worker",
    ),
    "a run that ends does not notice that its workers stop": (
        _notices_no_stop_at_the_end,
        replace(CRASH, kinds=("crash", "late"), faults=2, max_restarts=0),
        "waits for ever|no progress",
    ),
    "a new leader does not wait for the nodes of the one before": (
        _does_not_wait_for_the_last_leaders_nodes,
        replace(ROUND, kinds=("is cut off",)),
        "still trains",
    ),
    "the guard does not stop the workers of an agent that hangs": (
        _guard_stops_nothing,
        replace(ROUND, nodes="1:1", kinds=("hangs",)),
        "go on in round 1",
    ),
    "the leader does not see closed links": (_sees_no_closed_link, replace(ROUND, kinds=("dies",)), "waits for ever"),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_bug_is_found_and_its_path_leads_to_it(name: str, monkeypatch: Patch) -> None:
    seed, bounds, what = SEEDED[name]
    start = RunWorld(bounds)
    seed(monkeypatch)
    start = start if bounds.formed else RunWorld(bounds)
    again, _ = fork(start)
    with pytest.raises(Violation, match=what) as found:
        explore(start, 600)
    path, broken = found.value.path, found.value.__cause__
    if broken is None:  # the path itself is allowed, but nothing leads from its end to the end of the run
        play(again, path)
        return
    with pytest.raises(type(broken)):
        play(again, path)


def _leaves_at_once(patch: Patch) -> None:
    """As before voters of an ended run answered those that still searched."""
    patch.setattr(VoterServer, "_left", lambda self: self._stop.is_set())


def _counts_any_majority(patch: Patch) -> None:
    def minority(self: Register, wanted: Callable[..., bool]) -> Any:
        return next(((x,) for x in self.answers.values() if x.founded and wanted(x)), None)

    patch.setattr(Register, "_agreeing", minority)


def _accepts_below_its_promise(patch: Patch) -> None:
    accept = Voter._accept

    def forgetful(self: Voter, request: Any, position: Any, value: str, now: float) -> bool:
        promised, self.state = self.state.promised, replace(self.state, promised=position.ballot)
        granted = accept(self, request, position, value, now)
        if not granted:
            self.state = replace(self.state, promised=promised)
        return granted

    patch.setattr(Voter, "_accept", forgetful)


def _takes_no_new_ballot(patch: Patch) -> None:
    """As before a leader took a new ballot when a voter had promised another one, which came to nothing."""
    settle = Register.begin_settle

    def keeps(self: Register, life: str, promised: Ballot, *, leading: bool = False) -> None:
        if leading:
            self.begin_read(leading=True)
        else:
            settle(self, life, promised)

    patch.setattr(Register, "begin_settle", keeps)


NO_LEASE = VoterBounds(faults=0, tried=True)

END = VoterBounds(candidates="abc", faults=0, ends=True, tried=True)

SEEDED_VOTERS: dict[str, tuple[Callable[[Patch], None], VoterBounds, str]] = {
    "voters of an ended run leave at once": (_leaves_at_once, END, "no progress"),
    "one answer counts as a majority": (_counts_any_majority, VoterBounds(), "older|had not read|two|and"),
    "a voter refuses the leader for good": (_takes_no_new_ballot, NO_LEASE, "the lease is not renewed"),
}


@pytest.mark.parametrize("name", SEEDED_VOTERS)
def test_a_seeded_bug_of_voters_is_found(name: str, monkeypatch: Patch) -> None:
    seed, bounds, what = SEEDED_VOTERS[name]
    start = VotingWorld(bounds)
    seed(monkeypatch)
    with pytest.raises(Violation, match=what):
        explore(start, 400)
