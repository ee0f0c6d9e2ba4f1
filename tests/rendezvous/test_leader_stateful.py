"""The leader's invariants, under any order of arrivals, faults, outages and recoveries.

After the faults a run must always come to a round that trains, and to its end.

The examples are the same in every run; HYPOTHESIS_EXAMPLES=2000 looks at so many random ones instead.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from leader_model import TIMING, LeaderModel, SimNode

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.failure import Failure, Mistake

EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")

RECOVERY = 60.0
"""Simulated seconds within which a run without further faults must train again."""

INDEX = st.integers(0, 6)


class LeaderRun(LeaderModel, RuleBasedStateMachine):
    """A run on up to five nodes."""

    @initialize(
        low=st.integers(1, 2),
        more=st.integers(0, 2),
        max_restarts=st.sampled_from([0, 2, 100]),
        dead_after=st.sampled_from([2.0, 5.0]),
        nodes=st.integers(0, 4),
        seconds=st.sampled_from([0.0, 5.0]),
        live=st.sampled_from([True, True, False]),
    )
    def begin(
        self, low: int, more: int, max_restarts: int, dead_after: float, nodes: int, seconds: float, live: bool
    ) -> None:
        self.prepare(Limits(low, low + more, max_restarts), Timing(dead_after=dead_after, **TIMING), live=live)
        for _ in range(nodes):
            self.arrive()
        self._advance(seconds, prompt=True)

    # What nodes do.

    @precondition(lambda self: len(self._where(lambda node: True)) < 5)
    @rule()
    def arrive(self) -> None:
        """An agent starts under a free node id, that of a dead one first: it is the next incarnation."""
        taken = {node.node_id for node in self._where(lambda node: True)}
        self._start(next(node_id for node_id in "abcde" if node_id not in taken))

    @precondition(lambda self: self._where(_has_to_do))
    @rule(index=INDEX)
    def act(self, index: int) -> None:
        """A node does the first thing that it has to do."""
        node = self._pick(index, _has_to_do)
        assert node is not None
        if node.unread:
            self._read(node)
        elif node.starting:
            self._started(node)
        elif node.stopping:
            self._stopped(node)
        elif node.link is None:
            self._connect(node)
        else:
            self._complete(node)

    @precondition(lambda self: self._where(_can_change))
    @rule(
        index=INDEX,
        kind=st.sampled_from(["crash", "crash", "out of memory", "hang", "preemption"]),
        symptom=st.sampled_from(["", "", "broken connection"]),
        ran=st.sampled_from([1.0, 60.0]),
        lost=st.sampled_from(["one", "all", ""]),
        mistake=st.sampled_from([None, None, Mistake("KeyError", "train.py:4 in main")]),
    )
    def worker_fails(self, index: int, kind: str, symptom: str, ran: float, lost: str, mistake: Mistake | None) -> None:
        node = self._pick(index, _can_change)
        assert node is not None
        node.stopping, node.lost = True, lost
        mistake = None if symptom or kind != "crash" else mistake
        failure = Failure(node.node_id, kind, 0, 0, 42, 1, "", ran=ran, symptom=symptom, mistake=mistake)
        self._say(node, replace(failure, round=node.holding))

    @precondition(lambda self: self._where(lambda node: node.stopping and node.link is not None and not node.frozen))
    @rule(index=INDEX, ago=st.sampled_from([0.0, 1.0]))
    def had_failed(self, index: int, ago: float) -> None:
        """A worker that is being stopped had raised before."""
        node = self._pick(index, lambda node: node.stopping and node.link is not None and not node.frozen)
        assert node is not None
        failure = Failure(node.node_id, "crash", 0, 0, 42, 1, "ValueError: boom", ran=60.0, ago=ago)
        self._say(node, replace(failure, round=node.holding))

    @precondition(lambda self: self._where(_can_change))
    @rule(index=INDEX, gained=st.booleans())
    def train(self, index: int, gained: bool) -> None:
        """Workers of a node begin to train, further on than those of the rounds before or not."""
        node = self._pick(index, _can_change)
        assert node is not None
        self.begun += gained
        self._train(node)

    @precondition(lambda self: self._where(lambda node: node.ready and _can_change(node)))
    @rule(index=INDEX)
    def complete_a_step(self, index: int) -> None:
        node = self._pick(index, lambda node: node.ready and _can_change(node))
        assert node is not None
        self._complete_step(node)

    @precondition(lambda self: self._where(_can_change))
    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        node = self._pick(index, _can_change)
        assert node is not None
        self._finish(node)

    # Faults.

    @precondition(lambda self: self._where(lambda node: True))
    @rule(
        index=INDEX,
        what=st.sampled_from(["leaves", "dies", "freezes", "thaws", "loses its link", "gets a double"]),
    )
    def node(self, index: int, what: str) -> None:
        """A fault hits a node."""
        node = self._pick(index, lambda node: node.frozen if what == "thaws" else True)
        match what:
            case _ if node is None:
                return
            case "leaves" if not node.frozen and not node.leaving:
                self._leave(node)
            case "dies":
                self._die(node)
            case "freezes" | "thaws":
                node.frozen = what == "freezes"
            case "loses its link" if not node.frozen and node.link is not None:
                # It has given the link up. The leader does not see it yet, and what was under way is lost.
                self.half_open.append(node.link)
                node.link = None
                node.unread.clear()
            case "gets a double" if len(self._where(lambda other: other.node_id == node.node_id)) < 2:
                self._start(node.node_id)

    @precondition(lambda self: self.half_open)
    @rule(index=INDEX)
    def see_the_end_of_a_link(self, index: int) -> None:
        """The leader sees what a node has given up before."""
        self._hang_up(self.half_open.pop(index % len(self.half_open)))

    @precondition(lambda self: not self.machine.ended and self.record.round.number)
    @rule(what=st.sampled_from(["sleeps 3 s", "sleeps 1 h", "dies"]))
    def leader(self, what: str) -> None:
        """A fault hits the leader."""
        match what:
            case "dies":
                self._lose_the_leader()
            case _:
                # What the nodes sent while its process was stopped it finds when it wakes up.
                self.clock.advance(3.0 if what == "sleeps 3 s" else 3600.0)
                self._beat()
                self._apply(self.machine.turn(self.now))

    # Time.

    @rule()
    def work(self) -> None:
        self._advance(2.5, prompt=True)

    @rule(
        seconds=st.sampled_from([0.05, 0.25, 1.0, 2.5, 5.0, 11.0, 30.0, 120.0]),
        prompt=st.sampled_from([True, True, False]),
    )
    def wait(self, seconds: float, prompt: bool) -> None:
        """Time passes; prompt nodes do at once what is due."""
        self._advance(seconds, prompt=prompt)

    # What must always hold.

    @invariant()
    def the_leader_knows_each_link_once(self) -> None:
        links = [node.link for node in self.machine.nodes.values()]
        assert len(set(links)) == len(links)
        assert set(links) <= set(self.accepted) or self.machine.ended

    @invariant()
    def a_turn_is_due_in_time(self) -> None:
        assert 0 < self.machine.wait(self.now) <= self.timing.beat + 1e-6

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.record.restarts <= self.machine.restarts <= self.limits.max_restarts

    def teardown(self) -> None:
        """Without further faults the run trains, and then ends."""
        if not hasattr(self, "machine"):
            return
        for node in self.nodes:
            node.frozen = False
        while self.half_open:
            self._hang_up(self.half_open.pop())
        self._advance(self.timing.dead_after + 1, prompt=True)
        there = {node.node_id for node in self._where(lambda node: not node.leaving)}
        for _ in range(self.limits.min_nodes - len(there)):
            self.arrive()
        self._advance(RECOVERY, prompt=True)
        if not self.machine.ended:
            self._assert_trains()
            for node in self._where(lambda node: node.training):
                self._finish(node)
        assert self.record.end is not None, "all have finished, but not the run"
        for _ in range(3):
            self._do_all()
        assert not self._where(lambda node: True), "not all have heard of the end"


def _can_change(node: SimNode) -> bool:
    """Whether its workers may fail or finish."""
    return node.training and not node.starting and not node.stopping and not node.frozen


def _has_to_do(node: SimNode) -> bool:
    busy = bool(node.unread) or node.starting or node.stopping or node.link is None or node.incomplete
    return busy and not node.frozen


TestLeaderRun = LeaderRun.TestCase
TestLeaderRun.settings = settings(
    max_examples=int(EXAMPLES or 150),
    stateful_step_count=40,
    derandomize=EXAMPLES is None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
