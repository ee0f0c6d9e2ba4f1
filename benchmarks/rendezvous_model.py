"""The leader's state machine alone, with any number of nodes: CPU time, messages, and the size of its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.leader.types import Close, CommitRecord, Instruction, Send
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.outline import OrderEncoder

__all__ = ["ETCD_LIMIT", "simulate", "table"]

ETCD_LIMIT = 1536 * 1024
"""etcd's default ``--max-request-bytes``; a write sends the old record and the new one."""

COMMAND = "train.py --lr 1"


class Model:
    """A leader and its nodes' answers; its clock stands still unless moved."""

    def __init__(self, size: int) -> None:
        self.limits = Limits(max(1, size - 1), size)
        leader = Leader("node-00000", "i" * 12, "10.0.0.1", 29401)
        record = ControlRecord("run", "d" * 64, 1, leader, limits=self.limits).renewed()
        self.now = 1000.0
        self.machine = LeaderMachine(record, Timing(), COMMAND, self.now)
        self.size = size
        self.open = set(range(size))
        self.written = [record.encode()]
        self.messages = self.bytes = 0
        self.machine_seconds = self.encoding_seconds = 0.0
        self._encoder = OrderEncoder()

    def hello(self, node: int) -> m.NodeHello:
        return m.NodeHello(
            version=m.PROTOCOL_VERSION,
            run_id="run",
            digest="d" * 64,
            command=COMMAND,
            limits=str(self.limits),
            node_id=f"node-{node:05}",
            incarnation=f"{node:012x}",
            workers=8,
            address=f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}",
            store_port=29500 + node % 1000,
        )

    def do(self, nodes: Iterable[int], report: Callable[[int], m.Report]) -> None:
        """Nodes report, all before the leader's next turn; everything it sends is packed and counted."""
        for node in nodes:
            message = report(node)
            self.now += 1e-6
            line = len(m.pack(message))
            self.messages, self.bytes = self.messages + 1, self.bytes + line
            self.step(lambda message=message, node=node: self._tell(node, message))
        self.turn()

    def close(self, node: int) -> None:
        self.open.remove(node)
        self.step(lambda: self.machine.closed(node, self.now))

    def turn(self) -> None:
        self.step(lambda: self.machine.turn(self.now))

    def step(self, work: Callable[[], list[Instruction]]) -> None:
        began = time.process_time()
        instructions = work()
        told = time.process_time()
        for instruction in instructions:
            self._carry_out(instruction)
        self.machine_seconds += told - began
        self.encoding_seconds += time.process_time() - told

    def _tell(self, node: int, report: m.Report) -> list[Instruction]:
        if isinstance(report, m.NodeHello):
            return self.machine.hello(node, report, self.now)
        return self.machine.report(node, report, self.now)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case CommitRecord(record=record):
                self.written.append(record.encode())
            case Send(order=order):
                self.messages, self.bytes = self.messages + 1, self.bytes + len(self._encoder.encode(order))
            case Close(link=link):
                raise AssertionError(f"the leader closed link {link}")

    def taken(self, work: Callable[[], None]) -> dict[str, Any]:
        """The cost of a phase: total CPU seconds, messages and bytes per node."""
        start = (self.machine_seconds, self.encoding_seconds, self.messages, self.bytes, len(self.written))
        work()
        return {
            "machine": self.machine_seconds - start[0],
            "encoding": self.encoding_seconds - start[1],
            "messages": (self.messages - start[2]) / len(self.open),
            "bytes": (self.bytes - start[3]) / len(self.open),
            "writes": len(self.written) - start[4],
        }


def simulate(size: int) -> dict[str, Any]:
    """Join, beat for a second, lose the last node, join again.

    Raises:
        AssertionError: if the leader does not form two rounds of all existing nodes.
    """
    model = Model(size)
    result: dict[str, Any] = {"nodes": size}

    def join() -> None:
        model.do(range(size), model.hello)
        model.do(range(size), lambda node: m.Joined(1))

    def rest() -> None:
        model.now += 1.0
        model.do(range(size), lambda node: m.Beat())

    def rejoin() -> None:
        model.close(size - 1)
        model.do(range(size - 1), lambda node: m.Stopped(1, 29500))
        model.do(range(size - 1), lambda node: m.Joined(2))

    for name, work in {"join": join, "rest": rest, "re-join": rejoin}.items():
        result[name] = model.taken(work)
    formed = model.machine.record.round
    assert (formed.number, len(formed.members)) == (2, size - 1), formed.number
    result["record"] = max(map(len, model.written))
    result["request"] = max(len(old) + len(new) for old, new in zip(model.written, model.written[1:], strict=False))
    return result


def table(results: list[dict[str, Any]]) -> None:
    print("\n| nodes | CPU s: join | re-join | a second at rest | messages per node: join | re-join ", end="")
    print("| kB per node: join | MB in all | record, kB | etcd's request, of its limit |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        phases = [result[name] for name in ("join", "re-join", "rest")]
        cells = [result["nodes"], *(f"{phase['machine'] + phase['encoding']:.2f}" for phase in phases)]
        cells += [f"{phase['messages']:.2f}" for phase in phases[:2]]
        cells += [f"{phases[0]['bytes'] / 1e3:.0f}", f"{phases[0]['bytes'] * result['nodes'] / 1e6:.0f}"]
        cells += [f"{result['record'] / 1e3:.0f}", f"{result['request'] / ETCD_LIMIT:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
