"""Nodes that elect their leader: real links, leaders and threads, an in-memory store, and workers that do nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from harness import SLOWNESS

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits, Timing
from elastic_launch.errors import RendezvousError
from elastic_launch.events.types import Event
from elastic_launch.rendezvous.backends.election import ElectedBackend
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.rendezvous.node.membership_events import MembershipEvent, RendezvousLost
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.secret import Token
from elastic_launch.testing import MemoryStore

# On a busy machine a thread may stand still for a second.
TIMING = Timing(join_settle=0.8, beat=0.1, dead_after=2.5, min_wait=20.0, read_timeout=5.0)


_STORE = socket.create_server(("127.0.0.1", 0), backlog=4096)  # it accepts none
PORT = _STORE.getsockname()[1]
"""Where the worker stores of all nodes listen: a node that joins later must be able to connect to one."""


class View(MemoryStore):
    """One node's view of a shared store: closing it does not close the store."""

    def __init__(self, shared: MemoryStore) -> None:
        self._shared = shared

    def load(self, timeout: float) -> bytes | None:
        return self._shared.load(timeout)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        return self._shared.compare_and_set(expected, value, timeout)

    def close(self) -> None:
        return


class Sink:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)


def backend_for(
    name: str,
    store: MemoryStore,
    events: Sink,
    limits: Limits,
    *,
    reuse: bool = False,
    token: Token | None = None,
) -> tuple[LaunchConfig, ElectedBackend]:
    config = LaunchConfig(
        Command(("python", "train.py"), ("train.py",)),
        limits=limits,
        backend="etcd",
        endpoint=Endpoint("127.0.0.1", 2379),
        local_addr="127.0.0.1",
        timing=TIMING,
        node_id=name,
        reuse=reuse,
        token=token,
    )
    return config, ElectedBackend(config, MonotonicClock(), events, lambda: View(store))


class Node:
    """A node whose workers start and stop at once."""

    def __init__(
        self, name: str, store: MemoryStore, events: Sink, limits: Limits, *, reuse: bool, token: Token | None
    ) -> None:
        self.name = name
        self.config, self.backend = backend_for(name, store, events, limits, reuse=reuse, token=token)
        self.lost: list[RendezvousError] = []
        self.rounds: list[m.Form] = []
        self.broken: list[int] = []
        self.ends: list[int] = []
        self.causes: list[str] = []
        self.evictions = 0
        self.deaf = False
        self.membership = Membership(self.config, self.backend, MonotonicClock(), self.hear, lambda address: PORT)

    def hear(self, event: MembershipEvent) -> None:
        match event:
            case m.Form():
                self.rounds.append(event)
                self.membership.report(m.Joined(event.round.number))
            case m.Break(round=number):
                self.broken.append(number)
                self.membership.report(m.Stopped(number, PORT))
            case m.Evicted():
                self.evictions += 1
                self.membership.report(m.Stopped(self.rounds[-1].round.number if self.rounds else 0, PORT))
            case m.RunEnd(code=code, cause=cause):
                self.ends.append(code)
                self.causes.append(cause)
            case RendezvousLost(error=error):
                self.lost.append(error)

    def members(self) -> list[str]:
        return [member.node_id for member in self.rounds[-1].round.members] if self.rounds else []


class Nodes:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.events = Sink()
        self.nodes: dict[str, Node] = {}

    def start(self, *names: str, limits: Limits | None = None, reuse: bool = False, token: Token | None = None) -> None:
        for name in names:
            limits = limits or Limits(1, 4, 3)
            self.nodes[name] = Node(name, self.store, self.events, limits, reuse=reuse, token=token)
            self.nodes[name].membership.start()

    def leave(self, name: str) -> None:
        """Send a goodbye first, so that no leader forms a round without it before its own sockets close."""
        node = self.nodes.pop(name)
        node.membership.report(m.Leaving("end of its part"))
        node.membership.close()

    @property
    def record(self) -> ControlRecord:
        value = self.store.load(1)
        assert value is not None
        return ControlRecord.parse(value)

    def leader(self) -> str:
        return self.record.leader.node_id

    def until(self, what: str, probe: Callable[[], bool], timeout: float = 10.0) -> None:
        deadline = time.monotonic() + SLOWNESS * timeout
        while not probe():
            assert time.monotonic() < deadline, f"not seen: {what}; {self.events.seen}"
            time.sleep(0.01)

    def together(self, *names: str) -> None:
        wanted = sorted(names)
        self.until(
            f"a round of {wanted}",
            lambda: (
                all(sorted(self.nodes[n].members()) == wanted for n in names)
                and len({self.nodes[n].rounds[-1].round.number for n in names}) == 1
            ),
        )
