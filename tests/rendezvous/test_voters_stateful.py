"""The record kept by a majority of voters, under any order of faults.

Real voters and registers on a network that loses, repeats, reorders and delays; processes die and come back with and
without their files. Checked after each step: one value per position, one writer per ballot, and that the reads and
writes look as if each had happened at one moment between its beginning and its end.
"""

from __future__ import annotations

import copy
import os
import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from voter_world import DEAD_AFTER, READER, VoterProcess, VoterWorld, WantedValue

from elastic_launch.rendezvous.voters.messages import (
    Accept,
    AskState,
    Ballot,
    Prepare,
    ReadValue,
    Release,
    VoterAnswer,
)
from elastic_launch.rendezvous.voters.register import RegisterOutcome

EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")


class Voting(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 10_000), size=st.sampled_from([3, 3, 3, 5]), calm=st.sampled_from([True, True, False])
    )
    def set_up(self, seed: int, size: int, calm: bool) -> None:
        self.world = VoterWorld(size, random.Random(seed))
        if calm:
            self.world.calm()

    def pick(self, index: int) -> VoterProcess:
        names = sorted(self.world.processes)
        return self.world.processes[names[index % len(names)]]

    @rule(
        index=st.integers(0, 5),
        what=st.sampled_from(["read", "renew", "take", "swap", "swap", "again", "settle", "stale", "release"]),
    )
    def begin(self, index: int, what: str) -> None:
        swap = what in ("swap", "stale", "again", "renew", "take", "release")
        process = self.pick(index)
        voter = process.voter
        if what in ("renew", "take", "release") and process.doing is None and process.alive:
            process.doing = WantedValue(self.world.newest)
            if what == "renew":
                process.register.begin_read(leading=True)
            elif what == "take" and voter is not None:
                process.register.begin_settle(voter.state.life, voter.state.promised, leading=True)
            else:
                process.register.begin_release()
            self.world.send(process)
            self.world.finish(process)
            return
        self.world.begin(process, swap=swap, settle=what == "settle", stale=what == "stale", again=what == "again")

    @rule(count=st.integers(1, 40), orderly=st.booleans())
    def run(self, count: int, orderly: bool) -> None:
        world = self.world
        for _ in range(count):
            world.deliver(0 if orderly and world.random.random() < 0.8 else world.random.randrange(1000))

    @rule(count=st.integers(1, 3), how=st.sampled_from(["lost", "doubled"]))
    def spoil(self, count: int, how: str) -> None:
        world = self.world
        for _ in range(count):
            if world.wire and how == "lost":
                del world.wire[world.random.randrange(len(world.wire))]
            elif world.wire:
                world.deliver(world.random.randrange(1000), keep=True)

    @rule(index=st.integers(0, 4))
    def give_up(self, index: int) -> None:
        self.world.give_up(self.pick(index))

    @rule(index=st.integers(0, 4), lose_file=st.booleans(), back=st.booleans())
    def die(self, index: int, lose_file: bool, back: bool) -> None:
        name = self.pick(index).name
        self.world.stop(name, lose_file=lose_file)
        if back:
            self.world.start(name)
            self.world.report(self.world.processes[name])

    @rule()
    def come_back(self) -> None:
        for name, process in list(self.world.processes.items()):
            if not process.alive:
                self.world.start(name)
            self.world.report(self.world.processes[name])

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(index=st.integers(0, 5))
    def swap_at_once(self, index: int) -> None:
        """Without faults during it, after a read: what the elected backend does."""
        process = self.pick(index)
        self.world.now += DEAD_AFTER
        self.world.give_up(process)
        self.world.begin(process, swap=False)
        self.run(15, True)
        self.world.give_up(process)
        self.world.begin(process, swap=True)
        self.run(20, True)

    def teardown(self) -> None:
        """Once the faults are over, values are read and written, and a leader needs no certain voter."""
        if not hasattr(self, "world"):
            return
        world = self.world
        self.come_back()
        world.calm(DEAD_AFTER)
        for process in world.processes.values():
            world.give_up(process)
            world.begin(process, swap=False)  # by which a voter learns that it counts as another process
            world.calm()
            world.give_up(process)
        writer = world.processes["a"]
        for _ in range(4):
            for step in ("settle", "swap"):
                world.begin(writer, swap=step == "swap", settle=step == "settle")
                world.calm(DEAD_AFTER)
            if writer.register.outcome is not None and writer.register.outcome.written:
                if all(process.voter.state.founded for process in world.processes.values() if process.voter):
                    world.assert_keeps(writer)
                return
        # Two that have lost or discarded their states wait for each other, rather than forget what they had promised.
        kept = [x for x in world.names if x in world.files and world.files[x].life not in world.discarded]
        assert len(kept) < len(world.names) - 1, "no progress"


def _profile(examples: int, *, random: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        derandomize=not random,
        report_multiple_bugs=False,
        phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if random else [])],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_under_random_faults_reads_and_writes_are_in_one_order() -> None:
    run_state_machine_as_test(Voting, settings=_profile(int(EXAMPLES or 60), random=EXAMPLES is not None))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_random_faults() -> None:
    run_state_machine_as_test(Voting, settings=_profile(5000, random=False))


def _written(world: VoterWorld, name: str) -> None:
    """A node writes a value, and all voters accept it."""
    world.calm(DEAD_AFTER)
    world.begin(world.processes[name], swap=True)
    world.calm()
    assert world.newest == len(world.known)


def _lose_file(world: VoterWorld, name: str) -> VoterProcess:
    """A voter comes back without its file, and is born again."""
    world.stop(name, lose_file=True)
    world.start(name)
    process = world.processes[name]
    world.report(process)
    for other in sorted(world.names - {name}):
        world.pass_on(AskState, to=other)
    world.pass_on(VoterAnswer, to=name)
    assert process.voter is not None
    assert process.voter.born
    return process


def test_an_answer_from_before_the_loss_of_a_file_does_not_count() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "c")
    reader = world.processes[READER]
    world.begin(world.processes["c"], swap=True)  # on the way to the others
    world.begin(reader, swap=False)
    world.pass_on(ReadValue, to="c")
    world.pass_on(VoterAnswer, to=READER)
    _lose_file(world, "c")
    world.pass_on(Accept, to="a")
    world.pass_on(ReadValue, to="a")
    world.pass_on(VoterAnswer, to=READER)
    assert set(reader.register.answers) == {"a", "c"}
    assert len({answer.position for answer in reader.register.answers.values()}) == 1
    assert reader.register.outcome is None
    world.calm(DEAD_AFTER)


def test_a_value_that_was_taken_over_from_another_voter_does_not_count_under_a_higher_promise() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "b")
    candidate, reader = world.processes["a"], world.processes[READER]
    world.begin(world.processes["b"], swap=True)
    world.wire.clear()
    world.give_up(world.processes["b"])
    world.now += 2 * DEAD_AFTER
    world.begin(candidate, swap=False, settle=True)
    world.pass_on(Prepare, to="c")
    late = [x for x in world.wire if isinstance(x[2], VoterAnswer)]  # to the candidate: it has promised
    world.wire.clear()
    _lose_file(world, "c")
    world.begin(reader, swap=False)
    for voter in "bc":
        world.pass_on(ReadValue, to=voter)
    world.pass_on(VoterAnswer, to=READER)
    assert len({answer.position for answer in reader.register.answers.values()}) == 1
    assert reader.register.outcome is None
    world.wire += late
    world.calm(DEAD_AFTER)


def test_a_run_begins_only_with_all_voters_and_then_needs_a_majority() -> None:
    world = VoterWorld(3, random.Random(0))
    world.stop("c", lose_file=False)
    world.calm()
    assert not world.files
    world.start("c")
    world.calm()
    assert all(state.founded for state in world.files.values())
    world.stop("a", lose_file=False)
    _written(world, "c")


def test_two_voters_that_have_lost_their_files_do_not_vote() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    for name in "ab":
        world.stop(name, lose_file=False)
        del world.files[name]
        world.start(name)
    world.calm(2 * DEAD_AFTER)
    assert set(world.files) == {"c"}
    world.begin(world.processes[READER], swap=False)
    world.calm()
    assert world.processes[READER].register.outcome is None


def test_another_candidate_waits_for_the_leader_it_has_heard_and_for_its_own_start() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    candidate = world.processes["b"]
    world.begin(candidate, swap=True)
    assert candidate.register.outcome == RegisterOutcome(False, wait=DEAD_AFTER)
    world.stop("b", lose_file=False)
    world.now += DEAD_AFTER
    world.start("b")
    candidate = world.processes["b"]
    world.begin(candidate, swap=True)
    assert candidate.register.outcome == RegisterOutcome(False, wait=DEAD_AFTER)
    world.processes["a"].register.begin_release()
    world.send(world.processes["a"])
    world.calm()
    world.begin(candidate, swap=False)
    world.calm()
    world.begin(candidate, swap=True)
    world.calm()
    assert candidate.register.outcome is not None
    assert candidate.register.outcome.written


def test_a_voter_that_has_promised_itself_a_ballot_goes_on_with_the_leader() -> None:
    """It had lost its way to a leader that the others heard, and tried to take over."""
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    leader, other = world.processes["a"], world.processes["b"].voter
    assert other is not None
    world.now += DEAD_AFTER
    assert other.handle(Prepare(1, world.group, Ballot(2, "b"), other.state.life), world.now).granted
    behind = copy.deepcopy(world)
    world.assert_keeps(leader)
    behind.stop("c", lose_file=False)
    assert behind.renew(behind.processes["a"]), "although the leader did not know of the promise"
    assert not other.handle(Prepare(2, world.group, Ballot(9, "b"), other.state.life), world.now).granted, "no lease"


def test_a_refusal_that_comes_after_those_of_a_majority_counts() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    leader, late = world.processes["a"], world.processes["c"].voter
    assert late is not None
    world.now += DEAD_AFTER
    assert late.handle(Prepare(1, world.group, Ballot(2, "c"), late.state.life), world.now).granted
    first = leader.register.ballot
    leader.register.begin_read(leading=True)
    world.send(leader)
    for kind, name in ((ReadValue, "b"), (VoterAnswer, "a"), (ReadValue, "c"), (VoterAnswer, "a")):
        world.pass_on(kind, to=name)
    assert leader.register.outcome == RegisterOutcome(True, leader.register.read[1])
    assert world.renew(leader)
    assert leader.register.ballot is not None
    assert first is not None
    assert leader.register.ballot > Ballot(2, "c") > first


def test_a_leader_that_is_refused_does_not_take_the_ballot_of_the_next_one() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    former, later = world.processes["a"], world.processes["b"]
    world.stop("c", lose_file=False)
    world.start("c")
    world.now += 2 * DEAD_AFTER
    world.begin(later, swap=False, settle=True)
    world.calm()
    world.begin(later, swap=True)
    world.calm()
    ballot, value = later.register.ballot, later.register.read[1]
    assert world.renew(former), "it finds out the value"
    assert former.register.read[1] == value
    assert {state.promised for state in world.files.values()} == {ballot}
    former.register.begin_settle("a1", Ballot(8, "a"), leading=True)
    world.send(former)
    world.calm()
    former.register.give_up()
    assert former.register.outcome == RegisterOutcome(False, wait=DEAD_AFTER)
    world.assert_keeps(later)


def test_a_write_whose_outcome_was_not_known_is_found_with_the_lease() -> None:
    """Two voters answer, of which one refuses; then the writer tries again."""
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    writer, refuses = world.processes["a"], world.processes["b"].voter
    assert refuses is not None
    world.now += DEAD_AFTER
    assert refuses.handle(Prepare(1, world.group, Ballot(2, "b"), refuses.state.life), world.now).granted
    world.stop("c", lose_file=False)
    world.begin(writer, swap=True)
    doing = writer.doing
    assert doing is not None
    assert doing.value is not None
    world.calm()
    writer.register.give_up()
    assert writer.register.outcome == RegisterOutcome(False)
    writer.register.begin_swap(doing.expected, doing.value, "a1", world.files["a"].promised)
    world.send(writer)
    world.calm()
    assert writer.register.outcome == RegisterOutcome(True, doing.value, written=True)
    assert not refuses.handle(Prepare(2, world.group, Ballot(9, "b"), refuses.state.life), world.now).granted, (
        "no lease"
    )


@pytest.mark.parametrize("late", [ReadValue, Accept])
def test_what_a_leader_sent_before_it_left_does_not_bring_its_lease_back(late: type) -> None:
    """It may come on another connection than the farewell, which overtakes it."""
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    leader, voter = world.processes["a"], world.processes["c"].voter
    assert voter is not None
    if late is ReadValue:
        leader.register.begin_read(leading=True)
        world.send(leader)
    else:
        world.begin(leader, swap=True)
    world.pass_on(late, to="b")
    world.pass_on(VoterAnswer, to="a")
    assert leader.register.outcome is not None
    assert leader.register.outcome.known
    leader.register.begin_release()
    world.send(leader)
    world.pass_on(Release, to="c")
    before = len(world.wire)
    world.pass_on(late, to="c")
    (answer,) = [x[2] for x in world.wire[before - 1 :] if isinstance(x[2], VoterAnswer)][-1:]
    assert answer.granted is (late is Accept), "the value is accepted, but no lease is confirmed"
    assert voter.handle(Prepare(1, world.group, Ballot(9, "b"), "b1"), world.now).granted


@pytest.mark.parametrize("lose_file", [True, False])
def test_a_voter_that_comes_back_waits_for_a_leader_of_which_it_may_have_heard_before(lose_file: bool) -> None:
    """It may have confirmed the leader just before it was lost, and the leader may not hear it any more."""
    world = VoterWorld(3, random.Random(0))
    _written(world, "b")
    candidate, leader = world.processes["a"], world.processes["b"]
    world.now += DEAD_AFTER  # the candidate, cut off from the leader, waits for it no longer
    if lose_file:
        voter = _lose_file(world, "c").voter
    else:
        world.stop("c", lose_file=False)
        world.start("c")
        voter = world.processes["c"].voter
    assert voter is not None
    assert voter.state.founded
    world.begin(candidate, swap=False, settle=True)
    world.pass_on(Prepare, to="c")
    world.pass_on(VoterAnswer, to="a")
    assert candidate.register.outcome is None or not candidate.register.outcome.known
    assert world.newest == voter.state.promised.number == 1
    world.wire.clear()
    world.give_up(candidate)
    world.now += DEAD_AFTER - 1
    leader.register.begin_read(leading=True)  # which it goes on doing, so the voter goes on waiting
    world.send(leader)
    world.pass_on(ReadValue, to="c")
    world.wire.clear()
    world.now += DEAD_AFTER - 1
    answer = voter.handle(Prepare(1, world.group, Ballot(9, "a"), "a1"), world.now)
    assert not answer.granted
    assert answer.wait == 1
    assert voter.handle(Prepare(2, world.group, Ballot(9, "a"), "a1"), world.now + 1).granted


def test_a_voter_that_is_another_process_by_now_begins_again() -> None:
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    old = world.processes["c"].voter
    assert old is not None
    _lose_file(world, "c")
    before = old.state.life
    report = world.processes["a"].voter.handle(old.report_to("a", 1), world.now)  # type: ignore[union-attr]
    old.heard(report, world.now)
    assert not old.born
    assert old.state.life != before


def test_a_voter_that_begins_again_waits_for_a_leader_that_it_cannot_know() -> None:
    """Another process was this voter meanwhile, and may have heard a leader a moment ago."""
    world = VoterWorld(3, random.Random(0))
    _written(world, "a")
    old = world.processes["c"].voter
    assert old is not None
    _lose_file(world, "c")
    world.now += 10 * DEAD_AFTER  # since it was started
    others = {name: world.processes[name].voter for name in "ab"}
    for id, name in enumerate("aab"):
        voter = others[name]
        assert voter is not None
        old.heard(voter.handle(old.report_to(name, id), world.now), world.now)
    assert old.state.founded
    ballot = Ballot(9, "b")
    assert not old.handle(Prepare(9, world.group, ballot, "b1"), world.now + DEAD_AFTER - 1).granted
    assert old.handle(Prepare(10, world.group, ballot, "b1"), world.now + DEAD_AFTER).granted
