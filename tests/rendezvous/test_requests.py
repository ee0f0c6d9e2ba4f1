"""Users' requests to a leader: the state machine with its requests, without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from leader_run import Run

from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.events.types import NodeDiffers, RoundBroken, RoundDrained, RunResized
from elastic_launch.rendezvous.admin import messages as a
from elastic_launch.rendezvous.admin.server import LATE, MAX_CALLERS, AdminRequests
from elastic_launch.rendezvous.leader.types import Close, Instruction, Send
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.system.host_load import HostLoad

CALLER = 1000
"""The links of callers count up from here."""


class Asked(Run):
    """A leader that receives requests; see :class:`leader_run.Run` for the nodes."""

    def __init__(self, nodes: str = "1:2", **arguments: Any) -> None:
        super().__init__(nodes, **arguments)
        self.requests = AdminRequests(self.machine, lambda: 1.7e9)
        self.answers: dict[int, list[m.Order]] = {}
        self.closed: list[int] = []

    def call(self, link: int = CALLER, *, version: int = m.PROTOCOL_VERSION, run_id: str = "run") -> None:
        self._tell(self.requests.call(link, a.Caller(version, run_id)))

    def ask(self, request: a.AdminRequest, link: int = CALLER) -> None:
        self._tell(self.requests.ask(link, request, self.clock.now()))

    def report(self, node_id: str, report: m.Report) -> None:
        self.requests.heard(self.links[node_id], report, self.clock.now())
        super().report(node_id, report)

    def _do(self, instructions: Sequence[Instruction]) -> None:
        self._tell(self.requests.watch(instructions, self.clock.now()))

    def _tell(self, instructions: Sequence[Instruction]) -> None:
        """Take out the answers to callers."""
        others = []
        for instruction in instructions:
            if isinstance(instruction, Send) and instruction.link >= CALLER:
                assert instruction.order.term == self.record.term
                self.answers.setdefault(instruction.link, []).append(instruction.order)
            elif isinstance(instruction, Close) and instruction.link >= CALLER:
                self.closed.append(instruction.link)
            else:
                others.append(instruction)
        super()._do(others)

    def waits(self, link: int = CALLER) -> bool:
        """Whether a caller has received no answer."""
        return not any(isinstance(order, a.AdminAnswer) for order in self.answers.get(link, []))

    def answer(self, link: int = CALLER) -> a.AdminAnswer:
        """The last answer."""
        return [order for order in self.answers[link] if isinstance(order, a.AdminAnswer)][-1]

    def status(self) -> a.Status:
        self.ask(a.AskStatus())
        found = self.answers[CALLER][-1]
        assert isinstance(found, a.Status)
        return found

    def drained(self, *node_ids: str, step: int = 7, saved: str = "", unsaved: str = "") -> None:
        """Nodes have stopped; those named have saved the state, or all report why they have not."""
        for node_id in node_ids:
            self.report(node_id, m.Stopped(self.number, 7000, step, None, node_id in saved, unsaved))


def asked(nodes: str, node_ids: str, *, ready: bool = True, **arguments: Any) -> Asked:
    """A first round of the nodes trains, and all its workers can be drained; a caller is connected."""
    run = Asked(nodes, **arguments)
    run.hello(*node_ids)
    run.advance(2.1)
    run.join(*node_ids)
    for node_id in node_ids if ready else "":
        run.report(node_id, m.NodeReady(run.number))
    run.call()
    return run


# Status.


def test_a_status_lists_every_node_and_counts_no_caller() -> None:
    run = asked("1:2", "ab")
    run.hello("c")
    run.report("b", m.ProgressBeat(1, 40))
    run.report("a", m.ProgressBeat(1, 41))
    run.report("b", m.ProgressBeat(1, 40))
    status = run.status()
    assert [(node.node_id, node.state, node.workers) for node in status.nodes] == [
        ("a", "training", 1),
        ("b", "training", 1),
        ("c", "spare", 1),
    ]
    assert (status.round, status.world_size, status.step, status.leader) == (1, 2, 41, "a")
    assert (status.min_nodes, status.max_nodes, status.restarts, status.max_restarts) == (1, 2, 0, 3)
    assert status.next == "round is full, 1 spare"
    assert status.time == 1.7e9
    assert len(run.machine.nodes) == 3


def test_a_status_has_the_load_that_each_node_has_said_last() -> None:
    run = asked("1:2", "ab")
    run.hello("c")
    load = HostLoad(51, 3 << 30, 8 << 30)
    run.report("b", m.ProgressBeat(1, 40, load=load))
    run.report("b", m.ProgressBeat(1, 41))
    run.report("c", m.Beat(load))
    assert [node.load for node in run.status().nodes] == [None, load, load]


def test_a_status_counts_the_restarts_that_the_present_round_has_given_back() -> None:
    record = ControlRecord("run", "digest", 1, Leader("a", "a1", "10.0.0.1", 1), limits=Limits(1, 2, 2, 60.0))
    run = asked("1:2", "ab", record=record.renewed())
    run.report("a", m.ProgressBeat(1, 10))
    run.fail("a")
    run.stop("a", "b")
    run.advance(5.0)
    run.join("a", "b")

    def budget() -> tuple[int, int, int]:
        status = run.status()
        return status.round, status.restarts, status.max_restarts

    assert budget() == (2, 1, 2)
    run.report("a", m.ProgressBeat(2, 11))
    assert budget() == (2, 1, 2)
    run.advance(70.0)
    assert budget() == (2, 1, 3)
    run.fail("b")
    run.stop("a", "b")
    run.advance(5.0)
    assert budget() == (3, 2, 3)


def test_a_status_shows_who_starts_ahead_and_how_many_workers_take_part() -> None:
    run = asked("1:2", "a")
    run.report("a", m.NodeReady(1, live=True))
    run.hello("b", workers=2)
    assert [(node.state, node.workers) for node in run.status().nodes] == [("training", 1), ("starting", 2)]
    run.report("b", m.RankOffer((0,)))
    run.report("b", m.Imported())
    run.drained("a")
    assert [(node.state, node.workers) for node in run.status().nodes] == [("starting", 1), ("starting", 1)]
    run.join("a")
    assert [(node.state, node.workers) for node in run.status().nodes] == [("training", 1), ("starting", 1)]


def test_a_status_shows_what_the_workers_of_each_node_do() -> None:
    run = Asked("1:3")
    run.hello("a", "b")
    run.hello("c", workers=2)
    run.advance(2.1)
    run.call()

    def nodes() -> list[tuple[tuple[int, ...], str, int | None]]:
        return [(node.ranks, node.doing, node.step) for node in run.status().nodes]

    assert nodes() == [((0, 0), "start", None), ((1, 1), "start", None), ((2, 3), "start", None)]
    run.join("a", "b", "c")
    run.report("b", m.NodeReady(1))
    run.report("c", m.ProgressBeat(1, 4))
    assert nodes() == [((0, 0), "run", None), ((1, 1), "train", None), ((2, 3), "train", 4)]
    run.report("c", m.Stalled(1, 9.0, "step 5"))
    run.report("a", m.Done(1))
    assert nodes() == [((0, 0), "done", None), ((1, 1), "train", None), ((2, 3), "late", 4)]
    run.hello("d")
    assert nodes()[3] == ((), "", None)


def test_what_no_node_has_reported_is_none() -> None:
    status = asked("1:2", "ab").status()
    assert (status.step, status.checkpoint, status.snapshot) == (None, None, None)


def test_a_status_shows_what_was_saved_and_how_long_ago() -> None:
    run = asked("1:2", "ab")
    run.report("a", m.NodeSaved(1, 20))
    assert run.status().step == 20, "whoever saved a step has done it"
    run.advance(3.0)
    run.report("b", m.ProgressBeat(1, 22, 21))
    run.report("a", m.ProgressBeat(1, 22, 20))
    run.report("a", m.NodeSaved(1, 30, error="the disk is full"))
    run.report("a", m.NodeSaved(0, 99))
    status = run.status()
    assert status.checkpoint == a.LastSave(20, 3.0)
    assert status.snapshot == a.LastSave(21, 0.0)
    assert status.step == 22


def test_a_status_shows_the_steps_of_the_training_that_is_under_way() -> None:
    run = asked("1:2", "ab")
    run.report("a", m.ProgressBeat(1, 40))
    run.report("a", m.NodeSaved(1, 40))
    run.report("a", m.ProgressBeat(1, 3, step_s=0.5, training=1))
    run.report("b", m.ProgressBeat(1, 40))
    assert (run.status().step, run.status().step_s) == (3, 0.5)
    assert run.status().checkpoint == a.LastSave(40, 0.0)
    run.report("a", m.NodeSaved(1, 2, training=1))
    assert run.status().checkpoint == a.LastSave(2, 0.0, training=1)


def test_a_snapshot_of_a_later_training_is_newer_than_one_of_more_steps() -> None:
    run = asked("1:2", "ab")
    run.report("a", m.ProgressBeat(1, 0, 40, training=1, snapshot_training=0))
    assert run.status().snapshot == a.LastSave(40, 0.0)
    run.report("a", m.ProgressBeat(1, 3, 3, training=1, snapshot_training=1))
    run.report("b", m.ProgressBeat(1, 0, 40, training=1, snapshot_training=0))
    assert run.status().snapshot == a.LastSave(3, 0.0, training=1)


def test_a_status_shows_no_checkpoint_that_was_removed_since_it_may_be_wrong() -> None:
    run = asked("1:2", "ab")
    for step in (10, 20):
        run.report("a", m.NodeSaved(1, step))
    run.report("a", m.NodeSaved(1, 10, withdrew=True))
    assert run.status().checkpoint == a.LastSave(10, 0.0)
    run.report("a", m.NodeSaved(1, 0, withdrew=True))
    assert run.status().checkpoint is None
    assert run.status().step == 20


def test_a_later_round_may_resume_from_an_earlier_step() -> None:
    run = asked("1:2", "ab")
    run.report("a", m.ProgressBeat(1, 40))
    run.fail("a")
    run.stop("a", "b")
    run.join("a", "b")
    run.report("a", m.ProgressBeat(2, 31))
    run.report("b", m.ProgressBeat(1, 41))
    assert run.status().step == 31


def test_the_last_decisions_are_listed_with_their_age() -> None:
    run = asked("1:2", "ab")
    run.advance(5.0)
    incidents = run.status().incidents
    assert incidents[-1].text.startswith("round 1 formed")
    assert incidents[-1].ago == pytest.approx(7.1, abs=0.2)
    assert [incident.text.split(";")[0] for incident in incidents[:1]] == ["node a joined from host-a with 1 worker"]


def test_a_node_whose_workers_are_being_ended_is_stopping_and_one_that_goes_is_leaving() -> None:
    run = asked("1:3", "abc", ready=False)
    run.fail("a")
    run.leave("c")
    assert [node.state for node in run.status().nodes] == ["stopping", "stopping", "leaving"]
    assert run.status().world_size == 0


# Authorization.


def test_a_caller_of_another_version_or_run_is_sent_away() -> None:
    run = asked("1:2", "ab")
    run.call(CALLER + 1, version=99)
    run.call(CALLER + 2, run_id="other")
    for link, word in [(CALLER + 1, "version 99"), (CALLER + 2, "'other'")]:
        (refused,) = run.answers[link]
        assert isinstance(refused, m.Refused)
        assert word in refused.reason
        assert "'run'" not in refused.reason  # a caller might repeat the request with it
    assert run.closed == [CALLER + 1, CALLER + 2]


def test_no_more_than_so_many_ask_at_once() -> None:
    run = asked("1:2", "ab")
    for number in range(1, MAX_CALLERS):
        run.call(CALLER + number)
    run.call(CALLER + MAX_CALLERS)
    assert run.closed == [CALLER + MAX_CALLERS]
    run.requests.hung_up(CALLER + 1)
    run.call(CALLER + MAX_CALLERS + 1)
    assert run.closed == [CALLER + MAX_CALLERS]


def test_a_link_that_did_not_call_gets_no_answer() -> None:
    run = asked("1:2", "ab")
    run.ask(a.AskDrain(), CALLER + 5)
    run.ask(a.AskStatus(), CALLER + 5)
    assert CALLER + 5 not in run.answers
    assert run.machine.running
    assert not run.machine.draining


def test_a_caller_of_an_ended_run_is_informed_of_its_end() -> None:
    run = asked("1:2", "ab")
    run.done("a", "b")
    assert isinstance(run.answers[CALLER][-1], m.RunEnd)
    run.call(CALLER + 1)
    assert isinstance(run.answers[CALLER + 1][-1], m.RunEnd)


# Drain.


def leaves(run: Asked, node_id: str, seconds: float = 86400.0) -> None:
    """The node obeys its order."""
    (order,) = run.orders(node_id, m.Depart)
    run.report(node_id, m.Leaving(order.reason, seconds))


def test_a_drained_node_has_left_when_the_round_is_drained() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskDrain("b"))
    leaves(run, "b")
    assert run.orders("a", m.DrainRound)[0].seconds is None
    run.drained("b", "a")
    assert run.waits()
    run.drained("c", step=8)
    assert (run.answer().done, run.answer().step) == (True, 8)
    assert run.answer().text.startswith("node b left: it was drained after step 8; ")
    assert run.members == "ac"
    assert run.told(RoundBroken) == []


def test_a_deadline_goes_to_the_node_as_seconds() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskDrain("b", 12.0))
    assert run.orders("b", m.Depart)[0].seconds == 12.0


def test_a_node_that_leaves_without_a_drain_was_not_drained() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskDrain("b", 1.0))
    leaves(run, "b", 0.0)
    run.close("b")
    run.stop("a", "c")
    answer = run.answer()
    assert not answer.done
    assert "node b leaves (elasticctl drain)" in answer.text


def test_a_spare_leaves_at_once() -> None:
    run = asked("1:2", "ab")
    run.hello("c")
    run.ask(a.AskDrain("c"))
    leaves(run, "c")
    run.close("c")
    answer = run.answer()
    assert answer.done
    assert "it had no workers" in answer.text
    assert run.number == 1


def test_a_node_that_does_not_obey_is_not_waited_for_beyond_the_deadline() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskDrain("b", 5.0))
    run.advance(5.0 + LATE - 1.0)
    assert run.waits()
    run.advance(2.0)
    assert (run.answer().done, run.answer().text) == (False, "node b has not left in time")


def test_the_leaders_own_node_has_left_when_its_own_workers_have_stopped() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskDrain("a"))
    leaves(run, "a")
    run.drained("a")
    assert (run.answer().done, run.answer().step) == (True, 7)


def test_a_node_that_is_not_there_cannot_be_drained() -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskDrain("x"))
    assert (run.answer().done, run.answer().text) == (False, "there is no node 'x' in the run; there are: a, b")


def test_two_requests_to_drain_one_node_send_it_one_order() -> None:
    run = asked("1:3", "abc")
    run.call(CALLER + 1)
    run.ask(a.AskDrain("b"))
    leaves(run, "b")
    run.ask(a.AskDrain("b"), CALLER + 1)
    run.drained("a", "b", "c")
    assert len(run.orders("b", m.Depart)) == 1
    for link in (CALLER, CALLER + 1):
        answer = run.answer(link)
        assert answer.done


def test_a_run_that_is_drained_ends_with_143_and_the_step() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskDrain())
    assert [len(run.orders(node_id, m.DrainRound)) for node_id in "abc"] == [1, 1, 1]
    assert all(order.final for node_id in "abc" for order in run.orders(node_id, m.DrainRound))
    run.drained("a", "b", "c", step=12, saved="a")
    assert run.end == (143, "stopped by elasticctl drain after step 12, its state saved")
    assert [order.code for node_id in "abc" for order in run.orders(node_id, m.RunEnd)] == [143, 143, 143]
    assert (run.answer().done, run.answer().step) == (True, 12)


@pytest.mark.parametrize("why", ["", "the directory is full"])
def test_a_run_that_is_drained_and_not_saved_is_reported_as_such(why: str) -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskDrain())
    run.drained("a", "b", step=12, unsaved=why)
    told = f"its state not saved: {why or 'no node has reported a checkpoint of it'}"
    assert run.end == (143, f"stopped by elasticctl drain after step 12, {told}")
    assert (run.answer().done, run.answer().step) == (False, 12)
    assert told in run.answer().text


def test_a_resize_on_its_way_becomes_the_runs_last_drain() -> None:
    run = asked("1:2", "ab")
    run.ask(a.AskResize(1, 1))
    run.call(CALLER + 1)
    run.ask(a.AskDrain(seconds=20.0), CALLER + 1)
    assert [(order.final, order.seconds) for order in run.orders("a", m.DrainRound)] == [(False, None), (True, 20.0)]
    run.drained("a", "b", saved="a")
    assert run.answer(CALLER + 1).done
    assert run.end == (143, "stopped by elasticctl drain after step 7, its state saved")


def test_a_lone_node_that_leaves_with_an_unsaved_state_is_reported() -> None:
    run = asked("1:2", "a")
    run.ask(a.AskDrain("a"))
    leaves(run, "a")
    run.drained("a", unsaved="the directory is full")
    assert not run.answer().done
    assert "it was drained after step 7, its state not saved: the directory is full" in run.answer().text


def test_a_run_of_plain_scripts_is_stopped_and_the_answer_states_that_nothing_was_drained() -> None:
    run = asked("1:3", "ab", ready=False)
    run.ask(a.AskDrain())
    run.stop("a", "b")
    assert run.end == (143, "stopped by elasticctl drain")
    assert not run.answer().done
    assert run.told(RoundDrained) == []


def test_a_run_that_waits_for_nodes_is_stopped_at_once() -> None:
    run = Asked("2:3")
    run.hello("a")
    run.call()
    run.ask(a.AskDrain())
    assert run.code == 143
    assert run.answer().done


def test_a_run_that_is_drained_admits_no_more_nodes() -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskDrain())
    run.hello("c")
    run.advance(5.0)
    run.drained("a", "b")
    assert run.code == 143
    assert run.number == 1


# Checkpoint.


def test_a_checkpoint_is_asked_of_the_first_member_and_answered_when_written() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskSave())
    assert [len(run.orders(node_id, m.SaveNow)) for node_id in "abc"] == [1, 0, 0]
    run.report("a", m.NodeSaved(1, 10))
    assert run.waits(), "that one was under way before"
    run.report("a", m.NodeSaved(1, 12, asked=True))
    assert run.answer() == a.AdminAnswer(1, True, "checkpoint of step 12 written", 12)


def test_a_checkpoint_that_cannot_be_written_does_not_count() -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskSave())
    run.report("a", m.NodeSaved(1, 12, error="the disk is full", asked=True))
    assert run.answer() == a.AdminAnswer(1, False, "no checkpoint was written: the disk is full")
    assert run.status().checkpoint is None


def test_a_checkpoint_needs_workers_that_can_be_asked() -> None:
    run = asked("1:3", "ab", ready=False)
    run.ask(a.AskSave())
    assert not run.answer().done
    run.fail("a")
    run.ask(a.AskSave())
    answer = run.answer()
    assert "no round trains" in answer.text
    assert run.orders("a", m.SaveNow) == []


def test_a_round_that_ends_first_answers_for_its_checkpoint() -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskSave())
    run.fail("b")
    answer = run.answer()
    assert (answer.done, "broke before" in answer.text) == (False, True)
    run.stop("a", "b")
    run.join("a", "b")
    for node_id in "ab":
        run.report(node_id, m.NodeReady(2))
    run.ask(a.AskSave())
    run.hello("c")
    run.advance(2.0)
    run.drained("a", "b", step=9)
    assert run.waits(CALLER) or run.answer() == answer, "the state is in memory: the next round saves it"
    run.join("a", "b", "c")
    for node_id in "abc":
        run.report(node_id, m.NodeReady(3))
    assert [order.round for order in run.orders("a", m.SaveNow)] == [1, 2, 3]
    run.report("a", m.NodeSaved(3, 10, asked=True))
    assert run.answer() == a.AdminAnswer(1, True, "checkpoint of step 10 written", 10)


# Resize.


def test_a_larger_maximum_includes_the_spares() -> None:
    run = asked("1:2", "ab")
    run.hello("c")
    run.advance(5.0)
    run.ask(a.AskResize(1, 3))
    assert run.waits()
    run.drained("a", "b")
    assert (run.number, run.members) == (2, "abc")
    answer = run.answer()
    assert answer.done
    assert answer.text.startswith("drained after step 7; round 2 formed")
    assert run.record.limits == Limits(1, 3)
    assert run.told(RunResized) == [RunResized(1, 3, 1, 2)]


def test_a_smaller_maximum_leaves_out_the_last_ranks_which_become_spares() -> None:
    run = asked("1:3", "abc")
    run.ask(a.AskResize(1, 2))
    run.drained("a", "b", "c")
    assert (run.number, run.members) == (2, "ab")
    assert [node.state for node in run.status().nodes] == ["starting", "starting", "spare"]


def test_a_higher_minimum_counts_for_the_next_round_only() -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskResize(3, 3))
    assert run.machine.running
    assert not run.machine.draining
    assert run.answer().done
    run.fail("b")
    run.stop("a", "b")
    run.advance(3.0)
    assert run.number == 1
    run.hello("c")
    assert (run.number, run.members) == (2, "abc")


def test_a_lower_minimum_ends_the_wait_for_nodes() -> None:
    run = Asked("2:3")
    run.hello("a")
    run.advance(5.0)
    run.call()
    run.ask(a.AskResize(1, 3))
    run.advance(0.1)
    assert run.members == "a"


def test_the_same_limits_change_nothing() -> None:
    run = asked("1:3", "ab")
    commits = len(run.commits)
    run.ask(a.AskResize(1, 3))
    assert run.answer().done
    assert len(run.commits) == commits


def test_invalid_limits_are_refused() -> None:
    run = asked("1:3", "ab")
    run.ask(a.AskResize(3, 2))
    assert not run.answer().done
    assert run.record.limits == Limits(1, 3)


def test_a_new_leader_knows_the_limits_and_drains_a_round_that_is_too_large() -> None:
    first = asked("1:3", "abc")
    first.ask(a.AskResize(1, 2))
    run = Asked("1:3", record=first.record)
    run.hello("a", "b", "c", holding=1, ready=True, seen_round=1, seen_term=1)
    assert run.machine.limits == Limits(1, 2)
    assert len(run.orders("c", m.DrainRound)) == 1
    run.drained("a", "b", "c")
    assert run.members == "ab"


def config(nnodes: tuple[int, int], script: str = "train.py") -> LaunchConfig:
    return LaunchConfig(Command((script,), (script,)), limits=Limits(*nnodes))


def hello_of(run: Asked, node_id: str, of: LaunchConfig) -> None:
    run.hello(node_id, digest=of.digest(), limits=str(of.limits))


def test_new_nodes_may_have_the_limits_of_the_start_or_of_a_resize() -> None:
    started, now, other = config((1, 2)), config((1, 4)), config((1, 3))
    record = ControlRecord("run", started.digest(), 1, Leader("a", "a1", "10.0.0.1", 1))
    run = Asked("1:2", record=record.renewed())
    hello_of(run, "a", started)
    hello_of(run, "b", now)
    run.call()
    run.ask(a.AskResize(1, 4))
    hello_of(run, "c", now)
    hello_of(run, "d", started)
    hello_of(run, "e", other)
    hello_of(run, "f", config((1, 4), "another.py"))
    assert list(run.machine.nodes) == ["a", "b", "c", "d", "e"]
    assert run.machine.limits == Limits(1, 4)
    assert [(event.node, event.limits) for event in run.told(NodeDiffers)] == [
        ("b", "--nnodes 1:4 --max-restarts 3; those of the run hold: --nnodes 1:2 --max-restarts 3"),
        ("d", "--nnodes 1:2 --max-restarts 3; those of the run hold: --nnodes 1:4 --max-restarts 3"),
        ("e", "--nnodes 1:3 --max-restarts 3; those of the run hold: --nnodes 1:4 --max-restarts 3"),
    ]
    assert len(run.orders("f", m.Refused)) == 1


# Stacks.


def test_stacks_are_passed_on_as_they_come_and_the_last_node_ends_the_request() -> None:
    run = asked("2:2", "ab")
    run.ask(a.AskStacks())
    assert [order.round for name in "ab" for order in run.orders(name, m.TakeStacks)] == [1, 1]
    run.report("b", m.StacksTaken(1, "rank 1"))
    run.report("b", m.StacksTaken(1, "again"))
    assert run.waits()
    assert [order.text for order in run.answers[CALLER] if isinstance(order, a.NodeStacks)] == ["rank 1"]
    run.report("a", m.StacksTaken(1, "rank 0"))
    assert run.answer().done
    assert run.answer().text == "these are all workers of round 1"


def test_a_node_that_tells_no_stacks_is_named() -> None:
    run = asked("2:2", "ab")
    run.ask(a.AskStacks())
    run.report("a", m.StacksTaken(1, "rank 0"))
    run.advance(21.0)
    assert not run.answer().done
    assert run.answer().text == "no stacks from b"


def test_there_are_no_stacks_before_a_round() -> None:
    run = Asked("2:2")
    run.hello("a")
    run.call()
    run.ask(a.AskStacks())
    assert not run.answer().done
    assert run.answer().text.startswith("no workers run; ")


def test_a_status_says_how_long_ago_the_last_step_was() -> None:
    run = asked("1:2", "ab")
    assert run.status().stepped is None
    run.report("a", m.ProgressBeat(1, 0))
    run.advance(3.0)
    assert run.status().stepped == 3.0
    run.report("a", m.ProgressBeat(1, 41))
    run.report("b", m.ProgressBeat(1, 41))
    run.advance(7.0)
    run.report("b", m.ProgressBeat(1, 41))
    run.report("a", m.ProgressBeat(1, 40))
    assert run.status().stepped == 7.0
    run.fail("b")
    assert run.status().stepped is None
    run.stop("a", "b")
    run.advance(5.0)
    run.join("a", "b")
    assert run.status().stepped is None, "what was reported is of the last round"


def test_a_status_has_the_pace_of_the_node_that_is_ahead() -> None:
    run = asked("1:2", "ab")
    assert (run.status().step_s, run.status().remaining, run.status().loss) == (None, None, None)
    run.report("a", m.ProgressBeat(1, 41, None, 0.5, 30.0, 0.25))
    run.report("b", m.ProgressBeat(1, 40, None, 0.6, 31.0, 0.75))
    assert (run.status().step_s, run.status().remaining, run.status().loss) == (0.5, 30.0, 0.25)
