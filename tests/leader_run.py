"""A leader under test: nodes, links and a clock that the tests move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.events.sentences import sentence
from elastic_launch.events.types import (
    Event,
    RoundBroken,
)
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.leader.types import Close, CommitRecord, Emit, Instruction, Send
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.testing import FakeClock

T = TypeVar("T")

COMMAND = "train.py --lr 1"


def hello_of(node_id: str, **fields: Any) -> m.NodeHello:
    """Return a node's hello; by default its incarnation is its id followed by 1."""
    hello = m.NodeHello(
        version=m.PROTOCOL_VERSION,
        run_id="run",
        digest="digest",
        command=COMMAND,
        limits=str(Limits()),
        node_id=node_id,
        incarnation=f"{node_id}1",
        workers=1,
        address=f"host-{node_id}",
        store_port=7000,
    )
    return replace(hello, **fields)


class Run:
    """A leader and the nodes' ends of its links.

    Args:
        nodes: as in ``--nnodes``.
        timing: fields of Timing.
    """

    def __init__(
        self,
        nodes: str = "1:2",
        *,
        max_restarts: int = 3,
        record: ControlRecord | None = None,
        dead: frozenset[str] = frozenset(),
        silent: frozenset[str] = frozenset(),
        hosted: bool = False,
        **timing: float,
    ) -> None:
        low, _, high = nodes.partition(":")
        self.limits = Limits(int(low), int(high or low), max_restarts)
        self.clock = FakeClock(1000.0)
        record = record or ControlRecord("run", "digest", 1, Leader("a", "a1", "10.0.0.1", 1)).renewed()
        self.record = record if record.limits != Limits() else replace(record, limits=self.limits)
        self.machine = LeaderMachine(
            self.record, Timing(**timing), COMMAND, self.clock.now(), dead, silent, hosted=hosted
        )
        self.links: dict[str, int] = {}
        self.silent: set[str] = set()
        self.commits: list[ControlRecord] = []
        self.events: list[Event] = []
        self.reaches = True  # nodes answer at once that they can connect to a round's hosts
        self._owners: dict[int, str] = {}
        self._orders: list[tuple[str, m.Order]] = []

    # Input.

    def hello(self, *node_ids: str, **fields: Any) -> None:
        """Each node opens a link and says hello, with the defaults of :func:`hello_of`."""
        for node_id in node_ids:
            link = len(self._owners) + 1
            self.links[node_id], self._owners[link] = link, node_id
            hello = replace(hello_of(node_id), **{"limits": str(self.limits), **fields})
            self._do(self.machine.hello(link, hello, self.clock.now()))

    def report(self, node_id: str, report: m.Report) -> None:
        self._do(self.machine.report(self.links[node_id], report, self.clock.now()))
        self._do(self.machine.turn(self.clock.now()))

    def join(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.report(node_id, m.Joined(self.number))

    def done(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.report(node_id, m.Done(self.number))

    def stop(self, *node_ids: str, number: int | None = None, store_port: int = 7000) -> None:
        """Nodes report that the workers of the current round are reaped."""
        number = self.number if number is None else number
        for node_id in node_ids:
            self.report(node_id, m.Stopped(number, store_port))

    def fail(self, node_id: str, **fields: Any) -> None:
        """A worker of the node fails; by default with a crash after a minute."""
        self.report(node_id, failure(node_id, **{"round": self.number, **fields}))

    def leave(self, node_id: str) -> None:
        self.report(node_id, m.Leaving("SIGTERM"))

    def resize(self, low: int, high: int) -> None:
        """A user requests other limits."""
        self._do(self.machine.resize(low, high, self.clock.now()))

    def stop_run(self, seconds: float | None = None) -> None:
        """A user drains the run."""
        self._do(self.machine.stop("elasticctl drain", seconds, self.clock.now()))

    def close(self, *node_ids: str) -> None:
        """The nodes' processes end."""
        for node_id in node_ids:
            self._do(self.machine.closed(self.links.pop(node_id), self.clock.now()))

    def advance(self, seconds: float) -> None:
        """Advance the time: the leader turns when it is due, nodes beat unless silent."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(self.machine.wait(self.clock.now()), end - self.clock.now()))
            self.beat_and_turn()

    def sleep(self, seconds: float) -> None:
        """The leader's process is stopped for this long; the nodes' beats queue up."""
        self.clock.advance(seconds)
        self.beat_and_turn()

    def beat_and_turn(self) -> None:
        for node_id in list(self.links):
            if node_id not in self.silent and node_id in self.links:
                self.report(node_id, m.Beat())
        self._do(self.machine.turn(self.clock.now()))

    # Output.

    def _do(self, instructions: Sequence[Instruction]) -> None:
        asked: list[tuple[str, int]] = []
        for instruction in instructions:
            match instruction:
                case CommitRecord(record=record):
                    assert record.nonce not in {self.record.nonce, *(commit.nonce for commit in self.commits)}
                    assert ControlRecord.parse(record.encode()) == record, "a record that no node can read"
                    self.record = record
                    self.commits.append(record)
                case Send(link=link, order=order):
                    assert order.term == self.record.term, "an order of another term than the record's"
                    if isinstance(order, m.Form):
                        assert order.round == self.record.round, "a round is ordered that the record does not hold"
                    if isinstance(order, m.RunEnd):
                        assert self.record.end is not None, "an end is ordered that the record does not hold"
                    self._orders.append((self._owners[link], order))
                    if isinstance(order, m.Reach):
                        asked.append((self._owners[link], order.round))
                case Close(link=link):
                    self.links = {node_id: other for node_id, other in self.links.items() if other != link}
                case Emit(event=event):
                    sentence(event)
                    self.events.append(event)
        for node_id, number in asked if self.reaches else ():
            if node_id in self.links:
                self._do(self.machine.report(self.links[node_id], m.Reached(number, ""), self.clock.now()))

    def orders(self, node_id: str, kind: type[T]) -> list[T]:
        return [order for owner, order in self._orders if owner == node_id and isinstance(order, kind)]

    def told(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def number(self) -> int:
        return self.record.round.number

    @property
    def members(self) -> str:
        """The ids of the current round's members in rank order, as one word."""
        return "".join(member.node_id for member in self.record.round.members)

    @property
    def forming(self) -> bool:
        """Whether the current round is broken, or there was none yet."""
        broken = [event.round for event in self.told(RoundBroken)]
        return self.number == 0 or self.number in broken

    @property
    def end(self) -> tuple[int, str] | None:
        return (self.record.end.code, self.record.end.cause) if self.record.end else None

    @property
    def code(self) -> int | None:
        return self.record.end.code if self.record.end else None


def failure(node_id: str, **fields: Any) -> Failure:
    values: dict[str, Any] = {
        "kind": "crash",
        "rank": 0,
        "local_rank": 0,
        "pid": 42,
        "exit_code": 1,
        "error": "ValueError: boom",
        "ran": 60.0,
        "round": 1,
    }
    return Failure(node_id=node_id, **{**values, **fields})


def running(nodes: str, node_ids: str, **arguments: Any) -> Run:
    """A run whose first round consists of the given nodes, all of which have started their workers."""
    run = Run(nodes, **arguments)
    run.hello(*node_ids)
    run.advance(2.1)
    assert run.members == node_ids
    assert run.number == 1
    run.join(*node_ids)
    return run
