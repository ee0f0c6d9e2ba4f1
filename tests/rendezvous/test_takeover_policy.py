"""A new leader judges failures as the one before would have: it knows what that one has counted.

Each run is played twice with the same nodes and failures: under one leader, and under several, each of which takes over
from the record and from what the nodes say in their hellos. The clocks of two leaders have nothing in common.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from leader_run import COMMAND, Run, failure

from elastic_launch.config.launch_config import Limits
from elastic_launch.events.types import RestartCharged
from elastic_launch.failure import Mistake
from elastic_launch.rendezvous.leader.exclusion import FAULTS
from elastic_launch.rendezvous.node.machine import NodeMachine
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m

EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")

NODE_IDS = "abc"

NAN = "The loss is nan in step 4, micro-batch 1."

FAILURES: dict[str, dict[str, Any]] = {
    "crash": {},
    "soon": {"ran": 1.0},
    "same loss": {"repeats": NAN},
    "other loss": {"repeats": "The loss is inf"},
    "mistake": {"mistake": Mistake("KeyError", "train.py:4 in main")},
    "SIGKILL": {"exit_code": -9},
    "SIGTERM": {"kind": "preemption", "exit_code": -15},
}

COUNTED = ("restarts", "refilled", "idle", "last_step", "soon", "vain", "best", "repeats", "repeats_step")

CHUNK = 100.0
"""Seconds after which nodes obey, at the latest."""

TIMING = {"join_settle": 1.0, "resize_delay": 0.0, "beat": CHUNK, "dead_after": 5 * CHUNK, "return_after": 5 * CHUNK}


class Nodes:
    """Three nodes under a leader that may be succeeded by another, whose own node is in no round."""

    def __init__(self, limits: Limits) -> None:
        record = ControlRecord("run", "digest", 1, Leader("z", "z1", "10.0.0.9", 1), limits=limits, run="01")
        self.run = Run("1:4", record=record.renewed(), **TIMING)
        self.time = 0.0  # by the nodes' clocks
        self.sides = {node_id: NodeMachine() for node_id in NODE_IDS}
        self.steps = 0
        self.charged: list[tuple[Any, ...]] = []
        self._read = self._seen = 0
        self._draining: set[str] = set()
        for node_id, side in self.sides.items():
            side.begin(
                m.NodeHello(m.PROTOCOL_VERSION, "run", "digest", COMMAND, "", node_id, f"{node_id}1", 1, "host", 7000)
            )
        self._connect(NODE_IDS)
        self.settle()

    def _connect(self, node_ids: Collection[str]) -> None:
        for node_id in node_ids:
            side = self.sides[node_id]
            side.greet(self.time)
            (hello,) = side.take()
            self.run.hello(node_id, **{item.name: getattr(hello, item.name) for item in fields(hello)})
            self._deliver()

    def _deliver(self) -> None:
        orders = self.run._orders
        while self._read < len(orders):
            node_id, order = orders[self._read]
            self._read += 1
            self.sides[node_id].obey(order, self.time)
            if isinstance(order, m.DrainRound):
                self._draining.add(node_id)
            elif isinstance(order, m.Form | m.Break):
                self._draining.discard(node_id)
        for event in self.run.events[self._seen :]:
            if isinstance(event, RestartCharged):
                self.charged.append((event.round, event.restarts, event.max_restarts, event.delay_s, event.idle))
        self._seen = len(self.run.events)

    def _say(self, node_id: str, report: m.Report) -> None:
        side = self.sides[node_id]
        side.say(report, self.time)
        for each in side.take():
            self.run.report(node_id, each)
            self._deliver()

    def take_over(self) -> None:
        """Another node leads; it has only the record and the nodes' hellos."""
        if self.run.end is not None:
            return
        self._deliver()
        record = replace(self.run.record, term=self.run.record.term + 1).renewed()
        self.run = Run("1:4", record=ControlRecord.parse(record.encode()), **TIMING)
        self._read = self._seen = 0
        members = [member.node_id for member in record.round.members]
        self._connect([*(node_id for node_id in NODE_IDS if node_id not in members), *members])

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while end - self.time > 1e-6:
            step = min(self.run.machine.wait(self.run.clock.now()), end - self.time)
            self.run.advance(step)
            self.time += step
            self._deliver()

    def settle(self) -> None:
        """Nodes do what they are ordered to, until a round trains or the run has ended."""
        while self.run.end is None:
            number = self.run.number
            stopping = [node_id for node_id in self.sides if self._told_to_stop(node_id)]
            starting = [node_id for node_id in self.run.members if not self.sides[node_id].hello.ready]
            if stopping:
                self._say(stopping[0], m.Stopped(number, 7000, self.steps if stopping[0] in self._draining else -1))
            elif not self.run.machine.running:
                self.advance(1.0)
            elif starting:
                self._say(starting[0], m.NodeReady(number, step=self.steps))
            else:
                return

    def _told_to_stop(self, node_id: str) -> bool:
        hello = self.sides[node_id].hello
        return bool(hello.holding) and (hello.broken or node_id in self._draining)

    def train(self, seconds: float, steps: int) -> None:
        """The round trains; all steps are kept."""
        end = self.time + seconds
        while self.time < end and self.run.end is None:
            self.advance(min(CHUNK, end - self.time))
            self.settle()  # after a node that was left out is back
        self.steps += steps
        for node_id in self.run.members if self.run.end is None else ():
            report = m.ProgressBeat(self.run.number, self.steps)
            self.sides[node_id].beats(report)
            self.run.report(node_id, report)

    def fail(self, index: int, how: str, takeovers: Collection[int] = ()) -> None:
        """A worker fails; each number names a moment at which another leader takes over meanwhile."""
        if self.run.end is not None:
            return
        node_id = self.run.members[index % len(self.run.members)]
        number, others = self.run.number, self.run.members.replace(node_id, "")
        values = {"round": number, "trained": 0, **FAILURES[how]}
        doings = [
            lambda: self._say(node_id, failure(node_id, **{**values, "round": number})),
            *(lambda other=other: self._say(other, m.Stopped(number, 7000)) for other in others),
            lambda: self._say(node_id, m.Stopped(number, 7000)),
        ]
        for moment, do in enumerate(doings):
            if moment in takeovers:
                self.take_over()
            do()
        if len(doings) in takeovers:
            self.take_over()
        self.settle()

    def policy(self) -> dict[str, Any]:
        """What has been counted, as of the current round, and which nodes are left out now."""
        record, nodes = self.run.record, self.run.machine.nodes
        return {name: getattr(record, name) for name in COUNTED} | {
            "round": self.run.members,
            "end": self.run.end,
            "charged": self.charged[-1:],
            "faulty": [(x.node_id, x.times, len(x.faults)) for x in record.faulty],
            "left out": {node_id for node_id in NODE_IDS if node_id in nodes and nodes[node_id].excluded},
        }

    def times(self) -> list[float]:
        """The times that have been counted."""
        record = self.run.record
        return [record.healthy, *(time for x in record.faulty for time in (x.left, *x.faults))]


class TakeoverPolicy(RuleBasedStateMachine):
    """The same run under one leader, and under many."""

    @initialize(
        max_restarts=st.sampled_from([3, 100]),
        refill=st.sampled_from([30.0, 500.0, 1e5]),
        idle=st.sampled_from([0, 4]),
    )
    def begin(self, max_restarts: int, refill: float, idle: int) -> None:
        limits = Limits(1, 4, max_restarts, restart_refill=refill, max_idle_restarts=idle)
        self.one, self.many = Nodes(limits), Nodes(limits)

    @rule(
        seconds=st.sampled_from([1.0, 20.0, 400.0, 4000.0]),
        steps=st.sampled_from([0, 5]),
        index=st.integers(0, 2),
        how=st.sampled_from([*FAILURES]),
        moments=st.sets(st.integers(0, 4)),
    )
    def train_and_fail(self, seconds: float, steps: int, index: int, how: str, moments: set[int]) -> None:
        for nodes in (self.one, self.many):
            nodes.train(seconds, steps)
        self.one.fail(index, how)
        self.many.fail(index, how, moments)

    @rule(seconds=st.sampled_from([20.0, 400.0, 4000.0]), steps=st.sampled_from([0, 5]))
    def train(self, seconds: float, steps: int) -> None:
        for nodes in (self.one, self.many):
            nodes.train(seconds, steps)

    @rule()
    def fail_often(self) -> None:
        for moment in range(FAULTS):
            self.one.fail(1, "crash")
            self.many.fail(1, "crash", [moment])

    @rule()
    def take_over(self) -> None:
        self.many.take_over()
        self.many.settle()

    @invariant()
    def the_policy_is_the_same(self) -> None:
        assert self.many.policy() == self.one.policy()
        assert self.many.times() == pytest.approx(self.one.times(), abs=0.01)


TestTakeoverPolicy = TakeoverPolicy.TestCase
TestTakeoverPolicy.settings = settings(
    max_examples=int(EXAMPLES or 25),
    stateful_step_count=15,
    derandomize=EXAMPLES is None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
