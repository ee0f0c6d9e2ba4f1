"""What an agent does with the planned faults of its workers."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import wait_for

from elastic_agents.drill import FaultReached, NodeDrill
from elastic_agents.inbox import SignalCaught
from elastic_agents.node_state import NodeState
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.contract import FaultDue
from elastic_launch.faults import Fault, FaultPlan
from elastic_launch.rendezvous.wire.messages import Strike

PLAN = FaultPlan(
    (
        Fault(rank=1, step=20, round=None),
        Fault(rank=None, step=30, round=None, do="freeze", seconds=2.0),
        Fault(rank=0, step=40, round=None, do="sigterm"),
        Fault(rank=0, step=50, round=None, do="cut_link", seconds=3.0),
        Fault(rank=0, step=60, round=None, do="fail_copies", seconds=4.0),
    )
)


class Node:
    def __init__(self) -> None:
        self.put: list[tuple[float, Any]] = []
        self.answers: list[bool] = []
        self.cuts: list[float] = []
        self.fails: list[float] = []
        self.leads = self.copies = False
        self.asked: list[int] = []  # faults that the leader is asked about
        config = LaunchConfig(Command(("true",), ("true",)), node_id="b", drill=PLAN)
        membership: Any = SimpleNamespace(cut_link=self._cut, report=lambda due: self.asked.append(due.fault))
        snapshot_store: Any = SimpleNamespace(fail_copies=self._fail)
        self.drill = NodeDrill(config, NodeState(config), self._later, membership, snapshot_store)

    def _later(self, seconds: float, item: object) -> None:
        self.put.append((seconds, item))

    def _cut(self, seconds: float) -> bool:
        self.cuts.append(seconds)
        return not self.leads

    def _fail(self, seconds: float) -> bool:
        self.fails.append(seconds)
        return self.copies

    def reach(self, fault: int, pid: int = 0) -> bool:
        self.drill.reached(FaultReached(pid, FaultDue(fault, 20, 1), self.answers.append))
        return self.asked[-1:] == [fault]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_worker_carries_out_its_fault_once_the_leader_says_so() -> None:
    node = Node()
    assert node.reach(0)
    node.drill.ordered(Strike(1, 0, "a"))
    assert node.answers == [], "another node's"
    node.drill.ordered(Strike(1, 0, "b"))
    node.drill.ordered(Strike(1, 0, "b"))
    assert node.answers == [True]


def test_a_worker_continues_if_the_fault_has_happened_or_is_unknown() -> None:
    node = Node()
    assert node.reach(0)
    node.drill.ordered(Strike(1, 0, ""))
    assert not node.reach(len(PLAN.faults))
    assert node.answers == [False, False]


def test_a_node_leaves_as_by_sigterm() -> None:
    node = Node()
    node.reach(2)
    node.drill.ordered(Strike(1, 2, "b"))
    assert node.put == [(0.0, SignalCaught(signal.SIGTERM))]
    assert node.answers == [False]


def test_a_link_is_cut_and_the_worker_continues() -> None:
    node = Node()
    assert node.reach(3)
    node.drill.ordered(Strike(1, 3, "b"))
    assert (node.cuts[-1], node.answers) == (3.0, [False])


def test_copies_fail_and_the_worker_continues() -> None:
    node = Node()
    node.copies = True
    assert node.reach(4)
    node.drill.ordered(Strike(1, 4, "b"))
    assert (node.fails[-1], node.answers) == (4.0, [False])


def test_what_a_node_cannot_do_is_not_asked_of_the_leader(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    node.leads = True
    assert not node.reach(3)
    assert not node.reach(4)
    assert node.answers == [False, False]
    assert "drill: fault 3 does not happen: this node leads the run" in caplog.text
    assert "drill: fault 4 does not happen: so far, this node saves no checkpoints" in caplog.text


def test_a_worker_is_stopped_for_a_time(process: subprocess.Popen[Any]) -> None:
    node = Node()
    node.reach(1, process.pid)
    node.drill.ordered(Strike(1, 1, "b"))
    [(seconds, go_on)] = node.put
    assert seconds == 2.0
    wait_for("the process to stand", lambda: _state(process.pid) == "T")
    go_on()
    wait_for("the process to run", lambda: _state(process.pid) == "S")
    process.kill()
    process.wait()
    go_on()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
