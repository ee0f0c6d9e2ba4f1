"""A run of thousands of nodes that fail and are replaced: the real leader's machine, with nodes and network simulated.

    python benchmarks/rendezvous_churn.py 4096 16384 --minutes 30

The leader is as fast as on this machine: the CPU time that it takes for deciding and encoding passes in the simulation,
too. Workers keep their processes (live rounds). Every message takes a random delay; a lost one, and each of its
repetitions that is lost, a retransmission timeout more. What the leader sends shares one link of 10 Gbit/s.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rendezvous_model import COMMAND

from elastic_launch.config.launch_config import Limits, Timing
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.leader.types import Close, Instruction, Send
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.outline import OrderEncoder

FAILURES_PER_HOUR = 0.01
"""Share of the nodes that fail in an hour."""

DELAY, LOSS, RETRANSMISSION = (0.0002, 0.002), 0.001, 0.2
"""Seconds that a message takes; the share that is lost; seconds until a lost one is sent again, Linux's least."""

BYTES_PER_SECOND = 1.25e9

LEAVES, REACHES_BOUNDARY, FORMS = (0.005, 0.03), (0.02, 0.06), (0.03, 0.08)
"""Seconds in which workers leave a round, reach the next step boundary, and form the new groups."""

NEW_NODE, STARTS = 60.0, 30.0
"""Seconds until a failed node is replaced, and until the new node's workers have started."""


@dataclass
class Standstills:
    """Seconds without steps for each change, and what the leader did for it.

    Attributes:
        lost, joined: from a node's loss, or the order to drain for new ones, until all members train.
        cpu: the leader's CPU seconds for each round.
        messages: all that the leader has received and sent, without heartbeats.
    """

    lost: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    messages: int = 0


class Run:
    """A leader, its nodes by link number, and what happens next."""

    def __init__(self, size: int, seed: int) -> None:
        self.random, self.size, self.now = random.Random(seed), size, 1000.0
        limits = Limits(size // 2, size, 0)
        record = ControlRecord("run", "d" * 64, 1, Leader("node-00000", "i" * 12, "10.0.0.1", 29401), limits=limits)
        self.limits, self.machine = limits, LeaderMachine(record.renewed(), Timing(), COMMAND, self.now)
        self.found = Standstills()
        self.links: dict[int, str] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._inbox: list[tuple[int, m.Report | None]] = []
        self._awake = False
        self._timer = 0  # number of the one that counts
        self._free_at = self.now
        self._encoder = OrderEncoder()
        self._stopped_at: float | None = None  # the training
        self._drained = False
        self._training: set[int] = set()
        self._cpu = 0.0

    def call(self, delay: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), function))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, function = heapq.heappop(self._events)
            function()
        self.now = end

    # Nodes.

    def arrive(self) -> None:
        link = next(self._numbers)
        self.links[link] = f"node-{link:08}"
        address = f"10.{link >> 16 & 255}.{link >> 8 & 255}.{link & 255}"
        hello = m.NodeHello(
            m.PROTOCOL_VERSION,
            *("run", "d" * 64, COMMAND, str(self.limits), self.links[link], f"{link:012x}", 8, address, 29500),
        )
        self._say(link, hello)

    def fail(self) -> None:
        """A node's processes die; half of the times its host does, too, which the leader sees by its silence."""
        link = self.random.choice(list(self.links)[1:])  # not the leader's own
        del self.links[link]
        if self._stopped_at is None:
            self._stopped_at, self._drained, self._cpu = self.now, False, 0.0
        self.call(self.random.choice((0.0, self.machine.timing.dead_after)), lambda: self._receive(link, None))
        self.call(NEW_NODE, self.arrive)
        self.call(self.random.expovariate(FAILURES_PER_HOUR * self.size / 3600), self.fail)

    def _say(self, link: int, report: m.Report, within: tuple[float, float] = (0.0, 0.0)) -> None:
        self.call(self.random.uniform(*within) + self._delay(), lambda: self._receive(link, report))

    def _delay(self) -> float:
        delay = self.random.uniform(*DELAY)
        while self.random.random() < LOSS:
            delay += RETRANSMISSION
        return delay

    def _obey(self, link: int, order: m.Order) -> None:
        if link not in self.links:
            return
        match order:
            case m.Form(round=formed):
                self._say(link, m.Joined(formed.number))
                self._say(link, m.NodeReady(formed.number, live=True), FORMS)
            case m.Break(round=number):
                self._say(link, m.Stopped(number, 29500), LEAVES)
            case m.DrainRound(round=number):
                self._say(link, m.Stopped(number, 29500, drained=number), REACHES_BOUNDARY)
            case m.StartAhead():
                self._say(link, m.RankOffer(()), (STARTS, STARTS + 1.0))
                self._say(link, m.Imported(), (STARTS + 1.0, STARTS + 2.0))
            case m.Evicted() | m.Refused() | m.RunEnd():
                raise AssertionError(f"{self.links[link]} got {order}")

    # The leader.

    def _receive(self, link: int, report: m.Report | None) -> None:
        self._inbox.append((link, report))
        self.found.messages += 1
        self._wake(0.0)

    def _wake(self, delay: float) -> None:
        if not self._awake:
            self._awake = True
            self.call(max(delay, self._free_at - self.now), self._turn)

    def _turn(self) -> None:
        """Handle all that has come, as the service does; what it decides is sent when the CPU time has passed."""
        self._awake = False
        inbox, self._inbox = self._inbox, []
        for node in self.machine.nodes.values():
            node.heard = self.now  # heartbeats: their cost is measured at rest
        began = time.process_time()
        instructions: list[Instruction] = []
        for link, report in inbox:
            if report is None:
                instructions += self.machine.closed(link, self.now)
            elif isinstance(report, m.NodeHello):
                instructions += self.machine.hello(link, report, self.now)
            else:
                instructions += self.machine.report(link, report, self.now)
        instructions += self.machine.turn(self.now)
        sizes = [len(self._encoder.encode(x.order)) if isinstance(x, Send) else 0 for x in instructions]
        took = time.process_time() - began
        self._cpu += took
        self._free_at = self.now + took
        sent = 0
        for instruction, size in zip(instructions, sizes, strict=True):
            assert not isinstance(instruction, Close), instruction
            if isinstance(instruction, Send):
                sent += size
                self._send(instruction.link, instruction.order, took + sent / BYTES_PER_SECOND)
        self._observe(inbox)
        self._timer = timer = next(self._numbers)
        self.call(took + self.machine.wait(self.now), lambda: self._wake(0.0) if timer == self._timer else None)

    def _send(self, link: int, order: m.Order, after: float) -> None:
        self.found.messages += 1
        if isinstance(order, m.DrainRound) and self._stopped_at is None:
            self._stopped_at, self._drained, self._cpu = self.now, True, 0.0
        self.call(after + self._delay(), lambda: self._obey(link, order))

    def _observe(self, inbox: list[tuple[int, m.Report | None]]) -> None:
        number = self.machine.record.round.number
        for link, report in inbox:
            if isinstance(report, m.NodeReady) and report.round == number:
                self._training.add(link)
            elif isinstance(report, m.Stopped) or report is None:
                self._training.clear()
        members = len(self.machine.record.round.members)
        if self._stopped_at is not None and self.machine.running and len(self._training) == members:
            found = self.found.joined if self._drained else self.found.lost
            found.append(self.now - self._stopped_at)
            self.found.cpu.append(self._cpu)
            self._stopped_at = None
            self._training.clear()


def simulate(size: int, minutes: float, seed: int) -> tuple[float, Run]:
    """Return the seconds of the first join, and the run after so many minutes of faults."""
    run = Run(size, seed)
    run._stopped_at = run.now
    for _ in range(size):
        run.arrive()
    run.run(120.0)
    (first,) = run.found.lost
    run.found = Standstills()
    run.call(0.0, run.fail)
    run.run(60 * minutes)
    return first, run


def shown(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{len(values)}: {statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="+", help="numbers of nodes")
    parser.add_argument("--minutes", type=float, default=30.0, help="simulated minutes with faults")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| nodes | first join, s | nodes lost: standstill, s | nodes joined | leader's CPU per round, s ", end="")
    print("| its messages per round | time without steps |\n|---|---|---|---|---|---|---|")
    for size in args.sizes:
        first, run = simulate(size, args.minutes, args.seed)
        found = run.found
        still = 100 * sum([*found.lost, *found.joined]) / (60 * args.minutes)
        messages = f"{found.messages / len(found.cpu):.0f}" if found.cpu else "-"
        cells = [size, f"{first:.1f}", shown(found.lost), shown(found.joined), shown(found.cpu), messages]
        cells.append(f"{still:.1f} %")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
