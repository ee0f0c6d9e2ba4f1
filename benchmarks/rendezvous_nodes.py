"""Processes full of nodes for rendezvous.py: each node has its own link and store client, and no workers.

Traffic is counted here, where sockets and stores are created, so that the product contains no counters. A message is a
line on a link, or a request to a store or its reply; bytes are the message's own, without TCP's overhead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

# Torch's store logs that a host has no name, and every error of clients whose server is killed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from elastic_launch.clock import MonotonicClock
from elastic_launch.config.endpoints import parse_endpoint
from elastic_launch.config.launch_config import Command, LaunchConfig, Limits
from elastic_launch.events.types import Event, LeaderElected
from elastic_launch.rendezvous.backends.registry import backend_of
from elastic_launch.rendezvous.node import membership
from elastic_launch.rendezvous.wire import messages as m

__all__ = ["BEATS", "Spec", "serve"]

BEATS = ("beat", "pulse")
_STORES: list[socket.socket] = []
TALLY = Counter[str]()
"""Of this process: ``<type>``, the lines of that type; ``bytes``; ``store``, requests and replies; ``writes`` requested
and ``written``."""
_tallying = threading.Lock()


def tally(**numbers: int) -> None:
    with _tallying:
        TALLY.update(numbers)


class Lines:
    """Counts the lines of one direction by their type."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:40]  # the type comes first
        kinds = Counter(line[9 : line.index(b'"', 9)].decode() for line in lines)
        tally(bytes=len(data), **kinds)


class CountedSocket(socket.socket):
    """A node's end of a link."""

    def __init__(self, sock: socket.socket) -> None:
        timeout = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout)
        self._up, self._down = Lines(), Lines()

    def send(self, data: Any, *flags: int) -> int:
        sent = super().send(data, *flags)
        self._up.feed(bytes(data[:sent]))
        return sent

    def sendall(self, data: Any, *flags: int) -> None:
        super().sendall(data, *flags)
        self._up.feed(bytes(data))

    def recv(self, *arguments: int) -> bytes:
        data = super().recv(*arguments)
        self._down.feed(data)
        return data


class CountedSockets:
    """Stands for the module socket in membership.py."""

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def create_connection(self, *arguments: Any, **options: Any) -> CountedSocket:
        return CountedSocket(socket.create_connection(*arguments, **options))


class CountedCalls:
    """Counts the calls of one of torch's stores; a mixin."""

    def get(self, key: str) -> bytes:
        value: bytes = super().get(key)  # type: ignore[misc]
        tally(store=2, bytes=len(key) + len(value))
        return value

    def check(self, keys: list[str]) -> bool:
        tally(store=2, bytes=sum(map(len, keys)) + 1)
        return bool(super().check(keys))  # type: ignore[misc]

    def set(self, key: str, value: Any) -> None:
        tally(store=2, bytes=len(key) + len(value), writes=1, written=1)
        super().set(key, value)  # type: ignore[misc]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        found: bytes = super().compare_set(key, expected, value)  # type: ignore[misc]
        written = found == value.encode() != expected.encode()
        tally(store=2, bytes=len(key) + len(expected) + len(value) + len(found), writes=1, written=written)
        return found


class CountedStore(CountedCalls, dist.TCPStore):
    pass


class CountedPrefixStore(CountedCalls, dist.PrefixStore):
    pass


def _store_port() -> int:
    """Return a port of this process that listens: nodes try whether they reach the round's first one."""
    if not _STORES:
        _STORES.append(socket.create_server(("127.0.0.1", 0), backlog=4096))
    return int(_STORES[0].getsockname()[1])


@contextmanager
def counted() -> Iterator[None]:
    with (
        mock.patch.object(membership, "socket", CountedSockets()),
        mock.patch.object(c10d_rendezvous_backend, "TCPStore", CountedStore),
        mock.patch.object(dist, "PrefixStore", CountedPrefixStore),
    ):
        yield


@dataclass(frozen=True)
class Spec:
    """What the nodes of one process are to do.

    Attributes:
        who: ``c10d`` or ``etcd``, which are ours, or ``torch``.
        nodes: their numbers; number 0 hosts the run.
        size: nodes of the whole run; the minimum is one fewer.
        keep_alive, last_call: torch's, in seconds; a torch node is dead after three intervals.
    """

    who: str
    run: str
    endpoint: str
    nodes: tuple[int, ...]
    size: int
    keep_alive: int
    last_call: int

    @property
    def least(self) -> int:
        return max(1, self.size - 1)


class Rounds:
    """The rounds that the nodes of a process have received, under one condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.last: dict[int, tuple[int, float]] = {}
        self.numbers: dict[int, int] = {}
        self.leaders: list[int] = []
        self.errors: list[str] = []

    def got(self, node: int, size: int) -> None:
        with self.changed:
            self.last[node] = size, time.monotonic()
            self.numbers[node] = self.numbers.get(node, 0) + 1
            self.changed.notify_all()

    def failed(self, error: str) -> None:
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def emit(self, event: Event) -> None:
        """As an event sink: records who was elected."""
        if isinstance(event, LeaderElected):
            with self.changed:
                self.leaders.append(int(event.node))


class Ours:
    """A node on our rendezvous."""

    def __init__(self, spec: Spec, number: int, rounds: Rounds) -> None:
        endpoint = parse_endpoint(spec.endpoint)
        config = LaunchConfig(
            Command(("python", "train.py"), ("train.py",)),
            Limits(spec.least, spec.size),
            run_id=spec.run,
            backend=spec.who,
            endpoint=endpoint,
            endpoints=(endpoint,) if spec.who == "etcd" else (),
            node_id=str(number),
            local_addr="127.0.0.1",
            is_host=number == 0,
        )
        self._number, self._rounds, self._round = number, rounds, 0
        clock = MonotonicClock()
        self._membership = membership.Membership(
            config, backend_of(config, clock, rounds), clock, self._hear, lambda address: _store_port()
        )

    def join(self) -> None:
        self._membership.start()

    def lost(self) -> None:
        """Do nothing: the leader reports the loss."""

    def _hear(self, event: membership.MembershipEvent) -> None:
        match event:
            case m.Form(round=formed):
                self._round = formed.number
                self._membership.report(m.Joined(formed.number))
                self._rounds.got(self._number, len(formed.members))
            case m.Break(round=number):
                self._membership.report(m.Stopped(number, _store_port()))
            case m.Evicted(reason=reason, final=final):
                # As the agent does, which kills its workers first: on a starved host nodes are silent for too long.
                if final:
                    self._rounds.failed(f"node {self._number}: {reason}")
                else:
                    self._membership.report(m.Stopped(self._round, _store_port()))
            case membership.RendezvousLost(error=error):
                self._rounds.failed(f"node {self._number}: {error.message}")


class Torchs:
    """A node on torch's DynamicRendezvousHandler and its c10d backend, used as torch's agent does."""

    def __init__(self, spec: Spec, number: int, rounds: Rounds) -> None:
        self._spec, self._number, self._rounds = spec, number, rounds
        self._again = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def join(self) -> None:
        self._thread.start()

    def lost(self) -> None:
        """The agent's workers all failed at the moment of the loss, and it joins the next round."""
        self._again.release()

    def _run(self) -> None:
        spec = self._spec
        try:
            options: dict[str, Any] = {"is_host": str(self._number == 0), "read_timeout": "60"}
            parameters = RendezvousParameters("c10d", spec.endpoint, spec.run, spec.least, spec.size, **options)
            backend, store = c10d_rendezvous_backend.create_backend(parameters)
            handler = DynamicRendezvousHandler.from_backend(
                spec.run,
                store,
                backend,
                spec.least,
                spec.size,
                "127.0.0.1",
                RendezvousTimeout(last_call=timedelta(seconds=spec.last_call)),
                keep_alive_interval=spec.keep_alive,
            )
            while True:
                info = handler.next_rendezvous()
                self._rounds.got(self._number, info.world_size)
                self._again.acquire()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
            self._rounds.failed(f"node {self._number}: {type(error).__name__}: {error}")


def serve(spec: Spec, commands: Connection) -> None:
    """Execute commands until killed.

    ``("join",)`` starts the nodes, ``("lost",)`` informs them that a node was lost, ``("report", size, seconds)`` waits
    until all have a round of that size and answers with a dict, ``("count",)`` answers with the tally so far,
    ``("leads",)`` with whether one of the nodes was elected.
    """
    rounds = Rounds()
    kind: Callable[[Spec, int, Rounds], Ours | Torchs] = Torchs if spec.who == "torch" else Ours
    with counted():
        nodes = [kind(spec, number, rounds) for number in spec.nodes]
        commands.send("ready")
        while True:
            match commands.recv():
                case ("join",):
                    for node in nodes:
                        node.join()
                case ("lost",):
                    for node in nodes:
                        node.lost()
                case ("report", size, seconds):
                    commands.send(report(spec, rounds, size, seconds))
                case ("count",):
                    commands.send(dict(TALLY))
                case ("leads",):
                    commands.send(bool(rounds.leaders))


def report(spec: Spec, rounds: Rounds, size: int, seconds: float) -> dict[str, Any]:
    """When the last node had its round, and how many rounds it took."""

    def complete() -> bool:
        return len(rounds.last) == len(spec.nodes) and all(last[0] == size for last in rounds.last.values())

    deadline = time.monotonic() + seconds
    with rounds.changed:
        rounds.changed.wait_for(lambda: complete() or bool(rounds.errors), seconds)
        if not complete():
            there = sum(last[0] == size for last in rounds.last.values())
            errors = "; ".join(rounds.errors[:2])
            return {"missing": f"{there} of {len(spec.nodes)} nodes in a round of {size} {errors}"}
        total = sum(rounds.numbers.values())
    # The nodes still have to answer the round.
    while spec.who != "torch" and TALLY["joined"] < total and time.monotonic() < deadline:
        time.sleep(0.002)
    return {
        "at": max(at for _, at in rounds.last.values()),
        "rounds": max(rounds.numbers.values()),
    }
