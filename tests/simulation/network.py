"""Simulated connections and control store: messages may be late, held back by a partition, or lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_launch.errors import StoreError
from elastic_launch.testing import MemoryStore
from simulation.kernel import Host, Kernel, Mailbox, Resume, Wait

__all__ = ["END", "Connection", "Network", "SimStore"]

END = None
"""What is read from a connection that the other side has closed."""


class Network:
    """Which hosts reach each other, and which of them reach the store.

    Attributes:
        groups: the group of each host by name; hosts of different groups do not reach each other.
        cut_off: names of hosts that do not reach the store.
        unlinked: names of hosts from which no connection to a leader can be made.
        slow: additional seconds for every packet.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.groups: dict[str, int] = {}
        self.cut_off: set[str] = set()
        self.unlinked: set[str] = set()
        self.slow = 0.0
        self._held: list[Callable[[], None]] = []

    def joins(self, one: Host, other: Host) -> bool:
        return one is other or self.groups.get(one.name, 0) == self.groups.get(other.name, 0)

    def hold(self, deliver: Callable[[], None]) -> None:
        """Deliver after the next change; TCP retransmits."""
        self._held.append(deliver)

    def change(self) -> None:
        held, self._held = self._held, []
        for deliver in held:
            deliver()

    def delay(self) -> float:
        return self.slow + self.kernel.soon()


class _Side:
    def __init__(self, host: Host, mailbox: Mailbox) -> None:
        self.host = host
        self.mailbox = mailbox
        self.open = True
        self.silent = False  # its host lost power: it sends no answers
        self.incoming: list[Any] = []


class Connection:
    """Two sides, 0 (which connected) and 1; items in a side's mailbox are (connection, message)."""

    def __init__(self, network: Network, ends: tuple[tuple[Host, Mailbox], tuple[Host, Mailbox]]) -> None:
        self._network = network
        self._sides = [_Side(*end) for end in ends]
        self._last = [0.0, 0.0]

    def send(self, side: int, message: Any) -> None:
        if self._sides[side].open:
            self._forward(side, message)

    def accepted(self, mailbox: Mailbox) -> None:
        """Deliver to this mailbox what side 1 receives, and has received so far."""
        mine = self._sides[1]
        for item in mine.mailbox.take():
            mailbox.put(item)
        mine.mailbox = mailbox

    def close(self, side: int, *, silently: bool = False) -> None:
        """Close a side; what was sent before still arrives, incoming data is lost."""
        mine = self._sides[side]
        if mine.open:
            mine.open, mine.silent = False, silently
            if not silently:
                self._forward(side, END)

    def reset(self) -> None:
        """A device in between ends it: both sides see that at once, and data in transit is lost."""
        for side, mine in enumerate(self._sides):
            if mine.open:
                mine.open = False
                mine.mailbox.put((self, END))
                del self._sides[1 - side].incoming[:]

    def _forward(self, side: int, message: Any) -> None:
        kernel, other = self._network.kernel, self._sides[1 - side]
        other.incoming.append(message)
        self._last[side] = max(self._last[side], kernel.now + self._network.delay())
        kernel.call(self._last[side] - kernel.now, kernel.outside, lambda: self._deliver(side))

    def _deliver(self, side: int) -> None:
        mine, other = self._sides[side], self._sides[1 - side]
        if not self._network.joins(mine.host, other.host):
            self._network.hold(lambda: self._deliver(side))
            return
        if not other.incoming:
            return
        message = other.incoming.pop(0)
        if other.open:
            other.mailbox.put((self, message))
        elif message is not END and mine.open and not other.silent:
            self._forward(1 - side, END)  # the other side is gone: a reset


class SimStore:
    """A control store, like a remote cluster.

    Attributes:
        down: it sends no answers.
        mute: names of hosts whose writes are carried out, but whose answers are lost.
        late: names of hosts whose writes arrive at any time, even after their deadline.
    """

    def __init__(self, network: Network, written: Callable[[bytes, Host], None]) -> None:
        self.memory = MemoryStore()
        self.down = False
        self.mute: set[str] = set()
        self.late: set[str] = set()
        self._network = network
        self._written = written

    def spoil(self) -> None:
        """A stranger writes garbage."""
        if self.memory.load(0) is not None:
            self.memory.compare_and_set(self.memory.load(0), b"garbage", 0)

    def load(self, host: Host, timeout: float) -> Wait:
        return self._request(host, timeout, lambda again: self.memory.load(0), write=False)

    def compare_and_set(self, host: Host, expected: bytes | None, value: bytes, timeout: float) -> Wait:
        def swap(again: bool) -> bool:
            if self.memory.compare_and_set(expected, value, 0):
                self._written(value, host)
                return True
            return again and self.memory.load(0) == value

        return self._request(host, timeout, swap, write=True)

    def _reaches(self, host: Host) -> bool:
        return not self.down and host.name not in self._network.cut_off

    def _request(self, host: Host, timeout: float, operation: Callable[[bool], Any], *, write: bool) -> Wait:
        """Retry until it is answered or the time is over, as the etcd client does."""
        kernel = self._network.kernel

        def wait(resume: Resume) -> None:
            deadline = kernel.now + timeout
            state = {"answered": False, "tried": False}

            def answer(outcome: Any) -> None:
                if not state["answered"]:
                    state["answered"] = True
                    resume(outcome)

            def arrive() -> None:
                if (state["answered"] or kernel.now >= deadline) and not late:
                    return
                if self._reaches(host):
                    outcome = operation(state["tried"])
                    state["tried"] = True
                    if not (write and host.name in self.mute) and self._reaches(host):
                        kernel.call(self._network.delay(), host, lambda: answer(outcome))
                        return
                if not late:
                    kernel.call(0.25, kernel.outside, arrive)

            late = write and host.name in self.late
            delay = kernel.random.uniform(0, 2 * timeout) if late else self._network.delay()
            kernel.call(delay, kernel.outside, arrive)
            kernel.call(timeout, host, lambda: answer(StoreError("the store did not answer.")))

        return wait
